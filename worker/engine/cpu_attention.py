"""Attention of tokens over the cache, compiled for the CPU with Numba.

Each token reads its own row's positions only, once, in the order they lie in memory, so the time is that of the bytes
that are live, and a token's result depends on its row alone, bit for bit. Keys lie in blocks of BLOCK positions with
the head's dimensions outside, so that the scores of a block add up side by side without sums across a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, prange

from headrace.worker.engine.cpu_numbers import Array, exp, load, store
from headrace.worker.engine.cpu_vectors import LANES, dot_columns, weigh_rows

BLOCK = 32
_MOST_QUERIES = 7  # whose sums for a block fit into the registers

Kernel = Callable[..., None]
_COMPILED: dict[str, Any] = {
    "parallel": True,
    "fastmath": True,
    "boundscheck": False,
    "error_model": "numpy",
    "cache": True,
    "nogil": True,
}


@njit(**_COMPILED)  # type: ignore[untyped-decorator]
def rotate_and_store(
    mixed: Array, rotations: Array, slots: Array, positions: Array, queries: Array, keys: Array, values: Array
) -> None:
    """Turn queries and keys by their positions' angles; keys and values go into the cache, queries into `queries`.

    mixed (T, H + 2K, D), rotations (T, 2, D), slots and positions (T,), queries (T, H, D) float32, keys (slots, K,
    S/BLOCK, D, BLOCK), values (slots, K, S, D). bfloat16 is passed as its bits, uint16.
    """
    num_heads, num_kv = queries.shape[1], keys.shape[1]
    half = queries.shape[2] // 2
    for token in prange(mixed.shape[0]):
        slot, position = slots[token], positions[token]
        cos, sin = rotations[token, 0], rotations[token, 1]
        block, column = position // BLOCK, position % BLOCK
        for head in range(num_heads):
            heads = mixed[token, head]
            for d in range(half):
                first, second = load(heads[d]), load(heads[half + d])
                queries[token, head, d] = first * load(cos[d]) - second * load(sin[d])
                queries[token, head, half + d] = second * load(cos[half + d]) + first * load(sin[half + d])
        for kv in range(num_kv):
            heads = mixed[token, num_heads + kv]
            for d in range(half):
                first, second = load(heads[d]), load(heads[half + d])
                keys[slot, kv, block, d, column] = store(
                    first * load(cos[d]) - second * load(sin[d]), keys[0, 0, 0, 0, 0]
                )
                keys[slot, kv, block, half + d, column] = store(
                    second * load(cos[half + d]) + first * load(sin[half + d]), keys[0, 0, 0, 0, 0]
                )
            value = mixed[token, num_heads + num_kv + kv]
            for d in range(2 * half):
                values[slot, kv, position, d] = value[d]


@lru_cache
def attend_kernel(queries_per_kv: int, head_dim: int) -> Kernel:
    """Compile the kernel for a model's shape (a few seconds, once a machine: the code is kept on disk).

    The kernel takes queries (T, H, D) float32, keys (slots, K, S/BLOCK, D, BLOCK), values (slots, K, S, D), slots and
    positions (T,), and the output (T, H, D). bfloat16 is passed as its bits, uint16.
    """
    together = max(count for count in range(1, _MOST_QUERIES + 1) if queries_per_kv % count == 0)
    tiles = max(count for count in range(1, 5) if head_dim % (count * LANES) == 0)
    scale = np.float32(head_dim**-0.5)

    @njit(**_COMPILED)  # type: ignore[untyped-decorator]
    def attend(queries: Array, keys: Array, values: Array, slots: Array, positions: Array, output: Array) -> None:
        num_tokens, num_kv, room = queries.shape[0], keys.shape[1], values.shape[2]
        all_queries, all_keys, all_values = queries.reshape(-1), keys.reshape(-1), values.reshape(-1)
        for task in prange(num_tokens * num_kv):
            token, kv = task % num_tokens, task // num_tokens
            length = positions[token] + 1
            padded = (length + BLOCK - 1) // BLOCK * BLOCK
            scores = np.empty(together * padded, np.float32)
            sums = np.empty(together * head_dim, np.float32)
            query = np.empty(together * head_dim, np.float32)
            stored = (slots[token] * num_kv + kv) * room * head_dim
            for head in range(kv * queries_per_kv, (kv + 1) * queries_per_kv, together):
                first = (token * queries.shape[1] + head) * head_dim
                for i in range(together * head_dim):
                    query[i] = all_queries[first + i] * scale
                for p in range(0, padded, BLOCK):
                    place = stored + p * head_dim
                    dot_columns(query, head_dim, all_keys, place, scores, p, padded, together, head_dim, BLOCK)
                _softmax(scores, length, padded, together)
                for d in range(0, head_dim, tiles * LANES):
                    weigh_rows(scores, 0, padded, all_values, stored + d, length, sums, d, together, head_dim, tiles)
                for g in range(together):
                    for d in range(head_dim):
                        output[token, head + g, d] = store(sums[g * head_dim + d], output[0, 0, 0])

    return attend  # type: ignore[no-any-return]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _softmax(scores: Array, length: Any, padded: Any, count: Any) -> None:
    """Of each of `count` queries, over its first `length` scores."""
    for g in range(count):
        row = scores[g * padded : g * padded + length]
        top = np.float32(-3e38)
        for p in range(length):
            top = max(top, row[p])
        total = np.float32(0)
        for p in range(length):
            weight = exp(row[p] - top)
            row[p] = weight
            total += weight
        share = np.float32(1) / total
        for p in range(length):
            row[p] *= share
