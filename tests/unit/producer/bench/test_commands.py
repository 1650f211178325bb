"""The commands say in one line what is missing."""

from __future__ import annotations

import importlib.util

import pytest
from click.testing import CliRunner

from headrace.shared.cli import main


@pytest.mark.parametrize("command", ["bench", "bench-queue"])
def test_without_the_worker_extra_it_says_what_to_install(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    outcome = CliRunner().invoke(main, [command])
    assert outcome.exit_code == 2
    assert (
        outcome.stderr
        == f"headrace: error: `headrace {command}` needs the worker extra: pip install 'headrace[worker]'\n"
    )


def test_without_the_bench_extra_pictures_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    outcome = CliRunner().invoke(main, ["bench", "--plot", "somewhere"])
    assert outcome.exit_code == 2
    assert "pip install 'headrace[bench]'" in outcome.stderr
    assert outcome.stderr.count("\n") == 1
