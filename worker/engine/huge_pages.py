"""Memory in pages of megabytes instead of kilobytes, where Linux has them.

Weights and cache are read from one end to the other at every step. With small pages the processor looks up where a page
lies every 4 KiB, and in a virtual machine each of these look-ups is many. Whatever goes wrong here costs speed alone.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

_HUGEPAGE, _COLLAPSE = 14, 25  # madvise(2): in huge pages from now on; move into huge pages now (Linux 6.1)
_HUGE_BYTES = 2 * 2**20
_MAPS = Path("/proc/self/maps")
_PRIVATE_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s", re.ASCII)


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        _advise(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, _HUGEPAGE)
    return tensor.zero_()


def move_into_huge_pages() -> None:
    """Have all that this process has in memory in huge pages; for once it is loaded, since everything is copied."""
    for start, end in _private_memory():
        for advice in (_HUGEPAGE, _COLLAPSE):
            _advise(start, end, advice)


def _private_memory() -> Iterator[tuple[int, int]]:
    """The addresses of what is the process's own and of no file."""
    try:
        maps = _MAPS.read_text()
    except OSError:
        return
    for found in _PRIVATE_MEMORY.finditer(maps):
        yield int(found[1], 16), int(found[2], 16)


def _advise(start: int, end: int, advice: int) -> None:
    """madvise for the whole huge pages between two addresses."""
    start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
    if end > start and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
