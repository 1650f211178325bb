"""Attention of prompts among themselves and of one new token a row over the cache, in plain torch.

Each row's result depends on that row alone, bit for bit: a prompt is padded to a length that follows from its own
length only, and decoding walks the positions in blocks of a fixed size, where a block beyond a row's end changes
nothing (its weights are exactly zero and the running maximum stays).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

DECODE_BLOCK = 128


def prompt_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention within prompts padded on the right: (B, T, H, D), two of (B, T, K, D) -> (B, T, H, D).

    Padding needs no mask: it comes after every real position, and a position looks only at itself and before.
    """
    attended = functional.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        is_causal=True,
        enable_gqa=queries.shape[2] != keys.shape[2],
    )
    return attended.transpose(1, 2)


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """One query a row over its own first `lengths` positions: (B, H, D), two of (B, K, S, D), (B,) -> (B, H, D).

    The softmax is taken block by block with a running maximum (Milakov & Gimelshein 2018, online normalizer).
    `longest` is the largest of `lengths`, known to the host.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries * head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, head_dim)  # (B, K, G, D)
    top = torch.full((rows, kv_heads, heads // kv_heads, 1), -math.inf, device=queries.device)
    total = torch.zeros_like(top)
    attended = torch.zeros(grouped.shape, device=queries.device)  # float32, as `top` and `total`
    for start in range(0, longest, DECODE_BLOCK):
        block = slice(start, min(start + DECODE_BLOCK, keys.shape[2]))
        positions = torch.arange(block.start, block.stop, device=queries.device)
        beyond = (positions >= lengths[:, None])[:, None, None, :]  # (B, 1, 1, block)
        scores = torch.matmul(grouped, keys[:, :, block].transpose(2, 3)).float()
        scores.masked_fill_(beyond, -math.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        fade = torch.exp(top - new_top)
        total = total * fade + weights.sum(dim=-1, keepdim=True)
        attended = attended * fade + torch.matmul(weights.to(values.dtype), values[:, :, block]).float()
        top = new_top
    return (attended / total).to(queries.dtype).view(rows, heads, head_dim)
