"""The soak in small: some of each fault, and no job lost, doubled or changed."""

from __future__ import annotations

from pathlib import Path

from faults.soak import MODEL, Plan, soak
from tiny_model import save_tiny_model


def test_nothing_is_lost_and_nothing_done_twice_whatever_breaks(tmp_path: Path) -> None:
    plan = Plan(jobs=80, waves=1, fault_s=20, fault_every_s=1.5, seed=5, finish_s=120)
    report = soak(plan, save_tiny_model(tmp_path / MODEL, max_positions=2048))
    assert report.wrong == [], report
    assert sum(report.faults.values()) > 0, report
    assert report.resumed > 0, report
