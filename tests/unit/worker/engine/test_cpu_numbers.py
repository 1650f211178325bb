"""Where compiled kernels are kept, and the exponential that they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from headrace.worker.engine import cpu_numbers


def test_kernels_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    code = "import headrace.worker.engine.cpu_numbers, numba; print(numba.config.CACHE_DIR)"
    folder = Path(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
    assert folder.parent == tmp_path / "kernels"


def test_exp_is_exact_to_two_units_down_to_nothing() -> None:
    @numba.njit  # type: ignore[untyped-decorator]
    def fill(values: np.ndarray, output: np.ndarray) -> None:
        for i in range(len(values)):
            output[i] = cpu_numbers.exp(values[i])

    values = np.concatenate((np.linspace(-160, 0, 100_001), [-np.float32(1e30), 0.0])).astype(np.float32)
    found = np.empty_like(values)
    fill(values, found)
    exact = np.exp(values.astype(np.float64))
    unit = np.maximum(np.spacing(np.maximum(exact, 1e-60).astype(np.float32)), np.float32(1e-45)).astype(np.float64)
    assert np.max(np.abs(found - exact) / unit) <= 2
    assert found[-1] == 1
