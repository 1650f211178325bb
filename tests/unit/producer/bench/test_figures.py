"""The arithmetic of the reports against values worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from headrace.producer.bench.figures import RunCounts, figures_of, needed_flops
from headrace.producer.bench.queue import LengthFigures, QueueFigures, rate_between, scaling_of
from headrace.producer.bench.tables import aligned, queue_tables, throughput_table
from headrace.shared.engine_report import EngineReport, MatmulLimit, Memory, Seconds, Steps

RUN = RunCounts(jobs=10, failed=1, wall_s=20.0, prompt_tokens=300, generated_tokens=700)
LIMIT = MatmulLimit(device="cpu", dtype="bfloat16", size=1024, flops_per_s=1e6)


def report(**changes: Any) -> EngineReport:
    values: dict[str, Any] = {
        "model": "m",
        "device": "cpu",
        "dtype": "bfloat16",
        "num_threads": 2,
        "num_slots": 4,
        "max_context": 128,
        "matmul_weights": 1000,
        "kv_cache_bytes": 2**20,
        "kv_cache_formula_bytes": 2**20,
        "seconds": Seconds(prefill=1.0, attention=2.0, matrix_products=3.0, sampling=4.0, other=5.0),
        "steps": Steps(steps=100, row_steps=300, empty_row_steps=100, prompt_tokens=300, reused_tokens=100),
        "memory": Memory(start_bytes=10 * 2**20, peak_bytes=30 * 2**20, end_bytes=20 * 2**20),
    }
    return EngineReport(**(values | changes))


def test_rates_are_of_the_whole_run() -> None:
    figures = figures_of(RUN, report(), LIMIT)
    assert figures.generated_tokens_per_s == 35.0
    assert figures.prompt_tokens_per_s == 15.0


def test_what_the_engine_was_not_busy_it_waited() -> None:
    times = asdict(figures_of(RUN, report(), None).time)
    assert times["waiting_s"] == 5.0
    assert sum(times.values()) == RUN.wall_s


def test_shares_of_padding() -> None:
    padding = figures_of(RUN, report(), None).padding
    assert (padding.all_row_steps, padding.row_step_share) == (400, 0.25)


def test_the_share_of_the_limit_is_products_needed_over_products_possible() -> None:
    assert needed_flops(1, 134_479_872) == 268_959_744  # SmolLM2-135M: each of its weights multiplied and added
    limit = figures_of(RUN, report(), LIMIT).limit
    assert limit is not None
    assert limit.needed_flops == 2_000_000  # 1,000 tokens x 2 x 1,000 weights
    assert limit.flops_per_s == 100_000
    assert limit.share == 0.1


def test_nothing_done_is_no_division_by_zero() -> None:
    nothing = RunCounts(jobs=1, failed=1, wall_s=1.0, prompt_tokens=0, generated_tokens=0)
    steps = Steps(steps=0, row_steps=0, empty_row_steps=0, prompt_tokens=0, reused_tokens=0)
    figures = figures_of(nothing, report(steps=steps), LIMIT)
    assert figures.padding.row_step_share == 0.0


def test_the_table_shows_each_figure_under_its_name() -> None:
    table = throughput_table(figures_of(RUN, report(), LIMIT))
    lines = {line.split("  ")[0]: line.split() for line in table.splitlines()}
    assert lines["generated tokens a second"][-1] == "35.0"
    assert lines["seconds: waiting for jobs"][-2:] == ["5.00", "25.0%"]
    assert lines["row-steps of empty slots while jobs waited"][-2:] == ["100", "25.0%"]
    assert lines["GFLOP/s that the tokens' products came to"][-1] == "10.0%"
    assert lines["resident at most"][-2:] == ["30.0", "MiB"]
    assert "GFLOP" not in throughput_table(figures_of(RUN, report(), None))


def test_a_rate_leaves_out_the_start_and_the_end() -> None:
    slow_start = [0.0] * 10 + [100 + 0.01 * number for number in range(80)] + [500.0] * 10
    assert rate_between(slow_start, 0.1, 0.9) == pytest.approx(100.0)


def test_linear_is_what_the_first_count_would_do() -> None:
    shares = [each.share_of_linear for each in scaling_of([(1, 50.0), (2, 100.0), (4, 190.0)])]
    assert shares == [1.0, 1.0, 0.95]


def test_the_queues_tables() -> None:
    length = LengthFigures(
        jobs=1000,
        settled=500,
        enqueued_per_s=10_000.0,
        settled_per_s=500.0,
        queued_job_bytes=900.4,
        finished_job_bytes=None,
        worker_bytes=[2**20 * number for number in range(100, 111)],
    )
    figures = QueueFigures(lengths=[length], scaling=scaling_of([(1, 50.0)]), scaling_slots=32, step_ms=50.0)
    shown = [line.split() for line in queue_tables(figures).splitlines()]
    assert ["1,000", "10,000", "500", "100", "2,000", "900"] in shown
    assert ["1", "50.0", "100.0%"] in shown
    memory = shown.index(["500", *(f"{number}.0" for number in range(100, 111))])
    assert [len(line) for line in (shown[memory], shown[memory - 1])] == [12, 13]  # "jobs done" is of two words
    silent = QueueFigures(
        lengths=[replace(length, worker_bytes=[])], scaling=figures.scaling, scaling_slots=32, step_ms=50.0
    )
    assert "resident" not in queue_tables(silent)


def test_columns_line_up() -> None:
    assert aligned([("a", "1"), ("bbb", "22")]) == "a     1\nbbb  22"
