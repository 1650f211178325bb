"""New tokens' queries and keys turned by their positions, and keys and values put where the cache has them.

Compiled for the CPU with Numba, for the layout of cpu_attention. What is a pair of bfloat16 there is written as a pair:
a head's dimensions d and d + D/2 are turned together anyway. A pair of values is of two tokens, which two threads may
have at the same time: each writes its half alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from headrace.worker.engine.cpu_attention import BLOCK
from headrace.worker.engine.cpu_numbers import COMPILED, Array, load, store


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def rotate_and_store(
    mixed: Array, rotations: Array, slots: Array, positions: Array, queries: Array, keys: Array, values: Array
) -> None:
    """Turn queries and keys by their positions' angles; keys and values go into the cache, queries into `queries`.

    mixed (T, H + 2K, D), rotations (T, 2, D), slots and positions (T,), bfloat16 as its bits, uint16; the elements of
    queries (T, H, D/E) and of keys (slots, K, blocks, D/E, BLOCK); values (slots, K, blocks, BLOCK/E, D, E).
    """
    num_heads, num_kv, size = queries.shape[1], keys.shape[1], queries.shape[2]
    half, rows = mixed.shape[2] // 2, values.shape[3]
    for token in prange(mixed.shape[0]):
        slot, position = slots[token], positions[token]
        cos, sin = rotations[token, 0], rotations[token, 1]
        block, column = position // BLOCK, position % BLOCK
        turned = np.empty(size, queries.dtype)
        for head in range(num_heads + num_kv):
            heads = mixed[token, head]
            for d in range(half):
                x, y = load(heads[d]), load(heads[half + d])
                first, second = x * load(cos[d]) - y * load(sin[d]), y * load(cos[half + d]) + x * load(sin[half + d])
                _put_dims(turned, d, half, first, second)
            if head < num_heads:
                queries[token, head] = turned
            else:
                keys[slot, head - num_heads, block, :, column] = turned
        for kv in range(num_kv):
            value, row, part = mixed[token, num_heads + num_kv + kv], column % rows, column // rows
            for d in range(2 * half):
                values[slot, kv, block, row, d, part] = value[d]


def _put_dims(head: Array, d: int, half: int, first: Any, second: Any) -> None:
    """Dimensions d and half + d of a head into its elements. Exists in compiled code only."""


@overload(_put_dims, inline="always")  # type: ignore[untyped-decorator]
def _put_dims_compiled(head: Any, d: Any, half: Any, first: Any, second: Any) -> Callable[..., None]:
    return _put_pair if head.dtype == types.uint32 else _put_two


def _put_pair(head: Any, d: Any, half: Any, first: Any, second: Any) -> None:
    low, high = np.uint32(store(first, np.uint16(0))), np.uint32(store(second, np.uint16(0)))
    head[d] = low | (high << np.uint32(16))


def _put_two(head: Any, d: Any, half: Any, first: Any, second: Any) -> None:
    head[d], head[half + d] = first, second
