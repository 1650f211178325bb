"""`python -m headrace.worker.bench`: what `headrace bench` needs measured where torch is. Answers are JSON."""

from __future__ import annotations

import os
import sys

import click

from headrace.shared import environment
from headrace.shared.connection import DEFAULT_URL
from headrace.shared.errors import HeadraceError
from headrace.worker.settings import EngineSettings

_device_option = click.option("--device", default="auto")
_dtype_option = click.option("--dtype", default="auto")


@click.group()
def main() -> None:
    """Measurements of `headrace bench`."""


@main.command("matmul-limit")
@_device_option
@_dtype_option
def matmul_limit_command(device: str, dtype: str) -> None:
    """How fast this device multiplies matrices."""
    from headrace.worker.bench.matmul_limit import matmul_limit
    from headrace.worker.engine.placement import choose_device, choose_dtype

    EngineSettings(model="", dtype=dtype, device=device)  # refuses what is neither
    chosen = choose_device(device)
    click.echo(matmul_limit(chosen, choose_dtype(dtype, chosen)).model_dump_json())


@main.command("step-curves")
@click.option("--model", required=True)
@click.option("--slots", type=int)
@click.option("--max-context", type=int)
@_device_option
@_dtype_option
def step_curves_command(model: str, slots: int | None, max_context: int | None, device: str, dtype: str) -> None:
    """What a decode step costs as rows and cached tokens grow."""
    from headrace.worker.bench.step_cost import step_curves
    from headrace.worker.loading import load

    settings = EngineSettings(model=model, slots=slots, dtype=dtype, device=device, max_context=max_context)
    click.echo(step_curves(load(settings).engine).model_dump_json())


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
