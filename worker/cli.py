"""`headrace worker` and `headrace models`."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from headrace.shared import environment
from headrace.shared.connection import DEFAULT_URL
from headrace.shared.environment import DEFAULT_RESULT_TTL_S
from headrace.shared.errors import SettingsError
from headrace.shared.options import EngineOptions, engine_options, queue_option, redis_option
from headrace.worker.settings import (
    DEFAULT_CHECKPOINT_INTERVAL_S,
    DEFAULT_STEP_TIMEOUT_S,
    EngineSettings,
    Limits,
    QueueSettings,
)


@click.command(short_help="Take jobs from a queue and run them as one batch.")
@engine_options
@redis_option()
@queue_option
@click.option(
    "--lease",
    "lease_s",
    type=float,
    envvar=environment.LEASE,
    default=30.0,
    show_default=True,
    help="Seconds without a sign of life after which other workers take the jobs over.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=float,
    envvar=environment.DRAIN_TIMEOUT,
    default=60.0,
    show_default=True,
    help="Seconds that running jobs have to finish after SIGTERM; the rest goes back into the queue.",
)
@click.option(
    "--checkpoint-interval",
    "checkpoint_interval_s",
    type=float,
    envvar=environment.CHECKPOINT_INTERVAL,
    default=DEFAULT_CHECKPOINT_INTERVAL_S,
    show_default=True,
    help="Seconds between two notes of how far the running jobs are, from which other workers go on; 0 for none.",
)
@click.option(
    "--step-timeout",
    "step_timeout_s",
    type=float,
    envvar=environment.STEP_TIMEOUT,
    default=DEFAULT_STEP_TIMEOUT_S,
    show_default=True,
    help="Seconds after which a step counts as hung: the jobs go back and the worker exits with code 3.",
)
@click.option(
    "--result-ttl",
    "result_ttl_s",
    type=int,
    envvar=environment.RESULT_TTL,
    default=DEFAULT_RESULT_TTL_S,
    show_default=True,
    help="Seconds that results are kept.",
)
@click.option(
    "--limit-payload-bytes",
    type=int,
    envvar=environment.LIMIT_PAYLOAD_BYTES,
    default=Limits.payload_bytes,
    show_default=True,
    help="The most that a job's data may have, unpacked.",
)
@click.option(
    "--limit-max-tokens",
    type=int,
    envvar=environment.LIMIT_MAX_TOKENS,
    help="The most max_tokens that a job may ask for.  [default: what the context holds]",
)
@click.option(
    "--limit-stops",
    type=int,
    envvar=environment.LIMIT_STOPS,
    default=Limits.stops,
    show_default=True,
    help="The most stop strings that a job may have, and stop token ids.",
)
@click.option("--burst", is_flag=True, help="Stop when the queue is empty.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure the engine, and write its counts, times and memory to FILE at the end.",
)
@click.option(
    "--log-level",
    envvar=environment.LOG_LEVEL,
    default="INFO",
    show_default=True,
    metavar="LEVEL",
    help="DEBUG, INFO, WARNING or ERROR.",
)
def worker(
    engine: EngineOptions,
    redis_url: str | None,
    queue: str | None,
    lease_s: float,
    drain_timeout_s: float,
    checkpoint_interval_s: float,
    step_timeout_s: float,
    result_ttl_s: int,
    limit_payload_bytes: int,
    limit_max_tokens: int | None,
    limit_stops: int,
    burst: bool,
    report: Path | None,
    log_level: str,
) -> None:
    """Take as many jobs as there are free slots, run them as one batch, and write each back when it is done.

    SIGTERM or Ctrl-C: no new jobs, the running ones finish; a second time, or after the drain timeout, they go back
    into the queue.
    """
    _log_to_stderr(log_level)
    limits = Limits(payload_bytes=limit_payload_bytes, max_tokens=limit_max_tokens, stops=limit_stops)
    engine_settings = EngineSettings(**asdict(engine), limits=limits)
    queue_settings = QueueSettings(
        queue=queue,
        lease_s=lease_s,
        drain_timeout_s=drain_timeout_s,
        checkpoint_interval_s=checkpoint_interval_s,
        step_timeout_s=step_timeout_s,
        burst=burst,
        result_ttl_s=result_ttl_s,
    )
    # Idle OpenMP threads spin for the next loop. By default they do so for milliseconds, in which two workers on one
    # machine keep the cores from each other: ten times slower than one. This long is as fast for one alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from headrace.worker.serve import serve  # torch takes seconds to import; a wrong option should not wait for it

    serve(engine_settings, queue_settings, redis_url or DEFAULT_URL, report)


@click.group(short_help="List and fetch models.")
def models() -> None:
    """List the models that have an alias, and fetch them into the cache folder."""


@models.command("list")
def list_models() -> None:
    """Show the aliases and whether each is here already."""
    from headrace.worker.models import CATALOG
    from headrace.worker.models.cache import entry_folder

    for alias, entry in CATALOG.items():
        folder = entry_folder(alias, entry.sha256)
        here = folder if folder.is_dir() else f"not fetched: {entry.download_bytes / 1e6:.0f} MB"
        click.echo(f"{alias:<16} {entry.title} ({entry.license})  {here}")


@models.command("pull")
@click.argument("alias")
def pull_model(alias: str) -> None:
    """Fetch a model by its alias and convert it, once; prints the folder."""
    from headrace.worker.models import pull

    click.echo(pull(alias, progress=lambda line: click.echo(line, err=True)))


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("headrace")
    root.handlers[:] = [handler]
    root.propagate = False
    try:
        root.setLevel(level.upper())
    except ValueError:
        raise SettingsError(f"--log-level is {level!r}; use DEBUG, INFO, WARNING or ERROR") from None
