"""What the benchmarks share: turns, and what a result says of its run."""

import pytest
import torch


@pytest.fixture(scope="module")
def gpu(benchmark_module):
    return benchmark_module("gpu")


def test_works_take_turns_forwards_and_backwards(gpu):
    order = []

    def work(name):
        order.append(name)
        return float(len(order))

    found = gpu.in_turns({name: lambda name=name: work(name) for name in "bac"}, 3)
    assert "".join(order) == "bac" + "cab" + "bac"
    assert found == {"b": [1.0, 6.0, 7.0], "a": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


@pytest.mark.parametrize("device", ["CPU", "A GPU"])
def test_a_result_says_when_how_and_on_what_it_was_made(gpu, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "CPU")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(gpu, "driver_version", lambda: "1.2")
    monkeypatch.setattr("sys.argv", ["bench.py", "--out", "a b"])
    found = gpu.describe_run()
    assert (found["device"], found["driver"]) == (device, "none" if device == "CPU" else "1.2")
    assert found["command"] == "python bench.py --out 'a b'" and found["torch"] == torch.__version__ and found["date"].endswith("+00:00")


def test_a_served_tree_is_named_by_its_own_version(benchmark_module, tmp_path):
    (tmp_path / "sglang-0.9.1.dist-info").mkdir()
    versions = benchmark_module("gpu_server").versions
    assert versions(tmp_path)["sglang"] == "0.9.1" and versions(tmp_path / "nothing")["sglang"] == "of unknown version"
