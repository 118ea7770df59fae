"""How the arms of the boundary's server run differ, what a call keeps of an earlier one, and how a rate is taken."""

import json
from pathlib import Path

import pytest

from cpu_serving.checkpoint import Oracle
from sglang_overlay.srt.layers.moe.boundary.policy import Entry, Point, Table

OVERLAY, STOCK = "with-overlay", "pristine"


@pytest.fixture(scope="module")
def module(benchmark_module):
    return benchmark_module("serve_boundary")


@pytest.fixture
def arguments(module, tmp_path):
    def parse(*given):
        return module.parse_arguments(["--overlay", OVERLAY, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out.json"), *given])

    return parse


@pytest.fixture
def policy(tmp_path):
    points = [Point(1, 5.0, {"fused": 4.0, "separate": 5.0}), Point(4, 5.0, {"flashinfer": 4.5, "fused": 4.7}), Point(64, 5.0, {"fused": 6.0})]
    others = [Entry("sm90", 8, 7168, "x", points[2:]), Entry("sm90", 2, 4096, "x", points[:1])]
    file = tmp_path / "policy.json"
    file.write_text(Table([Entry("sm90", 2, 7168, "x", points), *others]).to_json())
    return file


def test_arms_differ_in_their_flags(module, arguments, policy):
    args = arguments("--policy", str(policy))
    enable, fusion = module.ENABLE.name, module.FUSION.name
    assert module.flags_of("stock", args) == module.flags_of("off", args) == {enable: "0"}
    assert module.flags_of("fused", args) == {enable: "1", fusion: "fused", "SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS": "256"}
    assert module.flags_of("flashinfer", args)["SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS"] == "64"
    auto = module.flags_of("auto", args)
    assert auto["SGLANG_MOE_FINALIZE_POLICY"] == str(policy) and enable not in auto and fusion not in auto


def test_stock_is_the_pristine_tree_or_the_overlay_off(module, arguments):
    alone, beside = arguments(), arguments("--stock", STOCK)
    assert str(module.configuration_of("stock", alone).tree) == OVERLAY
    assert str(module.configuration_of("stock", beside).tree) == STOCK
    assert str(module.configuration_of("off", beside).tree) == OVERLAY


def test_all_arms_have_the_same_command(module, arguments):
    args = arguments()
    commands = [module.configuration_of(arm, args).command(1234) for arm in ("stock", *module.ARMS)]
    assert all(command == commands[0] for command in commands)
    command = " ".join(commands[0])
    assert "--cuda-graph-bs-decode 1 2 4 8 16 32 64 128 256" in command and " serve " in command and "--tp 2" in command
    environment = module.configuration_of("fused", args).environment()
    assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["SGLANG_MOE_FINALIZE_FUSION"] == "fused"


def test_the_ways_a_table_names_for_what_is_served(module, arguments, policy):
    assert module.named_ways(arguments("--policy", str(policy), "--batches", "1", "64")) == {"fused"}
    assert module.named_ways(arguments("--policy", str(policy), "--batches", "1", "4")) == {"fused", "flashinfer"}
    assert module.named_ways(arguments("--policy", str(policy), "--batches", "1", "4", "--max-tokens", "2")) == {"fused"}
    assert module.named_ways(arguments("--policy", str(policy), "--hidden", "128")) == set()


def test_prompts_are_fixed_and_different(module):
    asked = module.prompts(64)
    assert asked == module.prompts(64) and len({tuple(prompt) for prompt in asked}) == 64
    assert all(2 <= token < module.VOCABULARY for prompt in asked for token in prompt)
    assert module.prompts(3) == asked[:3]


class Clockwork:
    """A server that takes half a second for a prompt and 10 ms for each step."""

    def seconds_for(self, asked, new_tokens):
        return 0.5 * len(asked) + 0.01 * new_tokens


def test_the_rate_is_of_the_steps_alone(module):
    assert module.decode_rate(Clockwork(), 4, (10, 60)) == pytest.approx(400)


def test_a_rate_that_is_none_is_not_taken(module):
    class Busy:
        def seconds_for(self, asked, new_tokens):
            return 1 / new_tokens

    with pytest.raises(module.ServerFailed, match="too few to time"):
        module.decode_rate(Busy(), 1, (10, 60))


def test_a_call_keeps_what_is_there(module, arguments):
    args = arguments("--resume", "--rounds", "1", "--batches", "1", "--groups", "2", "--phases", "tokens", "speed")
    first = module.Run(args)
    assert first.is_missing("fused")
    first.write_answers("fused", {"2": []})
    assert first.is_missing("fused") and not first.wants_tokens("fused")
    first.speed({"stock": Clockwork(), "fused": Clockwork()})
    assert not module.Run(args).is_missing("fused")
    assert json.loads(args.out.read_text())["speed"]["fused"]["1"][0]["arm"] == pytest.approx([100, 100])
    more = arguments("--resume", "--rounds", "2", "--batches", "1", "--groups", "2", "--phases", "speed")
    assert module.Run(more).wants_speed("fused")
    afresh = arguments("--rounds", "1", "--batches", "1", "--groups", "2", "--phases", "tokens", "speed")
    run = module.Run(afresh)
    assert run.is_missing("fused") and run.wants_tokens("fused") and run.results["speed"] == {}


def test_a_report_alone_reads_what_there_is(module, arguments):
    run = module.Run(arguments("--phases", "tokens", "--groups", "2"))
    run.write_answers("stock", {"2": [{"tokens": [1], "logprobs": [-1.0]}]})
    run.save()
    later = module.Run(arguments("--phases", "report"))
    later.report()
    assert later.results["found"]["tokens"]["stock"]["2"]["bit_equal"] and later.args.out.with_suffix(".md").exists()


def test_the_time_limit_ends_a_call_with_what_is_saved(module, arguments):
    run = module.Run(arguments("--time-limit", "0", "--rounds", "1", "--phases", "speed"))
    with pytest.raises(module.OutOfTime, match="round 0 of fused, batch 1"):
        run.speed({"stock": Clockwork(), "fused": Clockwork()})


def test_arms_that_are_up_together_share_stocks_turns(module, arguments):
    said = []

    class Named(Clockwork):
        def __init__(self, name):
            self.name = name

        def seconds_for(self, asked, new_tokens):
            said.append(self.name)
            return super().seconds_for(asked, new_tokens)

    run = module.Run(arguments("--rounds", "1", "--batches", "1", "--phases", "speed"))
    run.results["speed"] = {"auto": {"1": [{"stock": [1, 1], "arm": [1, 1]}]}}
    run.speed({name: Named(name) for name in ("stock", "auto", "fused", "separate")})
    timed = said[4:]  # after each server's warm-up
    assert timed == [name for name in ("stock", "fused", "separate") * 2 for _ in range(2)]
    speed = run.results["speed"]
    assert speed["fused"]["1"][0]["stock"] == speed["separate"]["1"][0]["stock"] and len(speed["auto"]["1"]) == 1


class Counted(Clockwork):
    log = Path("/dev/null")

    def __init__(self, counters):
        self.counters = counters

    def moe_finalize(self):
        return self.counters

    def generate(self, prompt, new_tokens):
        return None

    def server_info(self):
        return {}


def test_a_server_that_went_another_way_ends_the_run(module, arguments, policy):
    counters = {"ways": {"separate": 3, "fused": 0}, "deferred": {"1": 3}, "not_deferred": {}, "layers": {}}
    run = module.Run(arguments("--phases", "tokens", "--stock", STOCK, "--policy", str(policy)))
    run.check_way("separate", Counted(counters))
    run.check_way("stock", Counted(None))
    for arm in ("fused", "off", "auto"):
        with pytest.raises(module.WayDidNotRun, match="/dev/null"):
            run.check_way(arm, Counted(counters))
    run.check_way("auto", Counted({**counters, "ways": {"fused": 1}}))
    with pytest.raises(module.WayDidNotRun, match="flashinfer"):
        run.check_way("auto", Counted({**counters, "ways": {"fused": 1}}), final=True)


def test_an_arm_that_fails_does_not_take_the_others_along(module, arguments):
    arms = ("flashinfer", "fused", "eager", "separate")
    run = module.Run(arguments("--phases", "speed", "--rounds", "1", "--batches", "2", "--at-once", "2", "--arms", *arms))
    counted = {"stock": {}, "fused": {"separate": 1}, "eager": {"eager": 1}, "separate": {"separate": 1}}

    class EndsUnderWay(Counted):
        def seconds_for(self, asked, new_tokens):
            raise module.ServerFailed("/generate failed: gone")

    def start(arm, stack):
        if arm == "flashinfer":
            raise module.ServerFailed("the server ended with status 1:\nRuntimeError: first\na long log\ntorch.OutOfMemoryError: no memory\nsigquit")
        server = EndsUnderWay if arm == "separate" else Counted
        return server({"ways": counted[arm], "deferred": {}, "not_deferred": {}, "layers": {}}), 1.0

    run.start_one = start
    run.servers()
    assert sorted(run.failed) == ["flashinfer", "fused", "separate"] and run.results["speed"]["eager"]["2"]
    again = module.Run(arguments("--phases", "speed", "--resume", "--rounds", "1", "--batches", "2"))
    assert again.is_missing("fused") and not again.is_missing("eager")
    again.report()
    assert "eager's speed at batch 2" not in again.results["found"]["missing"]
    assert {"stock's tokens", "auto's speed at batch 2"} <= set(again.results["found"]["missing"])
    assert "Not measured: stock's tokens" in again.args.out.with_suffix(".md").read_text()
    assert again.results["found"]["wrong"][0] == "flashinfer failed: the server ended with status 1: torch.OutOfMemoryError: no memory"


def test_the_reference_is_transformers_own(module, tmp_path):
    shape = module.Shape(layers=2, experts=4, topk=2)
    model = module.make_checkpoint(tmp_path / "model", shape)
    asked = [[5, 6, 7, 8], [9]]
    expected = [Oracle(model).greedy(prompt, 3) for prompt in asked]
    found = list(module.Float32(model, "cpu").logprobs(asked, [each.tokens for each in expected]))
    for row, each in zip(found, expected):
        assert row == pytest.approx(each.logprobs, abs=1e-4)
