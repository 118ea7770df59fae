"""SGLang's process groups and settings for one rank in this process, as its model runner sets them up."""
import json
import socket
from pathlib import Path

import torch

from cpu_serving import ranks


def start_one_rank(folder: Path, hidden: int = 512) -> str:
    """Publish settings for one rank and the Triton MoE runner, on the GPU where there is one, else on the CPU; gives the device.

    ``folder`` takes the configuration of a stand-in model.
    """
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_attention_heads": 8,
        "num_hidden_layers": 1, "vocab_size": 128, "intermediate_size": 256, "max_position_embeddings": 128,
    }))
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    args = ServerArgs(model_path=str(folder), device=device, dtype="bfloat16", skip_tokenizer_init=True,
                      moe_runner_backend="triton", attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
                      disable_shared_experts_fusion=True)
    ranks.publish(args)
    initialize_moe_config()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks.join_groups(args, f"tcp://127.0.0.1:{port}", backend=backend)
    return device
