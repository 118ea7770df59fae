"""What is served: the model, the prompts, and the ways of serving that are compared."""
from dataclasses import dataclass

from cpu_serving import trees
from cpu_serving.checkpoint import Shape
from cpu_serving.server import Configuration

# One dense layer, then three MoE layers: two that hand their output on (one of them also takes one), and the last.
MODEL_SHAPE = Shape(layers=4)
MOE_LAYERS = [str(layer) for layer in range(MODEL_SHAPE.first_k_dense_replace, MODEL_SHAPE.layers)]
CARRYING_LAYERS = MOE_LAYERS[:-1]
TAKING_LAYERS = tuple(int(layer) + 1 for layer in CARRYING_LAYERS)

PROMPTS = [[7], [5, 6, 7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(100, 140))]
NEW_TOKENS = 4

ENABLE = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"
FUSION = "SGLANG_MOE_FINALIZE_FUSION"
MAX_TOKENS = "SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS"
DEFAULT_MAX_TOKENS = 192


@dataclass(frozen=True)
class Place:
    """Which release is served, and on how many ranks."""

    base: str
    tp: int

    def __str__(self):
        return f"{self.base}-tp{self.tp}"


# Every base on two ranks, where bundles are reduced; one rank only on the first, since each server takes most of a minute.
PLACES = [Place(trees.BASE, 1), *(Place(base, 2) for base in trees.BASES)]


@dataclass(frozen=True)
class Way:
    """One way of serving: which tree, with which flags."""

    name: str
    tree: str
    flags: tuple[tuple[str, str], ...] = ()
    capture_layers: tuple[int, ...] = ()
    metrics: bool = False

    def __str__(self):
        return self.name


STOCK_0 = Way("stock-0", "stock", ((ENABLE, "0"),))
STOCK_UNSET = Way("stock-unset", "stock")
OFF_0 = Way("overlay-0", "overlay", ((ENABLE, "0"),))
OFF_UNSET = Way("overlay-unset", "overlay")
# The layers that take a bundle hand out, as for Eagle3, the residual they make of it.
ON_AUTO = Way("overlay-1-auto", "overlay", ((ENABLE, "1"),), capture_layers=TAKING_LAYERS)
# The longest prompt and the batch of all prompts have more tokens than this, so that both sides of the limit are seen.
ON_EAGER = Way("overlay-1-eager", "overlay", ((ENABLE, "1"), (FUSION, "eager"), (MAX_TOKENS, "32")), metrics=True)

STOCK = (STOCK_0, STOCK_UNSET)
OFF = (OFF_0, OFF_UNSET)
ON = (ON_EAGER, ON_AUTO)


def ways_at(place: Place, *ways: Way) -> list[Way]:
    """Those that are served there: on one rank nothing without the flag, on two the stock release without it."""
    elsewhere = (STOCK_UNSET, OFF_UNSET) if place.tp == 1 else (STOCK_0,)
    return [way for way in ways if way not in elsewhere]


def stock_beside(place: Place) -> Way:
    """The stock release that a server with the overlay switched off is compared with."""
    return STOCK_0 if place.tp == 1 else STOCK_UNSET


def configuration_of(way: Way, tree, model, tp: int) -> Configuration:
    """The server configuration of a way of serving."""
    arguments = ["--enable-metrics"] if way.metrics else []
    return Configuration(tree, model, tp, dict(way.flags), arguments, capture_layers=way.capture_layers)
