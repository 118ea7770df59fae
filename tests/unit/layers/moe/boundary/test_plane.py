"""Setting an exchange plane up and giving it back: two ranks as threads, device memory as numbers."""

import sys
import threading
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from sglang_overlay.srt.layers.moe.boundary import model
from sglang_overlay.srt.layers.moe.boundary import plane as plane_module
from sglang_overlay.srt.layers.moe.boundary.kernel import choose_launch
from sglang_overlay.srt.layers.moe.boundary.links import nvlink_unmet
from sglang_overlay.srt.layers.moe.boundary.module import Config
from sglang_overlay.srt.layers.moe.boundary.plane import HOP_BYTES, UNLIMITED, ExchangePlane, PlaneUnavailable, one_shot_tokens

RANKS = 2
CONFIG = Config(RANKS, 7168, 8, torch.bfloat16, torch.float32)


class Memory:
    """What the kernel's module does with device memory, recorded; an operation of a rank may be made to fail."""

    def __init__(self, failing=()):
        self.failing, self.log, self.sizes, self.lock = set(failing), [], [], threading.Lock()

    def of_rank(self, rank):
        def do(what, result):
            def operation(*arguments):
                if (rank, what) in self.failing:
                    raise RuntimeError(f"{what} failed")
                with self.lock:
                    self.log.append((what, rank))
                return result(*arguments)

            return operation

        return SimpleNamespace(
            plane_bytes=lambda max_tokens: 1000 * max_tokens,
            plane_allocate=do("allocate", lambda size: self.sizes.append(size) or 100 + rank),
            plane_export=do("export", lambda pointer: bytes([pointer])),
            plane_open=do("open", lambda handle: 1000 + handle[0]),
            plane_close=do("close", lambda pointer: None),
            plane_free=do("free", lambda pointer: None),
        )


@pytest.fixture
def run(monkeypatch):
    """Call a function as each rank, in a thread each; give what each returned or raised."""
    local, barrier, values = threading.local(), threading.Barrier(RANKS, timeout=10), [None] * RANKS

    def all_gather(value, group, world_size):
        values[local.rank] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered

    monkeypatch.setattr(plane_module, "_all_gather", all_gather)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: local.rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: RANKS)
    monkeypatch.setattr("torch.cuda.current_device", lambda: local.rank)
    monkeypatch.setattr(plane_module, "nvlink_unmet", lambda own, peer: "")
    multiprocessors = {0: 132, 1: 114}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=multiprocessors[device], uuid=f"uuid{device}")
    )

    def run(memory, act):
        monkeypatch.setattr(plane_module, "load", lambda config: memory.of_rank(local.rank))
        outcomes = [None] * RANKS

        def one(rank):
            local.rank = rank
            try:
                outcomes[rank] = act()
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return outcomes

    return run


def create(config=CONFIG, **told):
    return ExchangePlane.create("group", config, 64, **told)


def test_each_rank_maps_its_peer_and_lays_launches_out_by_the_smaller_gpu(run):
    planes = run(Memory(), create)
    assert [plane.regions[0].pointers.tolist() for plane in planes] == [[100, 1101], [1100, 101]]
    assert {plane.multiprocessors for plane in planes} == {114}
    assert all(region.pointers.dtype == torch.int64 and region.pointers.device.type == "cpu" for plane in planes for region in plane.regions)


def test_a_rank_alone_needs_nobody_to_map_its_memory(monkeypatch):
    import torch.distributed as dist

    memory = Memory(failing={(0, "export"), (0, "open")})
    module = memory.of_rank(0)
    module.plane_bytes = lambda max_tokens: 1
    monkeypatch.setattr(plane_module, "load", lambda config: module)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132, uuid="one"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plane = ExchangePlane.create(dist.group.WORLD, CONFIG._replace(world_size=1), 64)
        assert (plane.rank, plane.max_tokens, [region.max_tokens for region in plane.regions]) == (0, 64, [64, 0])
        assert plane.regions[0].pointers.tolist() == [100] and memory.sizes == [256]
        plane.close()
    finally:
        dist.destroy_process_group()
    assert memory.log == [("allocate", 0), ("free", 0)]


def test_two_ranks_have_room_for_one_shot_alone(run):
    memory = Memory()
    assert [region.max_tokens for region in run(memory, create)[0].regions] == [64, 0]
    assert memory.sizes == [64_000] * RANKS


def test_more_ranks_have_a_region_of_each_regime_one_behind_the_other(run):
    memory, eight = Memory(), CONFIG._replace(world_size=8)
    for plane in run(memory, lambda: create(eight)):
        one_shot, two_shot = plane.regions
        assert (one_shot.max_tokens, two_shot.max_tokens) == (5, 64)
        assert (two_shot.pointers - one_shot.pointers).tolist() == [5120] * RANKS  # 5 rows of 1000 bytes, up to a multiple of 256
    assert memory.sizes == [5120 + 64_000] * RANKS
    assert [region.max_tokens for region in run(memory, lambda: create(eight, rows=(64, 64)))[0].regions] == [64, 64]


