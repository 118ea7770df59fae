"""The MoE-finalize overlay: the code behind the seams that ``apply.py`` puts into SGLang.

Inside a patched tree this package is ``sglang.sglang_overlay``; its paths mirror those of ``sglang``.
Importing it needs neither CUDA nor FlashInfer nor sgl-kernel: everything of SGLang's is imported
where it is used.
"""
