"""Numbers as the compiled kernels read and write them: float32 in registers, float32 or bfloat16 in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
# How kernels are compiled. Sums keep their order ("fastmath" would let them go): what the compiler makes of a kernel in
# the process that compiles it and what it keeps on disk for the next are optimized apart, and would differ in bits.
COMPILED: dict[str, Any] = {
    "parallel": True,
    "fastmath": {"contract"},
    "boundscheck": False,
    "error_model": "numpy",
    "cache": True,
    "nogil": True,
}


def _kernels_folder() -> Path:
    """Where compiled kernels are kept, by the sources of all: Numba's own cache looks at the file that a kernel stands
    in alone, and would go on with an old kernel when a function that it calls, from another file, has changed.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(here.glob("cpu_*.py")))).hexdigest()
    return here / "__pycache__" / f"kernels-{digest[:16]}"


if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(_kernels_folder())  # where it can't be written, Numba takes the user's cache folder


def as_array(tensor: Tensor) -> Array:
    """A CPU tensor's memory as a NumPy array; bfloat16, which NumPy lacks, as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy()


def load(value: Any) -> Any:
    """A stored number as float32; bfloat16 is stored as its bits. Exists in compiled code only."""


def store(value: Any, like: Any) -> Any:
    """float32 as the type of `like`, bfloat16 rounded to nearest, ties to even. Exists in compiled code only."""


def narrow(value: Any, like: Any) -> Any:
    """An integer as the type of `like`, int16 or int32. Exists in compiled code only.

    Numba computes in 64 bits, and a vector holds four times as many integers of 16.
    """


# Chosen by type, not passed in: a kernel that captures functions would be compiled anew in each process.
@overload(load, inline="always")  # type: ignore[untyped-decorator]
def _load_compiled(value: Any) -> Callable[..., Any]:
    return _widen if value == types.uint16 else _same


@overload(store, inline="always")  # type: ignore[untyped-decorator]
def _store_compiled(value: Any, like: Any) -> Callable[..., Any]:
    return _round if like == types.uint16 else _keep


@overload(narrow, inline="always")  # type: ignore[untyped-decorator]
def _narrow_compiled(value: Any, like: Any) -> Callable[..., Any]:
    return _to_int16 if like == types.int16 else _to_int32


def _widen(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _same(value: Any) -> Any:
    return value


def _round(value: Any, like: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def _keep(value: Any, like: Any) -> Any:
    return value


def _to_int16(value: Any, like: Any) -> Any:
    return np.int16(value)


def _to_int32(value: Any, like: Any) -> Any:
    return np.int32(value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def exp(value: Any) -> Any:
    """e to the power of a float32 that is not positive, by Cephes' polynomial (Moshier 1989): within 2 ulp.

    The library's exp is called once a value; this one runs on whole vectors.
    """
    value = max(value, np.float32(-150.0))  # where float32 has long been zero
    power = np.floor(value * np.float32(1.44269504) + np.float32(0.5))
    rest = value - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1)
    # Below 2**-126 the power of two is not a float32 of full precision; its halves are.
    half = np.int32(power) >> np.int32(1)
    return series * _power_of_two(half) * _power_of_two(np.int32(power) - half)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _power_of_two(power: Any) -> Any:
    return np.int32((power + np.int32(127)) << np.int32(23)).view(np.float32)
