"""The KV cache as the CPU reads it fastest: see cpu_attention for the layout."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cpu_attention import BLOCK, attend_kernel
from headrace.worker.engine.cpu_numbers import Array, as_array
from headrace.worker.engine.cpu_rotation import rotate_and_store
from headrace.worker.engine.cpu_vectors import LANES
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens

_DTYPES = (torch.bfloat16, torch.float32)


def is_supported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this cache can hold such a model; the plain one can hold any."""
    return device.type == "cpu" and dtype in _DTYPES and config.head_dim % LANES == 0


class CpuKVCache(KVCache):
    """Keys in blocks of positions with the head's dimensions outside, values by position, bfloat16 in pairs."""

    def __init__(self, config: ModelConfig, *, num_slots: int, max_context: int, dtype: torch.dtype) -> None:
        self._blocks = -(-max_context // BLOCK)
        self._per_element = 4 // dtype.itemsize
        super().__init__(config, num_slots=num_slots, max_context=max_context, dtype=dtype, device=torch.device("cpu"))
        self._attend = attend_kernel(config.queries_per_kv, config.head_dim, self._per_element)
        # The kernel's threads and torch's are the same OpenMP pool; more of one than of the other would wait in turn.
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        both = zip(self.keys, self.values, strict=True)
        self._layers = [(_elements(as_array(keys)), as_array(values)) for keys, values in both]

    def _shapes(self, config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(L, slots, K, blocks, D/E, BLOCK, E) and (L, slots, K, blocks, BLOCK/E, D, E)."""
        each, outer = self._per_element, (config.num_layers, self.num_slots, config.num_kv_heads, self._blocks)
        return (
            (*outer, config.head_dim // each, BLOCK, each),
            (*outer, BLOCK // each, config.head_dim, each),
        )

    def attend(self, layer: int, mixed: Tensor, rotations: Tensor, tokens: PackedTokens) -> Tensor:
        num_tokens, num_heads = len(mixed), self._heads[0]
        keys, values = self._layers[layer]
        slots, positions = tokens.places
        heads = as_array(mixed.view(num_tokens, -1, self._head_dim))
        queries = np.empty((num_tokens, num_heads, self._head_dim // self._per_element), keys.dtype)
        attended = torch.empty(num_tokens, num_heads, self._head_dim, dtype=mixed.dtype)
        rotate_and_store(heads, as_array(rotations), slots, positions, queries, keys, values)
        self._attend(queries, keys, _elements(values), slots, positions, as_array(attended))
        return attended.view(num_tokens, -1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        whole, rest = divmod(length, BLOCK)
        blocks = whole + (
            rest > 0
        )  # the keys that the last one has beyond the prefix are written over before they count
        self.keys[:, target, :, :blocks] = self.keys[:, source, :, :blocks]
        self.values[:, target, :, :whole] = self.values[:, source, :, :whole]
        # Values are weighed in pairs, those beyond a row's end with zero: no NaN of another row may come along.
        rows = BLOCK // self._per_element
        for part in range(self._per_element if rest else 0):
            until = min(max(rest - part * rows, 0), rows)
            self.values[:, target, :, whole, :until, :, part] = self.values[:, source, :, whole, :until, :, part]


def _elements(stored: Array) -> Array:
    """Numbers whose last dimension is that of an element: bits of pairs of bfloat16 as uint32, float32 as it is."""
    return stored.view(np.uint32 if stored.dtype == np.uint16 else stored.dtype)[..., 0]
