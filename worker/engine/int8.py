"""Products in eight-bit integers by oneDNN: nearly twice as fast as bfloat16 where the processor has VNNI, less exact.

Weights are rounded once, by output: w = scale x q, |q| <= 127. Activations are rounded at each use, by row, to
unsigned integers around 128: signed ones are many times slower in oneDNN. Sums are exact in 32 bits, so a row's result
does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.engine.elementwise import quantize_rows, scale_rows

ZERO_POINT = 128
TYPICAL_ROWS = 128  # what packed weights are ordered for; any number of rows gives the same bits


def is_supported(device: torch.device) -> bool:
    """Whether the device multiplies eight-bit integers exactly: without VNNI, pairs of products may overflow."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    exact = any(capabilities.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
    has_products = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return device.type == "cpu" and exact and has_products and hasattr(torch.ops.onednn, "qlinear_pointwise")


class Int8Product:
    """hidden @ weight.T + bias, (T, in) -> (T, out): weight (out, in), bias (out,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        wide = weight.float()
        self._scales = wide.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        rounded = (wide / self._scales[:, None]).round().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, [TYPICAL_ROWS, weight.shape[1]])
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._bias = None if bias is None else bias.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        rounded, scales = quantize_rows(hidden)
        product = torch.ops.onednn.qlinear_pointwise(
            rounded,
            1.0,
            ZERO_POINT,
            self._weight,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return scale_rows(product, scales, self._bias, hidden.dtype)
