"""What a server says of each feature at its start, and where its counts go."""

import logging
import sys
import types

import pytest
import torch

from sglang_overlay.srt import environ
from sglang_overlay.srt.environ import ENABLE, TRITON_UE8M0
from sglang_overlay.srt.layers.moe import counters as counting
from sglang_overlay.srt.layers.moe.counters import Counters, bucket
from sglang_overlay.srt.layers.quantization import fp8
from sglang_overlay.srt.layers.quantization.mxfp4_megamoe import Mxfp4MegaMoEMethod
from sglang_overlay.srt.managers import scheduler as seam
from sglang_overlay.srt.managers import start
from sglang_overlay.srt.observability.metrics_collector import MoeFinalizeMetrics

NAMES = {"enable": ENABLE, "ue8m0": TRITON_UE8M0, "max_tokens": environ.MAX_TOKENS, "megamoe": environ.MXFP4_MEGAMOE,
         "fusion": environ.FUSION}


class Layer(torch.nn.Module):
    """A layer's MoE; ``reason``: why it does not defer, or does not have power-of-two scales."""

    def __init__(self, reason="", boundary=None, quant_method=None):
        super().__init__()
        self.reason = reason
        self.quant_method = quant_method
        if boundary is not None:
            self.moe_boundary = boundary


def model_of(*layers):
    return torch.nn.ModuleList(layers)


@pytest.fixture
def flags(monkeypatch):
    """Set the flags of this process."""

    def set_flags(**values):
        for name, value in values.items():
            monkeypatch.setenv(NAMES[name].name, value)
        environ.settings.cache_clear()

    for flag in environ.FLAGS:
        monkeypatch.delenv(flag.name, raising=False)
    set_flags()
    yield set_flags
    environ.settings.cache_clear()


@pytest.fixture
def deferral(monkeypatch, flags):
    monkeypatch.setattr(start, "is_moe", lambda module: isinstance(module, Layer))
    monkeypatch.setattr(start, "row_or_reason", lambda layer: (None, layer.reason))
    return flags


BOUNDARY = types.SimpleNamespace(ranges=lambda max_tokens: f"eager up to {max_tokens} tokens")


@pytest.mark.parametrize(
    "values, layers, line",
    [
        ({"enable": "0"}, [Layer()], f"not active: {ENABLE.name}=0, SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS=192"),
        ({"enable": "1", "max_tokens": "0"}, [Layer()], f"not active: {ENABLE.name}=1, SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS=0"),
        ({"enable": "1"}, [], start.NO_MOE),
        ({}, [Layer()], f"not active: {start.OFF_UNDER_AUTO}"),
        ({"fusion": "fused"}, [Layer()], f"not active: {start.OFF_UNDER_AUTO}; SGLANG_MOE_FINALIZE_FUSION=fused alone does not make it defer"),
        (
            {"enable": "1"},
            [Layer(boundary=BOUNDARY), Layer(boundary=BOUNDARY), Layer(), Layer("too wide")],
            f"active in 3 of 4 MoE layers ({ENABLE.name}=1, up to 192 tokens): 2 handed to the next layer, taken by eager up to 192 tokens; "
            "not in others: too wide (1 of 4 MoE layers)",
        ),
        ({"enable": "1"}, [Layer()], f"active in 1 of 1 MoE layers ({ENABLE.name}=1, up to 192 tokens): each finalized in its layer"),
        (
            {"enable": "1"},
            [Layer("LoRA"), Layer("LoRA"), Layer("too wide")],
            f"not active ({ENABLE.name}=1, up to 192 tokens): LoRA (2 of 3 MoE layers); too wide (1 of 3 MoE layers)",
        ),
    ],
)
def test_deferrals_line(deferral, values, layers, line):
    deferral(**values)
    assert start.deferred_finalize(model_of(*layers)) == line


def method(**fields):
    config = types.SimpleNamespace(scale_fmt=fields.pop("scale_fmt", None))
    return types.SimpleNamespace(**{"quant_config": config, "scale_ue8m0": True, **fields})


