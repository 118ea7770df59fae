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
