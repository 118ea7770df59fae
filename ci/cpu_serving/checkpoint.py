"""A tiny, seeded DeepSeek-V3 MoE checkpoint, and what transformers says for it.

transformers is the independent oracle: a correct server gives the same greedy tokens, and in float32 logprobs that
agree to about 1e-5. (Dummy weights would not do: they are so small that every model says the same.)

usage: python -m cpu_serving.checkpoint FOLDER [--hidden 256] [--layers 3] … [--prompt 5 6 7] [--new-tokens 6]
"""
import argparse
import dataclasses
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; must be set before transformers is imported

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

VOCABULARY = 1024
DEFAULT_PROMPT = (5, 6, 7, 8, 9, 10)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What may differ from one tiny checkpoint to the next."""

    hidden: int = 256
    layers: int = 3
    experts: int = 8
    topk: int = 2
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    expert_width: int = 256
    spread: float = 0.06  # of the weights: large enough that different inputs give clearly different tokens
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Greedy tokens, their logprobs, and how far each was ahead of the second best."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def model_config(shape: Shape) -> dict:
    """The config.json of a checkpoint of this shape."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": 4096,
    }
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 1024,
        },
    }
    experts = {
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.n_shared_experts,
        "num_experts_per_tok": shape.topk,
        "first_k_dense_replace": shape.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    rest = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {**rest, **sizes, **attention, **experts}


def make_checkpoint(folder: Path, shape: Shape = Shape(), dtype: torch.dtype = torch.float32, device: str = "cpu") -> Path:
    """Write a checkpoint of this shape, the same bytes for the same arguments."""
    config = model_config(shape)
    torch.manual_seed(shape.seed)
    with torch.device(device):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=shape.spread)
        else:
            parameter.data.uniform_(0.5, 1.5)  # norm weights: away from 1, so that a lost one shows
    model.save_pretrained(folder)
    # transformers rewrites the rope settings in a form of its own; the server reads the original one.
    (Path(folder) / "config.json").write_text(json.dumps({**config, "torch_dtype": str(dtype).rpartition(".")[2]}, indent=1))
    return Path(folder)


class Oracle:
    """Greedy continuations of a checkpoint as transformers computes them, without a cache and in float32."""

    def __init__(self, folder: Path):
        self._model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(self, prompt, new_tokens: int) -> Continuation:
        """Continue a prompt of token ids."""
        ids, logprobs, margins = list(prompt), [], []
        for _ in range(new_tokens):
            row = self._model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            (best, second), (token, _) = (part.tolist() for part in row.topk(2))
            ids.append(token)
            logprobs.append(best)
            margins.append(best - second)
        return Continuation(ids[len(prompt):], logprobs, margins)

    @torch.no_grad()
    def layer_inputs(self, ids, layers) -> torch.Tensor:
        """The hidden states that enter each of the layers, side by side: ``[tokens, len(layers) * hidden]``."""
        states = self._model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], dim=-1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a tiny DeepSeek-V3 checkpoint; print its greedy continuation.")
    parser.add_argument("folder", type=Path)
    for field in dataclasses.fields(Shape):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, metavar="N", help="default %(default)s")
    parser.add_argument("--prompt", type=int, nargs="+", default=list(DEFAULT_PROMPT), metavar="TOKEN")
    parser.add_argument("--new-tokens", type=int, default=6, metavar="N")
    return parser.parse_args()


def main() -> None:
    """Command line: write the checkpoint, print prompt and continuation as JSON."""
    arguments = _parse_arguments()
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Shape)})
    make_checkpoint(arguments.folder, shape)
    continuation = Oracle(arguments.folder).greedy(arguments.prompt, arguments.new_tokens)
    print(json.dumps({"prompt": arguments.prompt, **dataclasses.asdict(continuation)}))


if __name__ == "__main__":
    main()
