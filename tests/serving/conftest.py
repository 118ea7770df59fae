"""Fixtures of the serving tests: one server start for each configuration, all prompts on it, one server at a time."""
from pathlib import Path

import pytest

from configurations import MODEL_SHAPE, NEW_TOKENS, PROMPTS, configuration_of
from cpu_serving import trees
from cpu_serving.checkpoint import Oracle, make_checkpoint
from cpu_serving.server import serve
from observations import observe

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark every test of this folder as a serving test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.serving)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The checkpoint that every server serves."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", MODEL_SHAPE)


@pytest.fixture(scope="session")
def reference(model):
    """The checkpoint in transformers."""
    return Oracle(model)


@pytest.fixture(scope="session")
def oracle(reference):
    """What transformers says for each prompt."""
    return [reference.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def tree_of(overlay_tree):
    """``"stock"`` or ``"overlay"`` -> the tree to serve."""
    return {"stock": trees.stock_tree(), "overlay": overlay_tree}.__getitem__


@pytest.fixture(scope="session")
def observed(model, tree_of):
    """``(tp, way of serving)`` -> what its server said; the server runs only while it is asked."""
    seen = {}

    def get(tp, way):
        if (tp, way) not in seen:
            configuration = configuration_of(way, tree_of(way.tree), model, tp)
            with serve(configuration, trees.LOGS / f"tp{tp}-{way.name}.log") as server:
                seen[tp, way] = observe(server, captures=bool(way.capture_layers))
        return seen[tp, way]

    return get

