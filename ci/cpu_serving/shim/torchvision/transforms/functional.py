"""Names of torchvision.transforms.functional that are looked up at import time."""
from torchvision import unavailable as pil_to_tensor
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode", "pil_to_tensor"]
