"""Names of torchvision.transforms.v2 that are looked up at import time."""
