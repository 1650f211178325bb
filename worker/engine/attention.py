"""Attention over the KV cache in plain torch: the reference, and the path where there are no compiled kernels.

Every token, of a prompt or newly generated, attends by itself over its row's positions up to its own, in blocks of a
fixed size, where a block beyond its end changes nothing (its weights are exactly zero and the running maximum stays).
So a token's result depends on its row alone, bit for bit: not on its neighbours, nor on whether it was computed with
the prompt, in a later chunk of it, or step by step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128
_TOKENS_AT_ONCE = 256  # bounds the memory of the gathered blocks


def attend(queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """One query a token over the first `lengths` positions of its slot.

    (T, H, D), two of (slots, K, S, D), (T,), (T,) -> (T, H, D). `longest` is the largest of `lengths`, known to the
    host.
    """
    chunks = zip(*(torch.split(part, _TOKENS_AT_ONCE) for part in (queries, slots, lengths)), strict=True)
    return torch.cat([_attend(part, keys, values, slot, length, longest) for part, slot, length in chunks])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """The softmax is taken block by block with a running maximum (Milakov & Gimelshein 2018, online normalizer)."""
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries.float() * head_dim**-0.5).view(tokens, kv_heads, heads // kv_heads, head_dim)  # (T, K, G, D)
    top = torch.full((tokens, kv_heads, heads // kv_heads, 1), -math.inf, device=queries.device)
    total = torch.zeros_like(top)
    attended = torch.zeros(grouped.shape, device=queries.device)  # float32, as `top` and `total`
    for start in range(0, longest, BLOCK):
        block = slice(start, min(start + BLOCK, keys.shape[2]))
        seen = torch.arange(block.start, block.stop, device=queries.device) < lengths[:, None]  # (T, P)
        unseen = ~seen[:, None, None, :]
        # In float32: of large scores, half precision keeps too little to tell them apart.
        scores = grouped @ keys[slots, :, block].float().transpose(2, 3)  # (T, K, G, P)
        scores = scores.masked_fill(unseen, -math.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        rescale = torch.exp(top - new_top)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        attended = attended * rescale + (weights.to(values.dtype) @ values[slots, :, block]).float()
        top = new_top
    return (attended / total).to(queries.dtype).view(tokens, heads, head_dim)
