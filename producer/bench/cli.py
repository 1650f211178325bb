"""`headrace bench` and `headrace bench-queue`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from headrace.producer.bench import engine_tools
from headrace.producer.bench.figures import Figures, figures_of
from headrace.producer.bench.plots import plot_curves, require_plotting
from headrace.producer.bench.queue import measure_queue
from headrace.producer.bench.tables import queue_tables, throughput_table
from headrace.producer.bench.throughput import ThroughputOptions, run_workload
from headrace.producer.bench.workload import synthetic_requests, write_requests
from headrace.producer.files import readable_twice
from headrace.producer.formats import AUTO, preflight
from headrace.producer.interrupts import signals_raise_once
from headrace.producer.lines import check_defaults
from headrace.producer.worker_process import require_worker
from headrace.shared.engine_report import MatmulLimit, StepCurves
from headrace.shared.errors import SettingsError
from headrace.shared.options import EngineOptions, engine_options, redis_option, together

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
DEFAULT_JOBS = 192
DEFAULT_QUEUE_JOBS = 100_000
DEFAULT_STEP_MS = 50.0

_json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write all figures."
)


# Defaults for requests that don't say.
_sampling_options = together(
    click.option("--temperature", type=float, default=0.8, show_default=True, help="For requests that don't say."),
    click.option("--top-k", type=int, default=50, show_default=True, help="For requests that don't say."),
    click.option("--top-p", type=float, default=0.95, show_default=True, help="For requests that don't say."),
)


@click.command(short_help="Measure a workload end to end through Redis.")
@click.option(
    "--dataset", metavar="FILE", help="Requests, as `headrace run` takes them.  [default: a built-in workload]"
)
@click.option("--jobs", type=click.IntRange(min=1), help=f"Jobs of the built-in workload.  [default: {DEFAULT_JOBS}]")
@click.option("--seed", type=int, default=0, show_default=True, help="Fixes the built-in workload.")
@engine_options
@redis_option("a private server")
@_sampling_options
@click.option("--matmul-limit/--no-matmul-limit", default=True, help="Measure the machine's matrix products, too.")
@_json_option
@click.option(
    "--plot",
    "plot_folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also time decode steps by rows and by cached tokens, with and without the KV cache, and draw them.",
)
def bench(
    dataset: str | None,
    jobs: int | None,
    seed: int,
    engine: EngineOptions,
    redis_url: str | None,
    matmul_limit: bool,
    json_path: Path | None,
    plot_folder: Path | None,
    **sampling: Any,
) -> None:
    """Run a workload through Redis and a worker's process and show how fast it went and where the time went.

    The model is loaded before the clock starts; all jobs are submitted at once, in order of arrival, and it stops with
    the last result. Without --redis a private server is started.
    """
    require_worker("bench")
    if dataset is not None and jobs is not None:
        raise SettingsError("--jobs is for the built-in workload; a --dataset has as many as it has")
    if plot_folder is not None:
        require_plotting()
    defaults = check_defaults(sampling)
    with _interruptible(), _dataset(dataset, jobs or DEFAULT_JOBS, seed, engine.max_context) as path:
        found = preflight(path, AUTO, defaults)
        limit = engine_tools.measure(MatmulLimit, "matmul-limit", *engine.words()) if matmul_limit else None
        options = ThroughputOptions(
            dataset=path,
            found=found,
            engine=engine,
            redis_url=redis_url,
            defaults=defaults,
        )
        figures = figures_of(*run_workload(options), limit)
        click.echo(throughput_table(figures))
        curves = None
        if plot_folder is not None:
            curves = engine_tools.measure(StepCurves, "step-curves", *engine.words())
            for picture in plot_curves(curves, plot_folder, _title(figures)):
                click.echo(f"wrote {picture}")
    _write_json(json_path, _as_json(figures, curves))
    sys.exit(EXIT_FAILED if figures.run.failed else 0)


@click.command("bench-queue", short_help="Measure the queue alone, with workers that compute nothing.")
@click.option(
    "--queue-jobs",
    type=click.IntRange(min=100),
    default=DEFAULT_QUEUE_JOBS,
    show_default=True,
    help="The longest queue.",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=1),
    default=DEFAULT_STEP_MS,
    show_default=True,
    help="Time of a step of the workers that are compared in number.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="The most workers; 1, 2, 4, … are compared.",
)
@_json_option
def bench_queue(queue_jobs: int, step_ms: float, workers: int, json_path: Path | None) -> None:
    """Measure the queue alone: a producer, workers whose engines compute nothing, and a private server."""
    require_worker("bench-queue")
    with _interruptible():
        figures = measure_queue(queue_jobs, step_ms, workers)
    click.echo(queue_tables(figures))
    _write_json(json_path, asdict(figures))


@contextlib.contextmanager
def _dataset(path: str | None, num_jobs: int, seed: int, max_context: int | None) -> Iterator[str]:
    """The path of a file of requests: what was given, or the built-in workload in a temporary file."""
    if path is not None:
        with readable_twice(path) as twice:
            yield twice
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        written = Path(folder) / "workload.jsonl"
        write_requests(written, synthetic_requests(num_jobs, seed, max_context))
        yield str(written)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        with signals_raise_once():
            yield
    except KeyboardInterrupt:
        click.echo("headrace: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)


def _title(figures: Figures) -> str:
    engine = figures.engine
    return f"{engine.model}, {engine.dtype} on {engine.device}, {engine.num_threads} threads"


def _as_json(figures: Figures, curves: StepCurves | None) -> dict[str, Any]:
    plain = asdict(figures) | {"engine": figures.engine.model_dump()}
    return {"headrace": version("headrace"), **plain, "curves": curves.model_dump() if curves else None}


def _write_json(path: Path | None, value: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise SettingsError(f"can't write {path}: {error.strerror or error}") from None
