"""Setting an exchange plane up and giving it back: two ranks as threads, device memory as numbers."""

import threading
from types import SimpleNamespace

import pytest
import torch

from sglang_overlay.srt.layers.moe.boundary import plane as plane_module
from sglang_overlay.srt.layers.moe.boundary.module import Config
from sglang_overlay.srt.layers.moe.boundary.plane import ExchangePlane, PlaneUnavailable

RANKS = 2
CONFIG = Config(RANKS, 7168, 8, torch.bfloat16, torch.float32)


class Memory:
    """What the kernel's module does with device memory, recorded; an operation of a rank may be made to fail."""

    def __init__(self, failing=()):
        self.failing, self.log, self.lock = set(failing), [], threading.Lock()

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
            plane_allocate=do("allocate", lambda size: 100 + rank),
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
    multiprocessors = {0: 132, 1: 114}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=multiprocessors[device])
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


def create():
    return ExchangePlane.create("group", CONFIG, 64)


def test_each_rank_maps_its_peer_and_lays_launches_out_by_the_smaller_gpu(run):
    planes = run(Memory(), create)
    assert [plane.pointers.tolist() for plane in planes] == [[100, 1101], [1100, 101]]
    assert {plane.multiprocessors for plane in planes} == {114}
    assert all(plane.pointers.dtype == torch.int64 and plane.pointers.device.type == "cpu" for plane in planes)


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


def test_a_plane_keeps_to_one_regime(run):
    plane = run(Memory(), create)[0]
    plane.keep_to(False)
    plane.keep_to(False)
    with pytest.raises(ValueError, match="regime of its first launch"):
        plane.keep_to(True)
