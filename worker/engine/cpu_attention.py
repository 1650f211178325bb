"""Attention of tokens over the cache, compiled for the CPU with Numba.

Each token reads its own row's positions only, once, in the order they lie in memory, so the time is that of the bytes
that are live, and a token's result depends on its row alone, bit for bit. Keys lie in blocks of BLOCK positions with
the head's dimensions outside, so that the scores of a block add up side by side without sums across a vector.

bfloat16 is read as pairs, E = 2 numbers an element (see cpu_vectors); float32 as it is, E = 1. A pair of a key is of
dimensions d and d + D/2, a pair of values of positions p and p + BLOCK/2 of a block: numbers that are E-th parts apart
lie together, so that making pairs moves nothing across a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from headrace.worker.engine.cpu_numbers import COMPILED, Array, exp, store
from headrace.worker.engine.cpu_vectors import LANES, dot_columns, max_lanes, sum_lanes, weigh_rows

BLOCK = 32
_MOST_QUERIES = 7  # whose sums for a block fit into the registers

Kernel = Callable[..., None]


@lru_cache
def attend_kernel(queries_per_kv: int, head_dim: int, per_element: int) -> Kernel:
    """Compile the kernel for a model's shape (a few seconds, once a machine: the code is kept on disk).

    The kernel takes the elements of queries (T, H, D/E), keys (slots, K, blocks, D/E, BLOCK) and values (slots, K,
    blocks, BLOCK/E, D), slots and positions (T,), and the output (T, H, D), bfloat16 as its bits, uint16.
    """
    together = max(count for count in range(1, _MOST_QUERIES + 1) if queries_per_kv % count == 0)
    tiles = max(count for count in range(1, 5) if head_dim % (count * LANES) == 0)
    scale = np.float32(head_dim**-0.5)
    size, rows = head_dim // per_element, BLOCK // per_element

    @njit(**COMPILED)  # type: ignore[untyped-decorator]
    def attend(queries: Array, keys: Array, values: Array, slots: Array, positions: Array, output: Array) -> None:
        num_tokens, num_kv, room = queries.shape[0], keys.shape[1], keys.shape[2] * size * BLOCK
        all_queries, all_keys, all_values = queries.reshape(-1), keys.reshape(-1), values.reshape(-1)
        for task in prange(num_tokens * num_kv):
            token, kv = task % num_tokens, task // num_tokens
            length = positions[token] + 1
            padded = (length + BLOCK - 1) // BLOCK * BLOCK
            num_rows = length // BLOCK * rows + min(length % BLOCK, rows)
            scores = np.empty(together * padded, np.float32)
            sums = np.empty(together * head_dim, np.float32)
            shares = np.empty(together, np.float32)
            stored = (slots[token] * num_kv + kv) * room
            following = (slots[(task + 1) % num_tokens] * num_kv + min((task + 1) // num_tokens, num_kv - 1)) * room
            for head in range(kv * queries_per_kv, (kv + 1) * queries_per_kv, together):
                first = (token * queries.shape[1] + head) * size
                for block in range(padded // BLOCK):
                    place, p = stored + block * size * BLOCK, block * BLOCK
                    dot_columns(
                        all_queries, first, size, all_keys, place, scores, p, padded, all_values, place,
                        together, size, BLOCK,
                    )  # fmt: skip
                _exponentials(scores, scale, length, padded, shares)
                weights = _as_elements(scores, all_values)
                stride = padded // per_element
                for d in range(0, head_dim, tiles * LANES):
                    weigh_rows(
                        weights, 0, stride, all_values, stored + d, num_rows, sums, d, all_keys, following + d,
                        together, head_dim, tiles,
                    )  # fmt: skip
                for g in range(together):
                    for d in range(head_dim):
                        output[token, head + g, d] = store(sums[g * head_dim + d] * shares[g], output[0, 0, 0])

    return attend  # type: ignore[no-any-return]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _exponentials(scores: Array, scale: Any, length: Any, padded: Any, shares: Array) -> None:
    """Of each query's first `length` scores, against the largest; one over their sum goes into `shares`."""
    for g in range(len(shares)):
        row = scores[g * padded : (g + 1) * padded]
        row[length:] = -3e38
        top = max_lanes(row, padded)
        for p in range(length):
            row[p] = exp((row[p] - top) * scale)
        row[length:] = 0
        shares[g] = np.float32(1) / sum_lanes(row, padded)


def _as_elements(weights: Array, like: Array) -> Any:
    """Weights of whole blocks in the elements that values have. Exists in compiled code only."""


@overload(_as_elements, inline="always")  # type: ignore[untyped-decorator]
def _as_elements_compiled(weights: Any, like: Any) -> Callable[..., Any]:
    return _paired if like.dtype == types.uint32 else _as_they_are


def _as_they_are(weights: Any, like: Any) -> Any:
    return weights


def _paired(weights: Any, like: Any) -> Any:
    half = BLOCK // 2
    pairs = np.empty(len(weights) // 2, np.uint32)
    for block in range(len(weights) // BLOCK):
        for p in range(half):
            first = store(weights[block * BLOCK + p], np.uint16(0))
            second = store(weights[block * BLOCK + half + p], np.uint16(0))
            pairs[block * half + p] = np.uint32(first) | (np.uint32(second) << np.uint32(16))
    return pairs
