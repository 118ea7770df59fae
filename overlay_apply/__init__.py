"""The patch engine: structural edits on an SGLang tree, all written or none, and taken back byte for byte."""

__version__ = "1.0.0"

OVERLAY_NAME = "sglang_overlay"
STATE_NAME = ".sglang_overlay_state"
