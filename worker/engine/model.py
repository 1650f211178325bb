"""The decoder-only transformer of the Llama family: tokens, positions and a cache in, logits out.

Shape letters: B rows, T positions, V vocabulary, E width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.worker.engine.attention import prompt_attention
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.elementwise import add_and_norm, gated_silu
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.rope import rotate, rotation_table

_TYPICAL_ROWS = 128  # what packed weights are ordered for; any number of rows gives the same bits


class AttentionPass(Protocol):
    """How one pass through the layers stores its keys and values and what its queries look at."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(B, T, H, D), two of (B, T, K, D) -> (B, T, H, D)."""


class PromptPass:
    """New prompts: stored from position 0 of slots `first_slot` on, each attending within itself."""

    def __init__(self, cache: KVCache, first_slot: int, padding: Tensor) -> None:
        self._cache = cache
        self._first_slot = first_slot
        self._padding = padding[:, :, None, None]  # (B, T, 1, 1)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # What the model makes of padding may be NaN, which would spoil a sum even at a weight of zero.
        values = values.masked_fill(self._padding, 0)
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
        self._cache.write_step(layer, self._positions, keys[:, 0], values[:, 0])
        return self._cache.attend(layer, queries[:, 0], self._lengths, self._longest)[:, None]


class Linear(nn.Linear):
    """A product whose rows come out the same, bit for bit, however many they are.

    The libraries multiply the last few rows of a matrix in another order than the rest (float32, oneMKL: a rest of
    fewer than four) or a single row as a vector (bfloat16), so rows of zeros are added where that would happen.
    """

    _packed: Tensor | None = None

    def pack(self) -> None:
        """Let oneDNN keep a bfloat16 weight in the order that it multiplies in: the same bits, in less time."""
        if (
            self.weight.device.type == "cpu"
            and self.weight.dtype is torch.bfloat16
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        ):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _TYPICAL_ROWS)
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # not kept twice

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.numel() // hidden.shape[-1]
        missing = -rows % 4 if hidden.dtype == torch.float32 else int(rows == 1)
        if not missing:
            return self._multiply(hidden)
        padded = functional.pad(hidden.reshape(rows, -1), (0, 0, 0, missing))
        return self._multiply(padded)[:rows].view(*hidden.shape[:-1], -1)

    def _multiply(self, hidden: Tensor) -> Tensor:
        if self._packed is None:
            return super().forward(hidden)
        multiplied: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return multiplied


class Attention(nn.Module):
    """Grouped-query attention; the three input projections are one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        width = config.num_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, sum(self._heads) * config.head_dim, bias=config.attention_bias)
        self.output = Linear(width, config.hidden_size, bias=config.attention_bias)

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
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(gated_silu(self.gate_up(hidden)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One block: attention and feed-forward, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self._norm_eps = config.norm_eps
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, index)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPass) -> Tensor:
        update = self.attention(self.attention_norm(hidden), cos, sin, attention)
        hidden, normed = add_and_norm(hidden, update, self.feed_forward_norm.weight, self._norm_eps)
        return hidden + self.feed_forward(normed)  # type: ignore[no-any-return]


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
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compute what the positions need, on the device and in the type that the weights have, and pack those."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        rotations = rotation_table(self.config, self.max_context, dtype).to(device)
        self.register_buffer("rotations", rotations, persistent=False)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, first_slot: int) -> Tensor:
        """Store prompts, padded on the right, in slots from `first_slot` on: (B, T), (B,) -> last logits (B, V)."""
        rows, longest = token_ids.shape
        rotations = self.rotations[None, :longest]  # (1, T, 2, D)
        padding = torch.arange(longest, device=lengths.device) >= lengths[:, None]  # (B, T)
        hidden = self._run(token_ids, rotations, PromptPass(cache, first_slot, padding))
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
