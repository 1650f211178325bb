"""Real processes that start at once."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
from functools import cache
from multiprocessing.context import ForkServerContext


@cache
def context() -> ForkServerContext:
    """Torch takes seconds to import. Each process is forked off one that has done that and nothing else."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["headrace.worker.serve", "headrace.producer"])
    return made


def end_with_parent() -> None:
    """No process may outlive the tests, also when these are killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
