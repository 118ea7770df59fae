"""Holds only the ops that SGLang imports from vLLM where there is no GPU."""
