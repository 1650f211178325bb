"""`headrace bench` and its relatives as a person uses them: real processes, a small model, a server of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_tiny_model

HEADRACE = Path(sys.executable).with_name("headrace")
LIMIT_S = 240.0


def headrace(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [HEADRACE, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_built_in_workload_is_run_and_its_figures_add_up(tmp_path: Path, tiny_folder: Path) -> None:
    outcome = headrace(
        *("bench", "--model", tiny_folder, "--slots", "4", "--max-context", "128", "--dtype", "float32"),
        *("--jobs", "12", "--json", tmp_path / "figures.json", "--plot", tmp_path / "plots"),
    )
    assert outcome.returncode == 0, outcome.stderr
    for words in ("tiny in float32 on cpu", "generated tokens a second", "resident at most"):
        assert words in outcome.stdout
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["kv_cache.png", "step_cost.png"]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert_adds_up(figures, jobs=12)
    assert [point["at"] for point in figures["curves"]["by_rows"]] == [1, 2, 4]


def test_a_dataset_is_run_and_a_bad_line_is_counted(tmp_path: Path, tiny_folder: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"id": str(number), "prompt": f"prompt {number}", "max_tokens": 5 + number, "ignore_eos": True}
        for number in range(6)
    ]
    dataset = tmp_path / "work.jsonl"
    dataset.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": "a", "max_token": 1}]))
    outcome = headrace(
        *("bench", "--dataset", dataset, "--model", tiny_folder, "--slots", "3", "--max-context", "64"),
        *("--dtype", "float32", "--no-matmul-limit", "--json", tmp_path / "figures.json"),
    )
    assert outcome.returncode == 1, outcome.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["run"]["jobs"], figures["run"]["failed"], figures["limit"]) == (7, 1, None)
    assert figures["run"]["generated_tokens"] == sum(range(5, 11))
    assert_adds_up(figures, jobs=6)


def assert_adds_up(figures: dict[str, Any], *, jobs: int) -> None:
    """`jobs` are those that ran, each to its full length."""
    run, time, engine, padding = figures["run"], figures["time"], figures["engine"], figures["padding"]
    assert sum(time.values()) == pytest.approx(run["wall_s"])
    assert all(value > 0 for value in time.values()), time
    assert figures["generated_tokens_per_s"] == pytest.approx(run["generated_tokens"] / run["wall_s"])
    assert engine["steps"]["row_steps"] == run["generated_tokens"]
    assert engine["steps"]["prompt_tokens"] + engine["steps"]["reused_tokens"] == run["prompt_tokens"]
    assert engine["steps"]["row_steps"] <= engine["steps"]["steps"] * engine["num_slots"]
    assert padding["row_step_share"] == pytest.approx(padding["empty_row_steps"] / padding["all_row_steps"])
    # tests/tiny_model.py: 2 layers of 64 x 128 + 64 x 64 + 3 x 64 x 96, and a head of 64 x 258
    assert engine["matmul_weights"] == 2 * (64 * 128 + 64 * 64 + 3 * 64 * 96) + 64 * 258
    if figures["limit"] is not None:
        needed = (run["prompt_tokens"] + run["generated_tokens"]) * 2 * engine["matmul_weights"]
        limit = figures["limit"]
        assert limit["share"] == pytest.approx(needed / run["wall_s"] / limit["limit_flops_per_s"])
        assert 0 < limit["share"] < 1
    # 2 layers, 2 key/value heads of 16, float32
    positions = engine["num_slots"] * engine["max_context"]
    assert engine["kv_cache_formula_bytes"] == 2 * 2 * 2 * positions * 16 * 4
    assert engine["kv_cache_bytes"] >= engine["kv_cache_formula_bytes"]
    memory = engine["memory"]
    assert 0 < memory["start_bytes"] <= memory["peak_bytes"]
    assert 0 < memory["end_bytes"] <= memory["peak_bytes"]


def test_the_queue_alone_is_measured(tmp_path: Path) -> None:
    options = ("--queue-jobs", "200", "--step-ms", "1", "--workers", "2")
    outcome = headrace("bench-queue", *options, "--json", tmp_path / "queue.json")
    assert outcome.returncode == 0, outcome.stderr
    assert "of linear" in outcome.stdout
    figures = json.loads((tmp_path / "queue.json").read_text())
    (length,) = figures["lengths"]
    assert length["jobs"] == length["settled"] == 200
    if sys.platform == "linux":
        assert len(length["worker_bytes"]) == 11
        assert min(length["worker_bytes"]) > 10 * 2**20
    assert min(length["enqueued_per_s"], length["settled_per_s"], length["queued_job_bytes"]) > 0
    assert [each["workers"] for each in figures["scaling"]] == [1, 2]
    assert figures["scaling"][0]["share_of_linear"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "--dataset", "w.jsonl", "--jobs", "3"], "--jobs is for the built-in workload"),
        (["bench", "--dataset", "no/such.jsonl"], "can't read no/such.jsonl"),
        (["bench", "--no-matmul-limit", "--model", "no/such"], "no/such"),
        (["bench", "--dtype", "float8"], "--dtype is 'float8'; allowed are auto, bfloat16"),
        (["bench", "--temperature", "-1"], "temperature"),
    ],
)
def test_what_can_not_be_run_is_one_line_and_exit_2(arguments: list[str], text: str) -> None:
    outcome = headrace(*arguments)
    assert outcome.returncode == 2
    assert text in outcome.stderr
    assert outcome.stderr.count("\n") == 1
