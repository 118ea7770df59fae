"""Serves the pinned SGLang release, patched or not, on a machine with no GPU: for the demo and for the tests."""
