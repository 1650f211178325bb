"""Parts of a step side by side, each on a share of the processor's cores."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Returned = TypeVar("Returned")


class Threads:
    """Runs calls at the same time, and divides the cores that the calling thread may use among them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="headrace-step")

    def run(self, calls: Sequence[Callable[[], Returned]]) -> list[Returned]:
        """What each call returns, in order; a single one runs in the calling thread.

        Raises what the first of those that failed has raised, but not before all have ended.
        """
        if len(calls) == 1:
            return [calls[0]()]
        cores = max(1, torch.get_num_threads() // len(calls))
        futures = [self._pool.submit(_run_on, cores, call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]


def use_cores(count: int) -> None:
    """Run the calling thread's products and kernels on so many cores."""
    torch.set_num_threads(count)
    if importlib.util.find_spec("numba") is not None:
        import numba

        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


def _run_on(cores: int, call: Callable[[], Returned]) -> Returned:
    use_cores(cores)
    return call()
