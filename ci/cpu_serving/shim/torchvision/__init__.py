"""Lets SGLang be imported where no torchvision fits the installed torch.

It has the names that are looked up at import time and nothing that touches an image: every function raises.
"""
__version__ = "0.0.0+importonly"


def unavailable(*_args, **_kwargs):
    """Stand for any image function."""
    raise NotImplementedError("this torchvision is an import-only stand-in; it cannot read or change images")
