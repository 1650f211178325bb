"""The KV cache as the CPU reads it fastest: see cpu_attention for the layout."""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cpu_attention import BLOCK, attend_kernel, rotate_and_store
from headrace.worker.engine.cpu_numbers import as_array
from headrace.worker.engine.cpu_vectors import LANES
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens

_DTYPES = (torch.bfloat16, torch.float32)


def is_supported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this cache can hold such a model; the plain one can hold any."""
    return device.type == "cpu" and dtype in _DTYPES and config.head_dim % LANES == 0


class CpuKVCache(KVCache):
    """Keys in blocks of positions with the head's dimensions outside, values by position."""

    def __init__(self, config: ModelConfig, *, num_slots: int, max_context: int, dtype: torch.dtype) -> None:
        self._blocks = -(-max_context // BLOCK)
        super().__init__(config, num_slots=num_slots, max_context=max_context, dtype=dtype, device=torch.device("cpu"))
        self._attend = attend_kernel(config.queries_per_kv, config.head_dim)
        # The kernel's threads and torch's are the same OpenMP pool; more of one than of the other would wait in turn.
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        self._key_arrays = [as_array(layer) for layer in self.keys]
        self._value_arrays = [as_array(layer) for layer in self.values]

    def _shapes(self, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outer = (config.num_layers, self.num_slots, config.num_kv_heads)
        return (
            (*outer, self._blocks, config.head_dim, BLOCK),
            (*outer, self._blocks * BLOCK, config.head_dim),
        )

    def attend(self, layer: int, mixed: Tensor, rotations: Tensor, tokens: PackedTokens) -> Tensor:
        num_tokens, num_heads = len(mixed), self._heads[0]
        keys, values = self._key_arrays[layer], self._value_arrays[layer]
        slots, positions = tokens.slots.numpy(), tokens.positions.numpy()
        queries = torch.empty(num_tokens, num_heads, self._head_dim).numpy()
        attended = torch.empty(num_tokens, num_heads, self._head_dim, dtype=mixed.dtype)
        heads = as_array(mixed.view(num_tokens, -1, self._head_dim))
        rotate_and_store(heads, as_array(rotations), slots, positions, queries, keys, values)
        self._attend(queries, keys, values, slots, positions, as_array(attended))
        return attended.view(num_tokens, -1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        blocks = -(-length // BLOCK)  # what the last one has beyond the prefix is written over before it is read
        self.keys[:, target, :, :blocks] = self.keys[:, source, :, :blocks]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
