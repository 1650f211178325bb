"""The pictures are drawn, and what they need is said in one line."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headrace.producer.bench.plots import KV_CACHE, STEP_COST, plot_curves, require_plotting
from headrace.shared.engine_report import CurvePoint, StepCurves
from headrace.shared.errors import SettingsError


def test_two_pictures_are_written(tmp_path: Path) -> None:
    points = [CurvePoint(at=at, seconds=at / 1000) for at in (1, 2, 4)]
    curves = StepCurves(
        cached_tokens=64,
        by_rows=points,
        rows=8,
        by_cached_tokens=points,
        next_token_cached=points,
        next_token_recomputed=points,
    )
    written = plot_curves(curves, tmp_path / "new" / "folder", "a title")
    assert [path.name for path in written] == [STEP_COST, KV_CACHE]
    for path in written:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:])
        assert min(width, height) >= 400


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'headrace\[bench\]'"):
        require_plotting()
