"""How fast the device multiplies large matrices: what a model's products can be compared with."""

from __future__ import annotations

import statistics
import time

import torch

from headrace.shared.engine_report import MatmulLimit

_SIZES = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
_REPEATS = 7


def matmul_limit(device: torch.device, dtype: torch.dtype) -> MatmulLimit:
    """The best of some sizes of square matrices; each size's rate is that of its median time."""
    rates = {size: _flops_per_s(size, device, dtype) for size in _SIZES[device.type]}
    size = max(rates, key=lambda each: rates[each])
    name = str(dtype).removeprefix("torch.")
    return MatmulLimit(device=str(device), dtype=name, size=size, flops_per_s=rates[size])


@torch.inference_mode()
def _flops_per_s(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.mm(left, right)
    times = []
    for _ in range(_REPEATS):
        _wait_for(device)
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        _wait_for(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
