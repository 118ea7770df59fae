"""Runs a function in forked children: importing SGLang takes longer than most tests, so it is done once and then shared."""
import os
import sys
import traceback
from collections.abc import Callable


def start(run: Callable[[dict], None], spec: dict) -> int:
    """Run ``run(spec)`` in a child process, what it prints going to ``spec["log"]``; returns the child's id."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    try:
        run(spec)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fork_each(run: Callable[[dict], None], runs: list[dict]) -> None:
    """One run after the other, each in a child of its own."""
    for spec in runs:
        os.waitpid(start(run, spec), 0)


def let_custom_ops_run_on_a_cpu(is_meant: Callable[[str], bool]) -> None:
    """SGLang registers its custom ops for CUDA alone; those that are meant, by name, do nothing that is CUDA's."""
    from sglang.srt.utils import common

    register = common.direct_register_custom_op

    def register_for_both(op_name, op_func, **kwargs):
        register(op_name=op_name, op_func=op_func, **kwargs)
        if is_meant(op_name):
            common.sglang_lib.impl(op_name, op_func, "CPU")

    common.direct_register_custom_op = register_for_both
