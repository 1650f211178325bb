"""The decoder-only transformer of the Llama family: tokens, positions and a cache in, logits out.

Shape letters: B rows, T positions, V vocabulary, E width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.worker.engine.attention import decode_attention, prompt_attention
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.rope import rotate, rotation_table


class AttentionPass(Protocol):
    """How one pass through the layers stores its keys and values and what its queries look at."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(B, T, H, D), two of (B, T, K, D) -> (B, T, H, D)."""


class PromptPass:
    """New prompts: stored from position 0 of slots `first_slot` on, each attending within itself."""

    def __init__(self, cache: KVCache, first_slot: int) -> None:
        self._cache = cache
        self._first_slot = first_slot

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write_prompts(layer, self._first_slot, keys, values)
        return prompt_attention(queries, keys, values)


class DecodePass:
    """One new token for each of rows 0 to B-1: stored behind what the row has, attending over all of it."""

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        self._cache = cache
        self._positions = positions  # (B,): where the new token goes
        self._lengths = positions + 1
        self._longest = longest

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache, rows = self._cache, queries.shape[0]
        cache.write_step(layer, self._positions, keys[:, 0], values[:, 0])
        attended = decode_attention(
            queries[:, 0], cache.keys[layer, :rows], cache.values[layer, :rows], self._lengths, self._longest
        )
        return attended[:, None]


class Attention(nn.Module):
    """Grouped-query attention; the three input projections are one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        self.qkv = nn.Linear(config.hidden_size, sum(self._heads) * config.head_dim, bias=config.attention_bias)
        self.output = nn.Linear(width, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPass) -> Tensor:
        """(B, T, E), (B or 1, T, 1, D) twice -> (B, T, E)."""
        rows, length, _ = hidden.shape
        mixed = self.qkv(hidden).view(rows, length, sum(self._heads), self._head_dim)
        queries, keys, values = mixed.split(self._heads, dim=2)
        attended = attention.attend(self._layer, rotate(queries, cos, sin), rotate(keys, cos, sin), values)
        return self.output(attended.reshape(rows, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020); gate and up are one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One block: attention and feed-forward, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, index)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPass) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, attention)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model. `max_context` bounds the positions that it has rotations for."""

    rotations: Tensor

    def __init__(self, config: ModelConfig, max_context: int) -> None:
        super().__init__()
        self.config = config
        self.max_context = max_context
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute what the positions need, on the device and in the type that the weights have."""
        rotations = rotation_table(self.config, self.max_context, dtype).to(device)
        self.register_buffer("rotations", rotations, persistent=False)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, first_slot: int) -> Tensor:
        """Store prompts, padded on the right, in slots from `first_slot` on: (B, T), (B,) -> last logits (B, V)."""
        rows, longest = token_ids.shape
        rotations = self.rotations[None, :longest]  # (1, T, 2, D)
        hidden = self._run(token_ids, rotations, PromptPass(cache, first_slot))
        last = hidden[torch.arange(rows, device=hidden.device), lengths - 1]  # (B, E)
        return self.head(self.norm(last))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def decode_step(self, token_ids: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """Append one token to each of rows 0 to B-1 at its position: (B,), (B,) -> logits (B, V).

        `longest` is the largest position plus one, known to the host.
        """
        rotations = self.rotations[positions][:, None]  # (B, 1, 2, D)
        hidden = self._run(token_ids[:, None], rotations, DecodePass(cache, positions, longest))
        return self.head(self.norm(hidden[:, 0]))  # type: ignore[no-any-return]

    def _run(self, token_ids: Tensor, rotations: Tensor, attention: AttentionPass) -> Tensor:
        """(B, T), (B or 1, T, 2, D) -> (B, T, E)."""
        cos, sin = rotations[:, :, 0, None], rotations[:, :, 1, None]  # (B or 1, T, 1, D)
        hidden = self.embedding(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention)
        return hidden  # type: ignore[no-any-return]
