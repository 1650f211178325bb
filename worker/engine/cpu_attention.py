"""Attention of one new token a row over the cache, compiled for the CPU with Numba.

Each row reads its own positions only, once, in the order they lie in memory, so the time is that of the bytes that are
live, and a row's result depends on that row alone, bit for bit. Keys lie in blocks of BLOCK positions with the head's
dimensions outside, so that the scores of a block add up side by side without sums across a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit, prange

from headrace.worker.engine.cpu_numbers import Array, exp, load, store

BLOCK = 16
UNROLL = 8  # terms added in one go; head sizes are multiples of it

Kernel = Callable[..., None]


@lru_cache
def decode_kernel(queries_per_kv: int, head_dim: int) -> Kernel:  # noqa: C901
    """Compile the kernel for a model's shape (a few seconds, once a machine: the code is kept on disk).

    The kernel takes queries (B, H, D), keys (slots, K, S/BLOCK, D, BLOCK), values (slots, K, S, D), lengths (B,) int64,
    the output (B, H, D) and the scale of the scores. bfloat16 is passed as its bits, uint16.

    It is one function, with the shape as constants: split into its three parts it took one and a half times as long.
    """

    @njit(parallel=True, fastmath=True, boundscheck=False, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
    def attend(  # noqa: C901
        queries: Array, keys: Array, values: Array, lengths: Array, output: Array, scale: Any
    ) -> None:
        num_kv = keys.shape[1]
        for task in prange(queries.shape[0] * num_kv):
            row = task // num_kv
            kv = task % num_kv
            length = lengths[row]
            num_blocks = (length + BLOCK - 1) // BLOCK
            scores = np.empty((queries_per_kv, num_blocks * BLOCK), np.float32)
            query = np.empty((queries_per_kv, head_dim), np.float32)
            for g in range(queries_per_kv):
                for d in range(head_dim):
                    query[g, d] = load(queries[row, kv * queries_per_kv + g, d]) * scale

            # 1. Scores, block by block.
            block = np.empty((head_dim, BLOCK), np.float32)
            for b in range(num_blocks):
                stored = keys[row, kv, b]
                for d in range(head_dim):
                    for p in range(BLOCK):
                        block[d, p] = load(stored[d, p])
                for g in range(queries_per_kv):
                    q = query[g]
                    score = scores[g, b * BLOCK : (b + 1) * BLOCK]
                    for p in range(BLOCK):
                        score[p] = np.float32(0)
                    for d in range(0, head_dim, UNROLL):
                        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
                        q4, q5, q6, q7 = q[d + 4], q[d + 5], q[d + 6], q[d + 7]
                        for p in range(BLOCK):
                            score[p] += (
                                q0 * block[d, p]
                                + q1 * block[d + 1, p]
                                + q2 * block[d + 2, p]
                                + q3 * block[d + 3, p]
                                + q4 * block[d + 4, p]
                                + q5 * block[d + 5, p]
                                + q6 * block[d + 6, p]
                                + q7 * block[d + 7, p]
                            )

            # 2. Softmax over the row's own positions; what the last block has beyond them weighs nothing.
            for g in range(queries_per_kv):
                top = np.float32(-3e38)
                for p in range(length):
                    top = max(top, scores[g, p])
                total = np.float32(0)
                for p in range(length):
                    weight = exp(scores[g, p] - top)
                    scores[g, p] = weight
                    total += weight
                share = np.float32(1) / total
                for p in range(length):
                    scores[g, p] *= share
                for p in range(length, num_blocks * BLOCK):
                    scores[g, p] = np.float32(0)

            # 3. The values, weighted.
            sums = np.zeros((queries_per_kv, head_dim), np.float32)
            rows = np.empty((UNROLL, head_dim), np.float32)
            for p in range(0, num_blocks * BLOCK, UNROLL):
                for i in range(UNROLL):
                    value = values[row, kv, p + i]
                    for d in range(head_dim):
                        rows[i, d] = load(value[d])
                for g in range(queries_per_kv):
                    sum_g = sums[g]
                    w0, w1, w2, w3 = scores[g, p], scores[g, p + 1], scores[g, p + 2], scores[g, p + 3]
                    w4, w5, w6, w7 = scores[g, p + 4], scores[g, p + 5], scores[g, p + 6], scores[g, p + 7]
                    for d in range(head_dim):
                        sum_g[d] += (
                            w0 * rows[0, d]
                            + w1 * rows[1, d]
                            + w2 * rows[2, d]
                            + w3 * rows[3, d]
                            + w4 * rows[4, d]
                            + w5 * rows[5, d]
                            + w6 * rows[6, d]
                            + w7 * rows[7, d]
                        )
            for g in range(queries_per_kv):
                for d in range(head_dim):
                    output[row, kv * queries_per_kv + g, d] = store(sums[g, d], output[row, 0, 0])

    return attend  # type: ignore[no-any-return]
