"""The tables of `headrace bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from headrace.producer.bench.figures import Figures, LimitShare
from headrace.producer.bench.queue import QueueFigures

_TIMES = {
    "prefill_s": "prefill",
    "attention_s": "attention",
    "matrix_products_s": "matrix products",
    "sampling_s": "sampling",
    "other_s": "everything else",
    "waiting_s": "waiting for jobs",
}
_MEMORY_HEAD = ("jobs done", "start", *(f"{tenth}0%" for tenth in range(1, 11)))
Row = tuple[str, str, str]  # what, value, share


def throughput_table(figures: Figures) -> str:
    """The whole of a run: rates, time, padding, the machine's limit, memory."""
    run, engine, padding = figures.run, figures.engine, figures.padding
    head = (
        f"{engine.model} in {engine.dtype} on {engine.device}, {engine.num_threads} threads, "
        f"{engine.num_slots} slots of {engine.max_context:,} positions"
    )
    rows: list[Row] = [
        ("jobs", f"{run.jobs:,}", ""),
        ("failed", f"{run.failed:,}", ""),
        ("seconds", f"{run.wall_s:,.1f}", ""),
        ("generated tokens", f"{run.generated_tokens:,}", ""),
        ("generated tokens a second", f"{figures.generated_tokens_per_s:,.1f}", ""),
        ("prompt tokens", f"{run.prompt_tokens:,}", ""),
        ("prompt tokens a second", f"{figures.prompt_tokens_per_s:,.1f}", ""),
        ("", "", ""),
        *_time_rows(figures),
        ("", "", ""),
        ("steps", f"{engine.steps.steps:,}", ""),
        (
            "row-steps of empty slots while jobs waited",
            f"{padding.empty_row_steps:,}",
            _percent(padding.row_step_share),
        ),
        ("prompt tokens copied from other rows", f"{engine.steps.reused_tokens:,}", ""),
        ("", "", ""),
        *_limit_rows(figures.limit, engine.dtype),
        ("KV cache", _mib(engine.kv_cache_bytes), ""),
        ("2 x L x K x positions x D x bytes", _mib(engine.kv_cache_formula_bytes), ""),
        ("resident at the start", _mib(engine.memory.start_bytes), ""),
        ("resident at most", _mib(engine.memory.peak_bytes), ""),
        ("resident at the end", _mib(engine.memory.end_bytes), ""),
    ]
    return f"{head}\n\n{aligned(rows)}"


def queue_tables(figures: QueueFigures) -> str:
    """The queue alone: by its length, and by the number of workers."""
    lengths = [
        (
            f"{each.jobs:,}",
            f"{each.enqueued_per_s:,.0f}",
            f"{each.settled_per_s:,.0f}",
            f"{1e6 / each.enqueued_per_s:,.0f}",
            f"{1e6 / each.settled_per_s:,.0f}",
            f"{each.queued_job_bytes:,.0f}",
            "" if each.finished_job_bytes is None else f"{each.finished_job_bytes:,.0f}",
        )
        for each in figures.lengths
    ]
    scaling = [
        (str(each.workers), f"{each.jobs_per_s:,.1f}", _percent(each.share_of_linear)) for each in figures.scaling
    ]
    memory = [
        (f"{each.settled:,}", *(f"{num_bytes / 2**20:,.1f}" for num_bytes in each.worker_bytes))
        for each in figures.lengths
        if each.worker_bytes
    ]
    head = ("jobs queued", "enqueued/s", "done/s", "µs enqueued", "µs done", "bytes queued", "bytes finished")
    return "\n".join(
        [
            "one producer, then one worker whose engine computes nothing; µs and bytes are a job's",
            aligned([head, *lengths]),
            "",
            *(["MiB resident in that worker", aligned([_MEMORY_HEAD, *memory]), ""] if memory else []),
            f"workers with {figures.scaling_slots} slots and a step of {figures.step_ms:g} ms that computes nothing",
            aligned([("workers", "jobs/s", "of linear"), *scaling]),
        ]
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _time_rows(figures: Figures) -> list[Row]:
    seconds = {field.name: getattr(figures.time, field.name) for field in fields(figures.time)}
    total = sum(seconds.values())
    return [
        (f"seconds: {label}", f"{seconds[name]:,.2f}", _percent(seconds[name] / total if total else 0.0))
        for name, label in _TIMES.items()
    ]


def _limit_rows(limit: LimitShare | None, dtype: str) -> list[Row]:
    if limit is None:
        return []
    size = limit.limit_matrix_size
    return [
        (f"GFLOP/s of {dtype} matrices of {size:,} x {size:,}", f"{limit.limit_flops_per_s / 1e9:,.0f}", ""),
        ("GFLOP/s that the tokens' products came to", f"{limit.flops_per_s / 1e9:,.0f}", _percent(limit.share)),
        ("", "", ""),
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