@pytest.mark.parametrize("hidden", [512, 4096, 7168, 8192])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_one_shot_sends_at_most_what_a_hop_is_worth_more_than_two_shot(hidden, world_size):
    most = one_shot_tokens(hidden, world_size)
    assert most >= 1 and (most == UNLIMITED) == (world_size <= 2)

    def more(tokens):
        return tokens * 2 * hidden * ((world_size - 1) - Fraction(2 * (world_size - 1), world_size))

    assert more(most) <= HOP_BYTES and (most == UNLIMITED or more(most + 1) > HOP_BYTES)


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 512])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_plane_has_room_for_every_launch_that_is_chosen(run, world_size, max_tokens):
    config = CONFIG._replace(world_size=world_size)
    regions = run(Memory(), lambda: ExchangePlane.create("group", config, max_tokens))[0].regions
    for tokens in range(1, max_tokens + 1):
        launch = choose_launch(tokens, config.hidden, world_size, 132)
        assert tokens <= regions[launch.two_shot].max_tokens


@pytest.mark.parametrize("hidden", [1000, 2048, 7168])
def test_a_rank_alone_gives_every_token_a_cluster(hidden):
    assert all(choose_launch(tokens, hidden, 1, 132).clusters == tokens for tokens in range(1, 513))


def test_memory_is_freed_once_every_rank_has_unmapped_it(run):
    memory = Memory()
    run(memory, lambda: create().close())
    steps = [what for what, _ in memory.log]
    assert sorted(steps[-4:]) == ["close", "close", "free", "free"] and steps[-2:] == ["free", "free"]


@pytest.mark.parametrize("step", ["allocate", "export", "open"])
def test_what_one_rank_cannot_do_no_rank_has_and_nothing_is_left_behind(run, step):
    memory = Memory({(1, step)})
    outcomes = run(memory, create)
    assert all(isinstance(outcome, PlaneUnavailable) for outcome in outcomes)
    assert all("rank 1" in str(outcome) and f"{step} failed" in str(outcome) for outcome in outcomes)
    counts = {what: sum(done == what for done, _ in memory.log) for what in ("allocate", "free", "open", "close")}
    assert counts["allocate"] == counts["free"] and counts["open"] == counts["close"]


def test_a_rank_that_cannot_unmap_still_ends_alike(run):
    outcomes = run(Memory({(0, "open"), (1, "close")}), create)
    assert all(isinstance(outcome, PlaneUnavailable) for outcome in outcomes)


def test_without_nvlink_no_rank_has_a_plane_and_the_gpus_are_named(run, monkeypatch):
    monkeypatch.setattr(plane_module, "nvlink_unmet", lambda own, peer: f"no NVLink between {own} and {peer}" if own == "GPU-uuid1" else "")
    memory = Memory()
    outcomes = run(memory, create)
    assert [str(outcome) for outcome in outcomes] == [
        "the exchange plane could not be set up (rank 1: RuntimeError: no NVLink between GPU-uuid1 and GPU-uuid0)"] * RANKS
    steps = [what for what, _ in memory.log]
    assert steps.count("open") == steps.count("close") == 1 and steps.count("allocate") == steps.count("free") == RANKS


class Nvml:
    """pynvml with two GPUs joined and a third on PCIe; by the real package's names."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self):
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.open
        return {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}[uuid]

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        assert self.open and index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if {one, other} == {0, 1} else 5


def test_nvlink_is_what_nvml_says(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert nvlink_unmet("GPU-a", "GPU-b") == nvlink_unmet("GPU-c", "GPU-c") == ""
    assert nvlink_unmet("GPU-a", "GPU-c") == "no NVLink between GPU-a and GPU-c (NVML's P2P status 5)"
    with pytest.raises(KeyError):
        nvlink_unmet("GPU-a", "GPU-of-another-node")
    assert nvml.open == 0


def test_nvml_has_the_names_that_are_asked():
    import pynvml  # SGLang requires it, and so do its tests

    assert all(hasattr(pynvml, name) for name in dir(Nvml) if name.lower().startswith("nvml"))
    assert (pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK) == (Nvml.NVML_P2P_CAPS_INDEX_NVLINK, Nvml.NVML_P2P_STATUS_OK)


@pytest.mark.parametrize("world_size, unmet", [(0, "1 to 8 ranks, there are 0"), (1, ""), (8, ""), (9, "1 to 8 ranks, there are 9")])
def test_the_kernel_is_for_one_to_eight_ranks(monkeypatch, world_size, unmet):
    monkeypatch.setattr(model, "_machine_unmet", lambda: "")
    monkeypatch.setattr(model, "_compiler_unmet", lambda: "")
    found = model.fused_unmet(model.Facts(world_size, 7168, 8, torch.bfloat16, torch.float32, ()))
    assert found.endswith(unmet) and bool(found) == bool(unmet)
