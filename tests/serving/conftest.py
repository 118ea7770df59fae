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
def tree_of(overlay_tree_of):
    """``(base, "stock" or "overlay")`` -> the tree to serve."""

    def get(base, tree):
        return {"stock": trees.stock_tree, "overlay": overlay_tree_of}[tree](base)

    return get


@pytest.fixture(scope="session")
def observed(model, tree_of):
    """``(place, way of serving)`` -> what its server said; the server runs only while it is asked."""
    seen = {}

    def get(place, way):
        if (place, way) not in seen:
            configuration = configuration_of(way, tree_of(place.base, way.tree), model, place.tp)
            with serve(configuration, trees.LOGS / f"{place}-{way.name}.log") as server:
                seen[place, way] = observe(server, captures=bool(way.capture_layers), metrics=way.metrics)
        return seen[place, way]

    return get

