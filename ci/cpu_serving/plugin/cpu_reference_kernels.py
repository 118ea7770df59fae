"""SGLang plugin, found through its entry point when this folder is on PYTHONPATH.

It supplies what has no CPU build and what the Triton MoE runner cannot do without: ``moe_align_block_size``.
On request it also has the target model hand out hidden states on the way, as it does for Eagle3: speculation itself
needs kernels that have no CPU build, the capture does not.
"""
import os

import torch

CAPTURE = "CPU_SERVING_CAPTURE_LAYERS"  # ids of the layers whose input is captured, with commas between them

_ALIGN = "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size.moe_align_block_size"
_AUXILIARY = (
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state.resolve_spec_aux_hidden_state_config"
)


def register() -> None:
    """Called by SGLang once in each process, before it builds a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ALIGN, moe_align_block_size, HookType.REPLACE)
    if os.environ.get(CAPTURE):
        HookRegistry.register(_AUXILIARY, ask_for_capture, HookType.AFTER)


def moe_align_block_size(topk_ids, block_size, num_experts, *_unused, **_also_unused):
    """Sort the flat (token, k) slots by expert and pad each expert's run to whole blocks.

    Returns the slots (one past the last slot where padded), each block's expert, and the padded length.
    """
    flat = topk_ids.flatten()
    slots, block_experts = [], []
    for expert in range(num_experts):
        own = torch.nonzero(flat == expert).flatten().tolist()
        own += [flat.numel()] * (-len(own) % block_size)
        slots += own
        block_experts += [expert] * (len(own) // block_size)
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (slots, block_experts, [len(slots)]))


def ask_for_capture(config, *_unused, **_also_unused):
    """Turn on Eagle3's capture of hidden states for the layers the environment names."""
    config.eagle_use_aux_hidden_state = True
    config.eagle_aux_hidden_state_layer_ids = [int(layer) for layer in os.environ[CAPTURE].split(",")]
    return config
