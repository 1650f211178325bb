"""What lies between the matrix products, compiled for the CPU with Numba: one pass over memory instead of six.

Each row is computed by itself in a fixed order, so its bits do not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from headrace.worker.engine.cpu_numbers import Array, as_array, exp, load, store

_COMPILED: dict[str, Any] = {
    "parallel": True,
    "fastmath": True,
    "boundscheck": False,
    "error_model": "numpy",
    "cache": True,
    "nogil": True,
}


@njit(**_COMPILED)  # type: ignore[untyped-decorator]
def _gated_silu(gate_up: Array, output: Array) -> None:
    size = output.shape[1]
    for row in prange(output.shape[0]):
        for i in range(size):
            gate = load(gate_up[row, i])
            small = exp(-abs(gate))
            sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            output[row, i] = store(gate * sigmoid * load(gate_up[row, size + i]), output[0, 0])


@njit(**_COMPILED)  # type: ignore[untyped-decorator]
def _add_and_norm(hidden: Array, update: Array, weight: Array, eps: Any, added: Array, normed: Array) -> None:
    width = hidden.shape[1]
    for row in prange(hidden.shape[0]):
        squares = np.float32(0)
        for i in range(width):
            added[row, i] = store(load(hidden[row, i]) + load(update[row, i]), added[0, 0])
            value = load(added[row, i])
            squares += value * value
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            normed[row, i] = store(load(added[row, i]) * scale * load(weight[i]), normed[0, 0])


def gated_silu(gate_up: Tensor) -> Tensor:
    """As `elementwise.gated_silu`."""
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    output = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=flat.dtype)
    _gated_silu(as_array(flat), as_array(output))
    return output.view(*gate_up.shape[:-1], -1)


def add_and_norm(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `elementwise.add_and_norm`."""
    flat, flat_update = hidden.reshape(-1, hidden.shape[-1]), update.reshape(-1, hidden.shape[-1])
    added, normed = torch.empty_like(flat), torch.empty_like(flat)
    _add_and_norm(
        as_array(flat), as_array(flat_update), as_array(weight), np.float32(eps), as_array(added), as_array(normed)
    )
    return added.view(hidden.shape), normed.view(hidden.shape)
