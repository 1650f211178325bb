"""Memory: kept where it is needed again at once, given back, and running out of it told from other failures."""

from __future__ import annotations

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3), of the GNU C library
_LARGEST_KEPT = 32 * 2**20  # as large as that library allows
_MOST_KEPT = 2**30


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to _MOST_KEPT bytes, for its next step.

    Every step makes and drops the same tensors. Given back in between, each page of them is cleared by the system
    anew: thousands a step, up to a tenth of its time. Where there is another C library, nothing is changed.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        library.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def is_out_of_memory(error: Exception) -> bool:
    """True for the device's and for the host's; torch's allocator on the host raises no type of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_unused_memory() -> None:
    """Give back what torch keeps of a device's memory for later."""
    torch.cuda.empty_cache()
