"""The largest logits of each row, compiled for the CPU with Numba: two passes over memory, and no sorting of many.

Floats are compared as integers in the same order: a positive one by its bits, a negative one by its size's bits,
negated (so 0.0 and -0.0 are equal), and NaN above all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from headrace.worker.engine.cpu_numbers import COMPILED, Array, as_array, narrow

# Of bfloat16 and float32: the integers of their size, all bits but the sign's, and the bits of infinity.
_FORMATS = {
    torch.bfloat16: (np.int16, np.int16(0x7FFF), np.int16(0x7F80)),
    torch.float32: (np.int32, np.int32(0x7FFFFFFF), np.int32(0x7F800000)),
}
_LAST_ID = np.int64(0x7FFFFFFF)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _order(bits: Any, unsigned: Any, infinity: Any) -> Any:
    size = narrow(bits & unsigned, unsigned)
    return unsigned if size > infinity else narrow(-size, unsigned) if bits < 0 else size


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _block_maxima(scores: Array, block: int, unsigned: Any, infinity: Any, maxima: Array) -> None:
    for row in prange(scores.shape[0]):
        for place in range(maxima.shape[1]):
            part = scores[row, place * block : (place + 1) * block]
            top = narrow(-unsigned, unsigned)
            for i in range(part.size):
                top = max(top, _order(part[i], unsigned, infinity))
            maxima[row, place] = top if top >= 0 else -top | ~unsigned


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _largest(scores: Array, maxima: Array, block: int, unsigned: Any, infinity: Any, ids: Array) -> None:
    vocab, num_blocks, count = scores.shape[1], maxima.shape[1], ids.shape[1]
    for row in prange(scores.shape[0]):
        tops = np.empty(num_blocks, np.int64)
        for place in range(num_blocks):
            tops[place] = _order(maxima[row, place], unsigned, infinity)
        # So many blocks have a token that is not smaller, so no smaller one is among the largest.
        floor = np.int64(-unsigned) - 1
        if count <= num_blocks:
            floor = np.partition(tops, num_blocks - count)[num_blocks - count]
        keys = np.empty(vocab, np.int64)  # the order of the score above that of the id, the first id on top
        found = 0
        for place in range(num_blocks):
            if tops[place] >= floor:
                for token in range(place * block, min((place + 1) * block, vocab)):
                    order = np.int64(_order(scores[row, token], unsigned, infinity))
                    if order >= floor:
                        keys[found] = (order << 32) | (_LAST_ID - token)
                        found += 1
        candidates = np.sort(keys[:found])
        for rank in range(count):
            ids[row, rank] = _LAST_ID - (candidates[found - 1 - rank] & _LAST_ID)


def block_maxima(scores: Tensor, block: int) -> Tensor:
    """As `largest.block_maxima`."""
    integer, unsigned, infinity = _FORMATS[scores.dtype]
    maxima = torch.empty(len(scores), -(-scores.shape[1] // block), dtype=scores.dtype)
    _block_maxima(as_array(scores).view(integer), block, unsigned, infinity, as_array(maxima).view(integer))
    return maxima


def largest(scores: Tensor, count: int, maxima: Tensor, block: int) -> Tensor:
    """The ids of `largest.largest`."""
    integer, unsigned, infinity = _FORMATS[scores.dtype]
    ids = torch.empty(len(scores), count, dtype=torch.int64)
    views = as_array(scores).view(integer), as_array(maxima).view(integer)
    _largest(*views, block, unsigned, infinity, ids.numpy())
    return ids
