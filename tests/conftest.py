"""What all tests share."""
import functools
import importlib.util
import sys

import pytest

from cpu_serving import trees

# SGLang's own test runner collects these; they need its test kits.
collect_ignore = ["registered"]


@pytest.fixture(scope="session")
def overlay_tree_of(tmp_path_factory):
    """``base`` -> a folder with that release's sglang package, the overlay of this checkout applied to it.

    In a folder of this run, so that two runs side by side do not take it from each other.
    """
    return functools.cache(lambda base: trees.overlay_tree(tmp_path_factory.mktemp("overlay") / "tree", base))


@pytest.fixture(scope="session")
def overlay_tree(overlay_tree_of):
    """The same for the base that most tests are about."""
    return overlay_tree_of(trees.BASE)


@pytest.fixture(scope="session")
def interpret():
    """``module`` -> a copy of it, its Triton kernels run by Triton's interpreter, on CPU tensors."""

    def interpret(module):
        name = "{}.interpreted_{}".format(*module.__name__.rsplit(".", 1))
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        copy = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setitem(sys.modules, name, copy)
            spec.loader.exec_module(copy)
        return copy

    return interpret


def pytest_collection_modifyitems(items):
    """Skip GPU tests that were asked for on a machine without a GPU."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_gpu():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
