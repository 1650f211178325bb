"""Where compiled kernels are kept, and the exponential that they share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

import numba
import numpy as np

from headrace.worker.engine import cpu_numbers


def test_kernels_are_kept_by_the_sources_of_all_unless_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import headrace.worker.engine.cpu_numbers as module, numba; print(numba.config.CACHE_DIR, module.__file__)"

    def folder_and_module() -> list[Path]:
        return [Path(word) for word in subprocess.check_output([sys.executable, "-c", code], text=True).split()]

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    folder, module = folder_and_module()
    assert folder.parent == module.parent / "__pycache__"
    sources = b"".join(source.read_bytes() for source in sorted(module.parent.glob("cpu_*.py")))
    assert folder.name == f"kernels-{hashlib.sha256(sources).hexdigest()[:16]}"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert folder_and_module()[0] == tmp_path


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


def test_a_kernel_gives_the_same_bits_in_the_process_that_compiles_it_and_from_disk(tmp_path: Path) -> None:
    code = """
import hashlib, sys, torch
sys.path.insert(0, sys.argv[1])
from factories import attend, kv_cache, model_config, packed
from headrace.worker.engine.elementwise import add_and_norm_, gated_silu, quantize_rows
torch.manual_seed(1)
tokens = packed([[1] * length for length in (5, 70, 133)])
config = model_config(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
digest = hashlib.sha256()
for dtype in (torch.bfloat16, torch.float32):
    cache = kv_cache(config, slots=3, max_context=160, dtype=dtype, kind="fastest")
    drawn = [torch.randn(208, heads, 64).to(dtype) for heads in (6, 2, 2)]
    rows = torch.randn(50, 1152).to(dtype)
    found = attend(cache, tokens, *drawn), gated_silu(rows), add_and_norm_(rows.clone(), rows.clone(), rows[0], 1e-5)
    for each in (*found, *quantize_rows(rows)):
        digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parents[3])]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    compiled, loaded = (subprocess.check_output(command, text=True, env=environment) for _ in range(2))
    assert any(tmp_path.rglob("*.nbc"))
    assert loaded == compiled
