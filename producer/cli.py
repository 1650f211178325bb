"""The producer's commands. Each exits 0 if all went well, 1 if jobs failed, 2 if it could not do its work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import click

from headrace.producer.batches import Collector
from headrace.producer.client import Producer
from headrace.producer.files import readable_twice
from headrace.producer.formats import preflight, read_lines
from headrace.producer.interrupts import signals_raise_once
from headrace.producer.jobs import remaining_s
from headrace.producer.lines import check_defaults
from headrace.producer.progress import ProgressBar, Tally
from headrace.producer.run import Interrupted, RunOptions, run_file
from headrace.producer.tables import progress_table, status_table
from headrace.producer.writers import open_writer
from headrace.shared import environment
from headrace.shared.errors import BatchNotFound, JobNotFound, ResultTimeout
from headrace.shared.lanes import PRIORITIES

F = TypeVar("F", bound=Callable[..., Any])
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_redis_option = click.option(
    "--redis", "redis_url", envvar=environment.REDIS_URL, metavar="URL", help="Redis server, as redis://host:port/db."
)
_model_option = click.option(
    "--model",
    envvar=environment.MODEL,
    default=environment.DEFAULT_MODEL,
    show_default=True,
    help="Model: an alias, a folder, a .gguf file or a Hub id.",
)
_queue_option = click.option("--queue", envvar=environment.QUEUE, help="RQ queue.  [default: one for the model]")
_tenant_option = click.option(
    "--tenant", envvar=environment.TENANT, metavar="NAME", help="Whose jobs they are: tenants share workers fairly."
)
_batch_option = click.option("--batch", metavar="NAME", help="Name of the batch.  [default: the time]")
_format_option = click.option(
    "--format",
    type=click.Choice(["auto", "jsonl", "text", "openai"]),
    default="auto",
    show_default=True,
    help="What the input's lines are; auto looks at the first.",
)
_output_option = click.option(
    "-o", "--output", required=True, metavar="OUTPUT", help="File for the answers; - is standard output."
)


def _sampling_options(command: F) -> F:
    """Defaults for requests that don't say; they are checked as any request's field."""
    options = (
        click.option("--max-tokens", type=int, help="Most tokens to generate."),
        click.option("--temperature", type=float, help="0 takes the likeliest token each time."),
        click.option("--top-k", type=int, help="Sample from the k likeliest; 0 is off."),
        click.option("--top-p", type=float, help="Sample from the likeliest that make up this probability."),
        click.option("--seed", type=int, help="Fixes the randomness."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("input")
@_output_option
@_model_option
@click.option("--slots", type=int, envvar=environment.SLOTS, help="Jobs decoded at once.")
@click.option("--dtype", envvar=environment.DTYPE, help="bfloat16, float16 or float32.")
@click.option("--device", envvar=environment.DEVICE, help="cpu, cuda or cuda:N.")
@click.option("--quantization", envvar=environment.QUANTIZATION, help="int8: faster on a CPU, less exact.")
@click.option("--max-context", type=int, envvar=environment.MAX_CONTEXT, help="Most tokens of prompt and answer.")
@_queue_option
@_redis_option
@_batch_option
@_format_option
@_sampling_options
def run(
    input: str,
    output: str,
    model: str,
    slots: int | None,
    dtype: str | None,
    device: str | None,
    quantization: str | None,
    max_context: int | None,
    queue: str | None,
    redis_url: str | None,
    batch: str | None,
    format: str,
    **defaults: Any,
) -> None:
    """Run all prompts of INPUT through a model on this machine and write the answers to OUTPUT.

    INPUT is JSON Lines of requests, OpenAI Batch lines, or text with one prompt a line; plain, gzip or zstd; - is
    standard input. Without --redis a private server is started for the run.
    """
    given = {"--slots": slots, "--dtype": dtype, "--device": device, "--max-context": max_context}
    given["--quantization"] = quantization
    options = RunOptions(
        input=input,
        output=output,
        model=model,
        queue=queue,
        format=format,
        batch=batch,
        redis_url=redis_url,
        defaults=defaults,
        worker_arguments=[word for name, value in given.items() if value is not None for word in (name, str(value))],
    )
    try:
        with signals_raise_once():
            tally, writer = run_file(options)
    except Interrupted as interruption:
        click.echo(f"headrace: {interruption}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        click.echo("headrace: interrupted before anything was sent", err=True)
        sys.exit(EXIT_INTERRUPTED)
    click.echo(tally.summary(writer.path, writer.error_path), err=True)
    sys.exit(EXIT_FAILED if tally.failed else 0)


@click.command()
@click.argument("input")
@_batch_option
@_model_option
@_queue_option
@_tenant_option
@click.option("--priority", type=click.Choice(PRIORITIES), help="Who is served first.  [default: normal]")
@_redis_option
@_format_option
@_sampling_options
def submit(
    input: str,
    batch: str | None,
    model: str,
    queue: str | None,
    tenant: str | None,
    priority: str | None,
    redis_url: str | None,
    format: str,
    **defaults: Any,
) -> None:
    """Queue all prompts of INPUT as a batch. INPUT is as for `headrace run`."""
    checked = check_defaults(defaults)
    route: dict[str, Any] = {"model": model, "queue": queue, "tenant": tenant, "priority": priority}
    with readable_twice(input) as path, Producer(redis_url, **route) as producer:
        found = preflight(path, format, checked)
        submission = producer._submission(batch, {}, source=found.source)
        made = producer._submit(read_lines(path, found.format, checked), submission, checked=True)
        count = producer.batch(made.name).progress().total
    bad = f", of which {found.bad:,} malformed (first: {found.first_error})" if found.bad else ""
    click.echo(f"batch {made.name}: {count:,} jobs{bad}")
    click.echo(f"collect the answers with: headrace collect {made.name} -o results.jsonl")


@click.command()
@click.argument("batch")
@_output_option
@click.option("--no-wait", is_flag=True, help="Write what is finished now, and end.")
@click.option("--timeout", type=float, metavar="S", help="Give up after so many seconds.")
@_redis_option
def collect(batch: str, output: str, no_wait: bool, timeout: float | None, redis_url: str | None) -> None:
    """Write the answers of BATCH to OUTPUT as they finish, until all are there."""
    tally = Tally(live=False)
    try:
        with Producer(redis_url) as producer:
            handle = producer.batch(batch)
            total, source = handle.progress().total, handle.source()
            with open_writer(output, source) as writer, ProgressBar(total, tally) as bar:
                for results in _chunks(producer, batch, no_wait, timeout):
                    writer.write(results)
                    tally.add(results)
                    bar.show()
    except KeyboardInterrupt:
        click.echo(f"headrace: interrupted: {tally.jobs:,} answers were written to {output}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    click.echo(tally.summary(writer.path, writer.error_path), err=True)
    sys.exit(EXIT_FAILED if tally.failed else 0)


@click.command()
@click.argument("batch", required=False)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
@_tenant_option
@_queue_option
@_redis_option
def status(batch: str | None, as_json: bool, tenant: str | None, queue: str | None, redis_url: str | None) -> None:
    """Show queues, workers and batches, or how far BATCH is. With a tenant, what is its own on one queue."""
    with Producer(redis_url, tenant=tenant, queue=queue) as producer:
        if batch is not None:
            progress = producer.batch(batch).progress()
            shown = asdict(progress) | {"done": progress.done, "finished": progress.finished}
            click.echo(json.dumps(shown) if as_json else progress_table(batch, progress))
            return
        found = producer.status()
    click.echo(json.dumps(asdict(found)) if as_json else status_table(found))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="BATCH_OR_JOB...")
@_tenant_option
@_redis_option
def cancel(names: tuple[str, ...], tenant: str | None, redis_url: str | None) -> None:
    """Cancel batches and jobs: what waits ends at once, what runs ends soon, with its text so far."""
    with Producer(redis_url, tenant=tenant) as producer:
        for name in names:
            click.echo(f"{name}: {_cancel_one(producer, name)}")


def _cancel_one(producer: Producer, name: str) -> str:
    try:
        return f"{producer.batch(name).cancel():,} jobs cancelled"
    except BatchNotFound:
        pass
    try:
        return "cancelled" if producer.job(name).cancel() else "had ended before"
    except JobNotFound:
        raise JobNotFound(f"no batch and no job {name!r} on the server: never submitted, or expired") from None


def _chunks(producer: Producer, batch: str, no_wait: bool, timeout: float | None) -> Iterator[list[Any]]:
    """The batch's results; ends with it, or, with `no_wait`, when no more are there. Empty chunks mark the time."""
    collector = Collector(batch)
    deadline = None if timeout is None else time.monotonic() + timeout
    while not collector.finished:
        results = producer._run(collector.take(0.0 if no_wait else max(0.0, remaining_s(deadline, 0.5))))
        yield results
        if no_wait and not results:
            return
        if not results and deadline is not None and time.monotonic() >= deadline:
            raise ResultTimeout(f"batch {batch!r} has not ended after {timeout} s: {collector.counts()}")
