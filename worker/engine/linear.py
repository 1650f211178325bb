"""Matrix products, each row by itself to the bit, in the fastest form that the weights can be kept in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.worker.engine.int8 import TYPICAL_ROWS, Int8Product


class Linear(nn.Linear):
    """A product whose rows come out the same, bit for bit, however many they are.

    The libraries multiply the last few rows of a matrix in another order than the rest (float32, oneMKL: a rest of
    fewer than four) or a single row as a vector (bfloat16), so rows of zeros are added where that would happen.
    """

    _packed: Callable[[Tensor], Tensor] | None = None

    def pack(self, *, int8: bool = False) -> None:
        """Keep the weight in the form that it is multiplied in, where there is a faster one than its own.

        bfloat16 on the CPU: in oneDNN's order, with the same bits in less time. `int8`: rounded to eight bits.
        """
        if int8:
            self._packed = Int8Product(self.weight.detach(), self.bias)
        elif self.weight.device.type == "cpu" and self.weight.dtype is torch.bfloat16 and _has_onednn():
            self._packed = _PackedProduct(self.weight.detach(), self.bias)
        if self._packed is not None:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # not kept twice

    def forward(self, hidden: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        rows = len(hidden)
        missing = -rows % 4 if hidden.dtype == torch.float32 else int(rows == 1)
        if not missing:
            return self._multiply(hidden)
        return self._multiply(functional.pad(hidden, (0, 0, 0, missing)))[:rows]

    def _multiply(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self._packed is None else self._packed(hidden)


class _PackedProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def __call__(self, hidden: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, "none", [], "")
        return product


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
