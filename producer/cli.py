"""The producer's commands. Each exits 0 if all went well, 1 if jobs failed, 2 if it could not do its work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from headrace.producer.batches import Collector
from headrace.producer.client import Producer
from headrace.producer.files import fingerprint, readable_twice
from headrace.producer.formats import preflight, read_lines
from headrace.producer.interrupts import signals_raise_once
from headrace.producer.jobs import remaining_s
from headrace.producer.lines import Chat, check_defaults
from headrace.producer.progress import ProgressBar, Tally
from headrace.producer.run import PATIENCE_S, Interrupted, RunOptions, run_file
from headrace.producer.submission import Submission
from headrace.producer.tables import progress_table, status_table
from headrace.producer.writers import open_writer
from headrace.shared.errors import BatchNotFound, JobNotFound, ResultTimeout, ServerUnavailable, SettingsError
from headrace.shared.lanes import PRIORITIES
from headrace.shared.options import (
    EngineOptions,
    engine_options,
    model_option,
    queue_option,
    redis_option,
    tenant_option,
    together,
)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_MAX_SKIPPED_SHOWN = 20

_batch_option = click.option("--batch", metavar="NAME", help="Name of the batch.  [default: the time]")
_format_option = click.option(
    "--format",
    type=click.Choice(["auto", "jsonl", "text", "openai"]),
    default="auto",
    show_default=True,
    help="What the input's lines are; auto looks at the first.",
)
_output_option = click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUTPUT",
    help="File for the answers, which is replaced; - is standard output.",
)


_chat_options = together(
    click.option(
        "--chat",
        is_flag=True,
        help="Send each prompt as a user's message, through the model's chat template. Lines with messages stay as "
        "they are.",
    ),
    click.option("--system", metavar="TEXT", help="With --chat: a system message before each prompt."),
)
# Defaults for requests that don't say; they are checked as any request's field.
_sampling_options = together(
    click.option(
        "--max-tokens",
        type=int,
        metavar="N",
        help="Most tokens of an answer; this and the next four are for lines that don't say.  [default: 256]",
    ),
    click.option("--temperature", type=float, metavar="T", help="0 takes the likeliest token each time.  [default: 1]"),
    click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest.  [default: 0, all]"),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        help="Sample from the likeliest that make up this probability.  [default: 1]",
    ),
    click.option("--seed", type=int, metavar="N", help="Fixes the randomness.  [default: each job's id]"),
)


@click.command(short_help="Answer all prompts of a file on this machine.")
@click.argument("input")
@_output_option
@engine_options
@queue_option
@redis_option("a private server for the run")
@_batch_option
@_format_option
@_chat_options
@_sampling_options
def run(
    input: str,
    output: str,
    engine: EngineOptions,
    queue: str | None,
    redis_url: str | None,
    batch: str | None,
    format: str,
    chat: bool,
    system: str | None,
    **defaults: Any,
) -> None:
    """Run all prompts of INPUT through a model on this machine and write the answers to OUTPUT.

    INPUT is JSON Lines of requests, OpenAI Batch lines, or text with one prompt a line; plain, gzip or zstd; - is
    standard input. Without --redis a private server is started for the run. If it is interrupted or fails, the same
    command goes on from what OUTPUT has.
    """
    options = RunOptions(
        input=input,
        output=output,
        engine=engine,
        queue=queue,
        format=format,
        chat=_chat(chat, system),
        batch=batch,
        redis_url=redis_url,
        defaults=defaults,
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
    sys.exit(EXIT_FAILED if tally.any_failed else 0)


@click.command()
@click.argument("input")
@_batch_option
@model_option
@queue_option
@tenant_option
@click.option("--priority", type=click.Choice(PRIORITIES), help="Who is served first.  [default: normal]")
@redis_option()
@_format_option
@_chat_options
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
    chat: bool,
    system: str | None,
    **defaults: Any,
) -> None:
    """Queue all prompts of INPUT as a batch. INPUT is as for `headrace run`.

    Any `headrace worker` of the queue runs them; `headrace collect` writes the answers. If the server fails before all
    is sent, the same command with the same --batch sends what is missing.
    """
    checked = check_defaults(defaults)
    as_chat = _chat(chat, system)
    route: dict[str, Any] = {"model": model, "queue": queue, "tenant": tenant, "priority": priority}
    given = {"format": format, "chat": chat, "system": system, **route, **checked}
    with readable_twice(input) as path, Producer(redis_url, **route, patience_s=PATIENCE_S) as producer:
        found = preflight(path, format, checked, as_chat)
        mark = fingerprint(path, given) if batch else None
        submission = producer._submission(batch, {}, source=found.source, fingerprint=mark)
        try:
            made = producer._submit(read_lines(path, found.format, checked, as_chat), submission, checked=True)
        except (ServerUnavailable, BatchNotFound) as error:
            raise type(error)(f"{error} ({_sent(submission)})") from error
        count = producer.batch(made.name).progress().total
    bad = f", of which {found.bad:,} malformed (first: {found.first_error})" if found.bad else ""
    click.echo(f"batch {made.name}: {count:,} jobs{bad}")
    click.echo(f"collect the answers with: headrace collect {made.name} -o results.jsonl")


def _sent(submission: Submission) -> str:
    text = f"{submission.num_sent:,} jobs of batch {submission.name} were sent"
    return text if submission.fingerprint is None else f"{text}; the same command again sends the rest"


@click.command(short_help="Write the answers of a batch to a file.")
@click.argument("batch")
@_output_option
@click.option("--no-wait", is_flag=True, help="Write what is finished now, and end.")
@click.option("--timeout", type=float, metavar="S", help="Give up after so many seconds.")
@redis_option()
def collect(batch: str, output: str, no_wait: bool, timeout: float | None, redis_url: str | None) -> None:
    """Write the answers of BATCH to OUTPUT as they finish, until all are there.

    They stay on the server; to collect again writes OUTPUT anew.
    """
    tally = Tally(live=False)
    try:
        with Producer(redis_url, patience_s=PATIENCE_S) as producer:
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
@tenant_option
@queue_option
@redis_option()
def status(batch: str | None, as_json: bool, tenant: str | None, queue: str | None, redis_url: str | None) -> None:
    """Show queues, workers and batches, or how far BATCH is. With a tenant, what is its own on one queue."""
    with Producer(redis_url, tenant=tenant, queue=queue, patience_s=PATIENCE_S) as producer:
        if batch is not None:
            progress = producer.batch(batch).progress()
            shown = asdict(progress) | {"done": progress.done, "finished": progress.finished}
            click.echo(json.dumps(shown) if as_json else progress_table(batch, progress))
            return
        found = producer.status()
    click.echo(json.dumps(asdict(found)) if as_json else status_table(found))


@click.command(short_help="Cancel batches and jobs.")
@click.argument("names", nargs=-1, required=True, metavar="BATCH_OR_JOB...")
@tenant_option
@redis_option()
def cancel(names: tuple[str, ...], tenant: str | None, redis_url: str | None) -> None:
    """Cancel batches and jobs: what waits ends at once, what runs ends soon, with its text so far."""
    with Producer(redis_url, tenant=tenant, patience_s=PATIENCE_S) as producer:
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


@click.command()
@click.argument("batch")
@click.option(
    "--code",
    "codes",
    metavar="CODE",
    multiple=True,
    help="Only jobs with this error code, such as worker_lost; may be repeated.  [default: all but cancelled]",
)
@redis_option()
def retry(batch: str, codes: tuple[str, ...], redis_url: str | None) -> None:
    """Put the failed jobs of BATCH back on the queue.

    Their results are taken back; `headrace collect` writes all answers anew once they have run again.
    """
    with Producer(redis_url) as producer:
        retried = producer.batch(batch).retry(*codes)
    for name, why in list(retried.skipped.items())[:_MAX_SKIPPED_SHOWN]:
        click.echo(f"{name}: {why}", err=True)
    more = len(retried.skipped) - _MAX_SKIPPED_SHOWN
    if more > 0:
        click.echo(f"and {more:,} more", err=True)
    left = f", {len(retried.skipped):,} can't be retried" if retried.skipped else ""
    click.echo(f"{batch}: {retried.count:,} jobs back on the queue{left}")
    sys.exit(EXIT_FAILED if retried.skipped else 0)


def _chat(chat: bool, system: str | None) -> Chat | None:
    if system is not None and not chat:
        raise SettingsError("--system belongs to --chat, which sends prompts as messages; give both")
    return Chat(system) if chat else None


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
