"""The KV cache: preallocated, one slot a row, the sole owner of where keys and values lie and how long rows are.

Live rows always fill slots 0 to n-1. When a row leaves, the last row moves into its slot, so a decode step reads a
dense block and no step is spent on empty slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.engine.attention import decode_attention
from headrace.worker.engine.config import ModelConfig


class KVCache:
    """Keys and values of `num_slots` rows of up to `max_context` positions each."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.max_context = max_context
        keys, values = self._shapes(config)
        # Positions beyond a row's end are multiplied by a weight of exactly zero, so they must not hold NaN.
        self.keys = torch.zeros(keys, dtype=dtype, device=device)
        self.values = torch.zeros(values, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)  # on the host: the loop reads it at every step

    def _shapes(self, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the keys and of the values: both (L, slots, K, S, D) here."""
        shape = (config.num_layers, self.num_slots, config.num_kv_heads, self.max_context, config.head_dim)
        return shape, shape

    @property
    def num_bytes(self) -> int:
        """What the cache takes: 2 x L x K x positions x D x bytes a value, positions over all slots."""
        return self.keys.nbytes + self.values.nbytes

    def write_prompts(self, layer: int, first_slot: int, keys: Tensor, values: Tensor) -> None:
        """Store prompts in slots from `first_slot` on, from position 0: two of (B, T, K, D), padding included."""
        rows, length = keys.shape[:2]
        slots = slice(first_slot, first_slot + rows)
        self.keys[layer, slots, :, :length] = keys.transpose(1, 2)
        self.values[layer, slots, :, :length] = values.transpose(1, 2)

    def write_step(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token for each of rows 0 to B-1, at its own position: (B,), two of (B, K, D)."""
        rows = torch.arange(positions.shape[0], device=positions.device)
        self.keys[layer, rows, :, positions] = keys
        self.values[layer, rows, :, positions] = values

    def attend(self, layer: int, queries: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """One query a row over the first `lengths` positions of rows 0 to B-1: (B, H, D), (B,) -> (B, H, D).

        `longest` is the largest of `lengths`, known to the host.
        """
        rows = queries.shape[0]
        return decode_attention(queries, self.keys[layer, :rows], self.values[layer, :rows], lengths, longest)

    def commit(self, slot: int, length: int) -> None:
        """Record that `slot` now holds `length` positions."""
        self.lengths[slot] = length

    def advance(self, num_rows: int) -> None:
        """Record that each of rows 0 to num_rows-1 has grown by one position."""
        self.lengths[:num_rows] += 1

    def clear(self, slot: int) -> None:
        """Wipe a slot that may hold NaN: even at a weight of zero it would spoil the row that comes next."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def move(self, source: int, target: int) -> None:
        """Move a row's positions to another slot."""
        length = int(self.lengths[source])
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.lengths[target] = length
