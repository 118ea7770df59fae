"""A server whose flags ask for what it does not know or cannot do does not start, and says why."""
import pytest

from configurations import ENABLE, FUSION, Way, configuration_of
from cpu_serving import trees
from cpu_serving.server import ServerFailed, serve

UNKNOWN_FUSION = Way("fusion-turbo", "overlay", ((ENABLE, "1"), (FUSION, "turbo")))
UNMET_FUSIONS = [Way(f"fusion-{way}", "overlay", ((ENABLE, "1"), (FUSION, way))) for way in ("fused", "separate")]


@pytest.fixture
def refusal_of(model, tree_of):
    """The error a server ends with instead of starting."""

    def get(way: Way) -> str:
        configuration = configuration_of(way, tree_of(trees.BASE, way.tree), model, tp=1)
        log = trees.LOGS / f"refusal-{way.name}.log"
        with pytest.raises(ServerFailed, match="ended with status") as failure, serve(configuration, log):
            pass
        return str(failure.value)

    return get


@pytest.mark.parametrize("way, valid", [
    pytest.param(UNKNOWN_FUSION, ("auto", "fused", "flashinfer", "separate", "eager"), id="fusion"),
])
def test_an_unknown_value_is_refused(way, valid, refusal_of):
    """The error names the flag, the value and the values there are."""
    flag, value = way.flags[-1]
    error = error_line(refusal_of(way), flag)
    assert value in error
    assert all(word in error.split("valid values")[1] for word in valid)


@pytest.mark.parametrize("way", UNMET_FUSIONS, ids=str)
def test_a_way_that_cannot_run_is_refused(way, refusal_of):
    """The error names the flag, the value and the condition that a CPU does not meet."""
    error = error_line(refusal_of(way), FUSION)
    assert f"{FUSION}={way.flags[-1][1]}" in error
    assert "GPU" in error


def error_line(text: str, flag: str) -> str:
    """The last line that names the flag."""
    named = [line for line in text.splitlines() if flag in line]
    assert named, text
    return named[-1]
