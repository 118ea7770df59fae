"""SGLang in this process: one rank, on the GPU where there is one, else on the CPU."""

import json
import os
import socket

import pytest
import torch

HIDDEN, INTERMEDIATE = 512, 256


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    """SGLang's process groups and settings for one rank, as its model runner sets them up; gives the device."""
    os.environ["SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"] = "1"
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": 8,
        "num_hidden_layers": 1, "vocab_size": 128, "intermediate_size": INTERMEDIATE, "max_position_embeddings": 128,
    }))
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    args = ServerArgs(model_path=str(folder), device=device, dtype="bfloat16", skip_tokenizer_init=True,
                      moe_runner_backend="triton", attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
                      disable_shared_experts_fusion=True)
    publish(args, role="weight_cache_daemon")
    initialize_moe_config()
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend=backend,
                                 distributed_init_method=f"tcp://127.0.0.1:{free_port()}")
    initialize_model_parallel(backend=backend)
    initialize_dp_attention(args, ModelConfig(model_path=str(folder), dtype="bfloat16"))
    return device


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
