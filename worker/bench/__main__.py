"""`python -m headrace.worker.bench`: what `headrace bench` needs measured where torch is. Answers are JSON."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

import click

from headrace.shared import environment
from headrace.shared.connection import DEFAULT_URL
from headrace.shared.errors import HeadraceError
from headrace.shared.options import EngineOptions, engine_options
from headrace.worker.settings import EngineSettings


@click.group()
def main() -> None:
    """Measurements of `headrace bench`."""


@main.command("matmul-limit")
@engine_options
def matmul_limit_command(engine: EngineOptions) -> None:
    """How fast the engine's device multiplies matrices."""
    from headrace.worker.bench.matmul_limit import matmul_limit
    from headrace.worker.engine.placement import choose_device, choose_dtype

    settings = EngineSettings(**asdict(engine))
    device = choose_device(settings.device)
    click.echo(matmul_limit(device, choose_dtype(settings.dtype, device)).model_dump_json())


@main.command("step-curves")
@engine_options
def step_curves_command(engine: EngineOptions) -> None:
    """What a decode step costs as rows and cached tokens grow."""
    from headrace.worker.bench.step_cost import step_curves
    from headrace.worker.loading import load

    click.echo(step_curves(load(EngineSettings(**asdict(engine))).engine).model_dump_json())


@main.command("idle-worker")
@click.option("--queue", required=True)
@click.option("--slots", type=int, required=True)
@click.option("--step-ms", type=float, required=True)
def idle_worker_command(queue: str, slots: int, step_ms: float) -> None:
    """A worker whose engine computes nothing, on the server that HEADRACE_REDIS_URL names."""
    from headrace.worker.bench.idle_engine import serve_idly

    url = os.environ.get(environment.REDIS_URL, DEFAULT_URL)
    serve_idly(url, queue, num_slots=slots, step_s=step_ms / 1000)


if __name__ == "__main__":
    try:
        main()
    except HeadraceError as error:
        click.echo(f"headrace: error: {error}", err=True)
        sys.exit(2)
