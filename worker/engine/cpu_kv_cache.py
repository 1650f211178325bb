"""The KV cache as the CPU reads it fastest: see cpu_attention for the layout."""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cpu_attention import BLOCK, UNROLL, decode_kernel
from headrace.worker.engine.cpu_numbers import as_array
from headrace.worker.engine.kv_cache import KVCache

_DTYPES = (torch.bfloat16, torch.float32)


def is_supported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this cache can hold such a model; the plain one can hold any."""
    return device.type == "cpu" and dtype in _DTYPES and config.head_dim % UNROLL == 0


class CpuKVCache(KVCache):
    """Keys in blocks of positions with the head's dimensions outside, values by position."""

    def __init__(self, config: ModelConfig, *, num_slots: int, max_context: int, dtype: torch.dtype) -> None:
        self._blocks = -(-max_context // BLOCK)
        super().__init__(config, num_slots=num_slots, max_context=max_context, dtype=dtype, device=torch.device("cpu"))
        self._attend = decode_kernel(config.queries_per_kv, config.head_dim)
        self._scale = config.head_dim**-0.5
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

    def write_prompts(self, layer: int, first_slot: int, keys: Tensor, values: Tensor) -> None:
        rows, length, kv_heads, head_dim = keys.shape
        slots = slice(first_slot, first_slot + rows)
        blocks = -(-length // BLOCK)
        padded = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, blocks * BLOCK - length))
        blocked = padded.view(rows, blocks, BLOCK, kv_heads, head_dim).permute(0, 3, 1, 4, 2)
        self.keys[layer, slots, :, :blocks] = blocked
        self.values[layer, slots, :, :length] = values.transpose(1, 2)

    def write_step(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        rows = torch.arange(positions.shape[0])
        self.keys[layer, rows, :, positions // BLOCK, :, positions % BLOCK] = keys
        self.values[layer, rows, :, positions] = values

    def attend(self, layer: int, queries: Tensor, lengths: Tensor, longest: int) -> Tensor:
        attended = torch.empty(queries.shape, dtype=queries.dtype)
        self._attend(
            as_array(queries.contiguous()),
            self._key_arrays[layer],
            self._value_arrays[layer],
            lengths.numpy(),
            as_array(attended),
            self._scale,
        )
        return attended

    def move(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        blocks = -(-length // BLOCK)
        self.keys[:, target, :, :blocks] = self.keys[:, source, :, :blocks]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
        self.lengths[target] = length