@pytest.fixture
def ue8m0(monkeypatch, flags):
    module = types.ModuleType("sglang.srt.layers.moe.fused_moe_triton.layer")
    module.FusedMoE = Layer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fp8, "_is_in_the_tree", lambda: True)
    monkeypatch.setattr(fp8, "_unfit", lambda quant_method: getattr(quant_method, "unfit", ""))
    return flags


@pytest.mark.parametrize(
    "values, methods, line",
    [
        ({}, [], start.NO_MOE),
        ({}, [method(scale_fmt="ue8m0")], f"active in 1 of 1 MoE layers ({TRITON_UE8M0.name}=auto): activation scales are powers of two"),
        ({}, [method()], f"not active ({TRITON_UE8M0.name}=auto): the checkpoint does not declare scale_fmt: ue8m0 (1 of 1 MoE layers)"),
        ({"ue8m0": "off"}, [method()], f"not active ({TRITON_UE8M0.name}=off): {TRITON_UE8M0.name}=off (1 of 1 MoE layers)"),
        ({"ue8m0": "on"}, [method()], f"active in 1 of 1 MoE layers ({TRITON_UE8M0.name}=on): activation scales are powers of two"),
        ({}, [method(scale_fmt="ue8m0", scale_ue8m0=False)],
         f"not active ({TRITON_UE8M0.name}=auto): its experts were of another format until their weights were loaded (1 of 1 MoE layers)"),
        ({}, [method(unfit="its experts are INT8")], f"not active ({TRITON_UE8M0.name}=auto): its experts are INT8 (1 of 1 MoE layers)"),
    ],
)
def test_ue8m0s_line(ue8m0, values, methods, line):
    ue8m0(**values)
    assert start.ue8m0_triton_moe(model_of(*(Layer(quant_method=each) for each in methods))) == line


@pytest.mark.parametrize(
    "value, methods, line",
    [
        ("0", [method()], "not active: SGLANG_MOE_MXFP4_MEGAMOE_SM90=0"),
        ("1", [], start.NO_MOE),
        ("1", [Mxfp4MegaMoEMethod.__new__(Mxfp4MegaMoEMethod)],
         "active in 1 of 1 MoE layers (SGLANG_MOE_MXFP4_MEGAMOE_SM90=1): in FlashInfer's mega kernel"),
        ("1", [method()], "not active (SGLANG_MOE_MXFP4_MEGAMOE_SM90=1): its experts are of another method, or "
         "--moe-a2a-backend is not flashinfer_megamoe (1 of 1 MoE layers)"),
    ],
)
def test_megamoes_line(ue8m0, value, methods, line):
    ue8m0(megamoe=value)
    assert start.mxfp4_megamoe_sm90(model_of(*(Layer(quant_method=each) for each in methods))) == line


def test_ue8m0_says_that_it_was_left_out(ue8m0, monkeypatch):
    monkeypatch.setattr(fp8, "_is_in_the_tree", lambda: False)
    assert "left out of this tree" in start.ue8m0_triton_moe(model_of(Layer(quant_method=method())))


@pytest.fixture
def logged(monkeypatch):
    """What is logged on rank 0."""
    module, lines = types.ModuleType("sglang.srt.utils"), []
    module.log_info_on_rank0 = lambda logger, line: lines.append(line)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = types.ModuleType("sglang.srt.environ")
    theirs.envs = type("Envs", (), {"SGLANG_MOE_FINALIZE_FUSIONS": None})()
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    return lines


def test_every_feature_has_a_line():
    from overlay_apply.bases import load_manifest
    from overlay_apply.project import here

    assert {name for name, _ in start.FEATURES} == set(load_manifest(here().patches).features)


def test_a_line_that_fails_says_so_and_the_next_is_told(monkeypatch, logged):
    def fails(model):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(start, "FEATURES", (("one", fails), ("two", lambda model: "active")))
    start.tell_features(None)
    assert logged == [
        "MoE overlay, one: it could not be told whether it is active: RuntimeError('no such thing')",
        "MoE overlay, two: active",
    ]


def test_a_variable_that_looks_like_a_flag_is_told(monkeypatch, logged):
    monkeypatch.setattr(start, "FEATURES", ())
    for variable in ("SGLANG_MOE_FINALIZE_FUSON", "SGLANG_MOE_FINALIZE_FUSIONS"):
        monkeypatch.setenv(variable, "fused")
    start.tell_features(None)
    assert logged == ["MoE overlay: SGLANG_MOE_FINALIZE_FUSON is set, and nothing reads it; the flag is SGLANG_MOE_FINALIZE_FUSION"]


