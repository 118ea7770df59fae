"""Makes a process one rank of a server, as SGLang's launcher does: what differs there between the bases is here."""
import inspect


def publish(args, rank: int = 0) -> None:
    """Publish a ``ServerArgs``; from 0.5.23 on with the process' place among the ranks."""
    from sglang.srt import runtime_context

    place = {"ranks": runtime_context.SpawnRanks(world_rank=rank)} if hasattr(runtime_context, "SpawnRanks") else {}
    runtime_context.publish(args, role="weight_cache_daemon", **place)


def join_groups(args, init_method: str, rank: int = 0, backend: str = "gloo") -> None:
    """Set up the process groups of ``args``, and attention's part in them."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    init_distributed_environment(
        world_size=args.tp_size * args.pp_size, rank=rank, local_rank=rank, distributed_init_method=init_method, backend=backend
    )
    sizes = {
        "tensor_model_parallel_size": args.tp_size,
        "pipeline_model_parallel_size": args.pp_size,
        "expert_model_parallel_size": args.ep_size,
    }
    # From 0.5.23 on what was published says the sizes, and whether attention is data-parallel.
    initialize_model_parallel(backend=backend, **_accepted(initialize_model_parallel, sizes))
    model = {"model_config": ModelConfig(model_path=args.model_path, dtype=args.dtype)}
    initialize_dp_attention(args, **_accepted(initialize_dp_attention, model))


def _accepted(function, arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}
