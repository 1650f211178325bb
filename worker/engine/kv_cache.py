"""The KV cache: preallocated, one slot a row, the sole owner of where keys and values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.engine.attention import attend
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.huge_pages import zeros
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.rope import rotate


class KVCache:
    """Keys and values of `num_slots` rows of up to `max_context` positions each.

    Behind them lie `spare_slots`, for tokens that are computed though no row needs them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        spare_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self._all_slots = num_slots + spare_slots
        self.max_context = max_context
        self.device = device
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        keys, values = self._shapes(config)
        # Positions beyond a row's end are multiplied by a weight of exactly zero, so they must not hold NaN.
        self.keys = zeros(keys, dtype=dtype, device=device)
        self.values = zeros(values, dtype=dtype, device=device)

    def _shapes(self, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys and of the values: both (L, slots, K, S, D) here."""
        shape = (config.num_layers, self._all_slots, config.num_kv_heads, self.max_context, config.head_dim)
        return shape, shape

    @property
    def num_bytes(self) -> int:
        """What the cache takes: 2 x L x K x positions x D x bytes a value, positions over all slots, spare ones too."""
        return self.keys.nbytes + self.values.nbytes

    def attend(self, layer: int, mixed: Tensor, rotations: Tensor, tokens: PackedTokens) -> Tensor:
        """Store the tokens' keys and values, then let each look at its row up to itself.

        `mixed` holds each token's query heads, key heads and value heads, not rotated yet: (T, (H + 2K) x D); with
        `rotations`, (T, 2, D) -> (T, H x D).
        """
        heads = mixed.view(len(mixed), sum(self._heads), self._head_dim)
        queries, keys, values = torch.split(heads, self._heads, dim=1)
        cos, sin = rotations[:, 0, None], rotations[:, 1, None]  # (T, 1, D)
        self.keys[layer, tokens.slots, :, tokens.positions] = rotate(keys, cos, sin)
        self.values[layer, tokens.slots, :, tokens.positions] = values
        attended = attend(
            rotate(queries, cos, sin),
            self.keys[layer],
            self.values[layer],
            tokens.slots,
            tokens.positions + 1,
            tokens.longest,
        )
        return attended.view(len(mixed), -1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give one slot the first `length` positions of another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clear(self, slot: int) -> None:
        """Wipe a slot that may hold NaN: even at a weight of zero it would spoil the row that comes next."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0