class FakeCounter:
    """A prometheus_client.Counter that keeps its values by labels."""

    made = {}

    def __init__(self, name, documentation, labelnames):
        self.names, self.values = list(labelnames), {}
        FakeCounter.made[name] = self

    def labels(self, *values):
        assert len(values) == len(self.names)
        return types.SimpleNamespace(inc=lambda count: self.values.update({values: self.values.get(values, 0) + count}))


COLLECTOR = types.SimpleNamespace(labels={"model_name": "m", "tp_rank": 0}, _counter_cls=FakeCounter)


def test_counts_go_on_to_the_metrics_those_made_before_too():
    counters = Counters()
    counters.count_deferred(3)
    counters.count_way("eager", 5)
    counters.count_not_deferred("too many")
    counters.export_to(MoeFinalizeMetrics(COLLECTOR))
    counters.count_deferred(4)
    counters.count_way("eager", 8)
    counters.count_way("fused", 9)
    counters.count_not_deferred("too many")
    assert {name: counter.values for name, counter in FakeCounter.made.items()} == {
        "sglang:moe_finalize_deferred": {("m", 0): 2},
        "sglang:moe_finalize_not_deferred": {("m", 0, "too many"): 2},
        "sglang:moe_finalize_finalized": {("m", 0, "eager", "8"): 2, ("m", 0, "fused", "16"): 1},
    }
    assert counters.snapshot()["ways_by_tokens"]["eager"] == {"8": 2}
    assert counters.snapshot()["ways"]["eager"] == 2


@pytest.mark.parametrize("tokens, up_to", [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (192, 256)])
def test_buckets_are_powers_of_two(tokens, up_to):
    assert bucket(tokens) == up_to


def test_a_compiled_forward_does_not_reach_the_metrics(monkeypatch):
    counters = Counters()
    counters.export_to(MoeFinalizeMetrics(COLLECTOR))
    monkeypatch.setattr(counting.torch.compiler, "is_compiling", lambda: True)
    counters.count_not_deferred("compiled")
    assert counters.not_deferred["compiled"] == 1
    assert FakeCounter.made["sglang:moe_finalize_not_deferred"].values == {}


def test_counting_under_a_compiler_leaves_the_graph_whole():
    counters = Counters()
    counters.export_to(MoeFinalizeMetrics(COLLECTOR))

    @torch.compile(backend="eager", fullgraph=True)
    def forward(x):
        counters.count_not_deferred("compiled")
        return x + 1

    assert torch.equal(forward(torch.zeros(2)), torch.ones(2))


def scheduler_of(metrics_on: bool, model=None):
    return types.SimpleNamespace(
        tp_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model)),
        metrics_collector_context=types.SimpleNamespace(current_scheduler_metrics_enabled=metrics_on),
        metrics_collector=COLLECTOR,
    )


@pytest.mark.parametrize("metrics_on", [True, False])
def test_the_schedulers_seam(monkeypatch, logged, metrics_on):
    counters = Counters()
    monkeypatch.setattr(seam, "COUNTERS", counters)
    monkeypatch.setattr(start, "FEATURES", (("one", lambda model: f"active in {model}"),))
    seam.tell_start(scheduler_of(metrics_on, "this model"))
    assert logged == ["MoE overlay, one: active in this model"]
    assert (counters.exporter is not None) == metrics_on


def test_a_refused_flag_stops_a_server_whose_model_has_no_moe(flags):
    flags(fusion="turbo")
    with pytest.raises(environ.FlagError, match="SGLANG_MOE_FINALIZE_FUSION"):
        seam.tell_start(scheduler_of(False, "this model"))


def test_no_server_stops_over_its_start_lines(caplog):
    with caplog.at_level(logging.WARNING):
        seam.tell_start(types.SimpleNamespace())
    assert [record.message for record in caplog.records] == [
        "MoE overlay: tell_features failed; serving goes on without it",
        "MoE overlay: export_counters failed; serving goes on without it",
    ]
