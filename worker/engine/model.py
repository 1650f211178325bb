"""The decoder-only transformer of the Llama family: packed tokens and a cache in, logits out.

Shape letters: T tokens, B rows whose logits are wanted, V vocabulary, E width, H query heads, K key/value heads, D head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.elementwise import add_and_norm_, gated_silu
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.linear import Linear
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.rope import rotation_table


class Attention(nn.Module):
    """Grouped-query attention; the three input projections are one product."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(config.hidden_size, heads * config.head_dim, bias=config.attention_bias)
        self.output = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden: Tensor, rotations: Tensor, tokens: PackedTokens, cache: KVCache) -> Tensor:
        """(T, E), (T, 2, D) -> (T, E)."""
        return self.output(cache.attend(self._layer, self.qkv(hidden), rotations, tokens))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020); gate and up are one product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(gated_silu(self.gate_up(hidden)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One block: attention and feed-forward, each on a normalized copy of the sum so far."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self._norm_eps = config.norm_eps
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, index)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, hidden: Tensor, update: Tensor, rotations: Tensor, tokens: PackedTokens, cache: KVCache
    ) -> Tensor:
        """Add `update` to the sum so far, `hidden`, in place, and return the next update: (T, E) all."""
        normed = add_and_norm_(hidden, update, self.attention_norm.weight, self._norm_eps)
        update = self.attention(normed, rotations, tokens, cache)
        normed = add_and_norm_(hidden, update, self.feed_forward_norm.weight, self._norm_eps)
        return self.feed_forward(normed)  # type: ignore[no-any-return]


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

    def place(self, device: torch.device, dtype: torch.dtype, *, int8: bool = False) -> None:
        """Compute what the positions need, on the device and in the type that the weights have, and pack those."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(int8=int8)
        rotations = rotation_table(self.config, self.max_context, dtype).to(device)
        self.register_buffer("rotations", rotations, persistent=False)

    @torch.inference_mode()
    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        """Store the tokens in the cache; the logits that follow the `last` ones: (B, V)."""
        rotations = self.rotations[tokens.positions]  # (T, 2, D)
        update = self.embedding(tokens.token_ids)
        hidden = torch.zeros_like(update)
        for layer in self.layers:
            update = layer(hidden, update, rotations, tokens, cache)
        normed = add_and_norm_(hidden[tokens.last], update[tokens.last], self.norm.weight, self.config.norm_eps)
        return self.head(normed)  # type: ignore[no-any-return]
