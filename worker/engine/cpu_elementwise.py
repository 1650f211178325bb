"""What lies between the matrix products, compiled for the CPU with Numba: one pass over memory instead of six.

Each row is computed by itself in a fixed order, so its bits do not depend on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from headrace.worker.engine.cpu_numbers import COMPILED, Array, as_array, exp, load, store
from headrace.worker.engine.cpu_vectors import LANES, sum_lanes

_WITHOUT_SIGN = np.int32(0x7FFFFFFF)
_INFINITY_BITS = np.int32(0x7F800000)
_TINY = np.float32(2**-126)


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _gated_silu(gate_up: Array, output: Array) -> None:
    size = output.shape[1]
    for row in prange(output.shape[0]):
        for i in range(size):
            gate = load(gate_up[row, i])
            small = exp(-abs(gate))
            sigmoid = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            output[row, i] = store(gate * sigmoid * load(gate_up[row, size + i]), output[0, 0])


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _add_and_norm(hidden: Array, update: Array, weight: Array, eps: Any) -> None:
    width = hidden.shape[1]
    padded = (width + LANES - 1) // LANES * LANES
    for row in prange(hidden.shape[0]):
        squares = np.zeros(padded, np.float32)
        for i in range(width):
            hidden[row, i] = store(load(hidden[row, i]) + load(update[row, i]), hidden[0, 0])
            squares[i] = load(hidden[row, i]) * load(hidden[row, i])
        scale = np.float32(1) / np.sqrt(sum_lanes(squares, padded) / np.float32(width) + eps)
        for i in range(width):
            update[row, i] = store(load(hidden[row, i]) * scale * load(weight[i]), update[0, 0])


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _quantize_rows(hidden: Array, rounded: Array, scales: Array) -> None:
    width = hidden.shape[1]
    for row in prange(hidden.shape[0]):
        # As integers, the bits of numbers without their sign are in the numbers' order, infinity and NaN on top.
        top = np.int32(0)
        for i in range(width):
            top = np.int32(max(top, np.float32(load(hidden[row, i])).view(np.int32) & _WITHOUT_SIGN))
        if top >= _INFINITY_BITS:
            scales[row] = np.float32(np.nan)
            for i in range(width):
                rounded[row, i] = 128
        else:
            scale = max(np.int32(top).view(np.float32), _TINY) / np.float32(127)
            scales[row] = scale
            for i in range(width):
                rounded[row, i] = np.uint8(np.int32(np.rint(load(hidden[row, i]) / scale)) + np.int32(128))


@njit(**COMPILED)  # type: ignore[untyped-decorator]
def _scale_rows(product: Array, scales: Array, bias: Array, output: Array) -> None:
    for row in prange(product.shape[0]):
        scale = scales[row]
        for i in range(product.shape[1]):
            output[row, i] = store(product[row, i] * scale + bias[i], output[0, 0])


def gated_silu(gate_up: Tensor) -> Tensor:
    """As `elementwise.gated_silu`."""
    output = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _gated_silu(as_array(gate_up), as_array(output))
    return output


def add_and_norm_(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `elementwise.add_and_norm_`."""
    _add_and_norm(as_array(hidden), as_array(update), as_array(weight), np.float32(eps))
    return update


def quantize_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """As `elementwise.quantize_rows`."""
    rounded, scales = torch.empty(hidden.shape, dtype=torch.uint8), torch.empty(len(hidden))
    _quantize_rows(as_array(hidden), rounded.numpy(), scales.numpy())
    return rounded, scales


def scale_rows(product: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `elementwise.scale_rows`."""
    output = torch.empty(product.shape, dtype=dtype)
    offsets = torch.zeros(product.shape[1]) if bias is None else bias
    _scale_rows(product.numpy(), scales.numpy(), offsets.numpy(), as_array(output))
    return output
