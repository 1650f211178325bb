"""The largest logits of each row, found by looking at blocks of tokens: most of the vocabulary is read once only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.worker.engine.elementwise import has_cpu_kernels

_BLOCK = 64  # tokens
_INT32_MASK = 0x7FFFFFFF


def block_maxima(scores: Tensor) -> Tensor:
    """The largest of each block of tokens, NaN if there is one in it: (B, V) -> (B, blocks)."""
    if has_cpu_kernels(scores.device.type, scores.dtype):
        from headrace.worker.engine import cpu_largest

        return cpu_largest.block_maxima(scores, _BLOCK)
    return _in_blocks(scores).amax(dim=-1)


def likeliest(logits: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row, and its value, NaN if the row has one: (B, V) -> (B,), (B, 1)."""
    blocks = _in_blocks(logits)
    block = maxima.argmax(dim=-1)
    within = blocks[torch.arange(len(blocks), device=blocks.device), block].argmax(dim=-1)
    return block * _BLOCK + within, maxima.amax(dim=-1, keepdim=True).float()


def largest(scores: Tensor, count: int, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row in falling order, equal ones by rising id: (B, V) -> (B, count) twice.

    Only the `count` blocks of tokens with the largest maxima (equal ones: the first) can hold them: any token outside
    is beaten by the maxima of `count` blocks. `maxima`, (B, blocks), are those of the blocks, if they are known.
    """
    maxima = block_maxima(scores) if maxima is None else maxima
    if has_cpu_kernels(scores.device.type, scores.dtype):
        from headrace.worker.engine import cpu_largest

        ids = cpu_largest.largest(scores, count, maxima, _BLOCK)
        return scores.gather(-1, ids), ids
    blocks = _in_blocks(scores)
    rows, num_blocks, _ = blocks.shape
    if 2 * count > num_blocks:
        values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    of_block = _ordered_top(maxima, torch.arange(num_blocks, device=scores.device), count)
    ids = (of_block[..., None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).view(rows, -1)
    ids = _ordered_top(blocks.view(rows, -1).gather(-1, ids), ids, count)
    return scores.gather(-1, ids), ids


def _in_blocks(scores: Tensor) -> Tensor:
    """(B, V) -> (B, blocks, _BLOCK); what the last block lacks is -inf."""
    missing = -scores.shape[-1] % _BLOCK
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
    return scores.view(len(scores), -1, _BLOCK)


def _ordered_top(scores: Tensor, ids: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest scores, equal ones by rising id. One 64-bit key holds score and id: no ties."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ascending = torch.where(bits < 0, bits ^ _INT32_MASK, bits).long()  # order of int = order of float
    keys = (ascending << 32) | (_INT32_MASK - ids)
    return _INT32_MASK - (torch.topk(keys, count, dim=-1).values & _INT32_MASK)
