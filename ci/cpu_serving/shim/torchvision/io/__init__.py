"""Names of torchvision.io that are looked up at import time."""
from enum import Enum

from torchvision import unavailable as decode_image
from torchvision import unavailable as decode_jpeg

__all__ = ["ImageReadMode", "decode_image", "decode_jpeg"]


class ImageReadMode(Enum):
    """The modes that callers name in default arguments."""

    UNCHANGED = 0
    RGB = 3
