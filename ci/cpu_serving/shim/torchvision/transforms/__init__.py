"""Names of torchvision.transforms that are looked up at import time."""
from enum import Enum

InterpolationMode = Enum(
    "InterpolationMode",
    {name.upper().replace("-", "_"): name
     for name in ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")},
)
