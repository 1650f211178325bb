"""What lies between the matrix products. Plain torch, or compiled for the CPU where that can be done."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional


@lru_cache
def has_cpu_kernels(device_type: str, dtype: torch.dtype) -> bool:
    """Whether tensors of this kind are the compiled kernels' business."""
    known = dtype in (torch.bfloat16, torch.float32)
    return device_type == "cpu" and known and importlib.util.find_spec("numba") is not None


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second, silu(x) = x / (1 + exp(-x)): (T, 2I) -> (T, I)."""
    if has_cpu_kernels(gate_up.device.type, gate_up.dtype):
        from headrace.worker.engine import cpu_elementwise

        return cpu_elementwise.gated_silu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    # torch's own silu rounds an element by where it lies, and so by how many rows there are: those at the ends of
    # what a thread or a vector takes are computed otherwise than the rest. Its exp does not.
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def add_and_norm_(hidden: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `hidden` in place, and return the sum normalized (RMSNorm, Zhang & Sennrich 2019): (T, E) all.

    What is returned may lie in the memory of `update`, which is not needed any more.
    """
    if has_cpu_kernels(hidden.device.type, hidden.dtype):
        from headrace.worker.engine import cpu_elementwise

        return cpu_elementwise.add_and_norm_(hidden, update, weight, eps)
    hidden += update
    return functional.rms_norm(hidden, weight.shape, weight, eps)


def quantize_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as hidden = scale x (q - 128), |q - 128| <= 127: (T, E) -> (T, E) uint8, (T,) float32.

    A row that is not finite has a scale of NaN.
    """
    if has_cpu_kernels(hidden.device.type, hidden.dtype):
        from headrace.worker.engine import cpu_elementwise

        return cpu_elementwise.quantize_rows(hidden)
    top = hidden.float().abs().amax(dim=1)
    scales = torch.where(top.isfinite(), top, torch.nan).clamp_min(torch.finfo(torch.float32).tiny) / 127
    rounded = (hidden.float() / scales[:, None]).nan_to_num().round() + 128
    return rounded.to(torch.uint8), scales


def scale_rows(product: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """product x scale + bias: (T, E) float32, (T,), (E,) -> (T, E) of `dtype`."""
    if has_cpu_kernels(product.device.type, dtype):
        from headrace.worker.engine import cpu_elementwise

        return cpu_elementwise.scale_rows(product, scales, bias, dtype)
    scaled = product * scales[:, None]
    return (scaled if bias is None else scaled + bias).to(dtype)
