"""`headrace run`: a file in, a file out, on this machine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.producer.batches import Collector
from headrace.producer.client import Producer
from headrace.producer.embedded import EmbeddedServer
from headrace.producer.files import readable_twice
from headrace.producer.formats import Preflight, preflight, read_lines
from headrace.producer.lines import Chat, Line, check_defaults
from headrace.producer.progress import ProgressBar, Tally
from headrace.producer.settings import new_batch_name
from headrace.producer.submission import Submission
from headrace.producer.worker_process import WorkerProcess, require_worker
from headrace.producer.writers import ResultWriter, open_writer
from headrace.shared import keys
from headrace.shared.errors import HeadraceError, InputError
from headrace.shared.lanes import PRIORITIES, Lane
from headrace.shared.options import EngineOptions

# Jobs on the server that have no result yet: enough to keep any worker busy, few enough for flat memory.
MAX_UNFINISHED = 10_000
_POLL_S = 0.5
PATIENCE_S = 120.0  # how long a command waits for a server that has answered before
_EMBEDDED_PATIENCE_S = 2.0  # one that has ended will not come back


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """`redis_url` None starts an embedded server."""

    input: str
    output: str
    engine: EngineOptions
    queue: str | None = None
    format: str = "auto"
    chat: Chat | None = None
    batch: str | None = None
    redis_url: str | None = None
    defaults: Mapping[str, Any]


class Interrupted(Exception):
    """The run was stopped by a signal; its text says what was written and how to go on."""


def run_file(options: RunOptions) -> tuple[Tally, ResultWriter]:
    """Run a whole input. Raises HeadraceError if it could not be run, Interrupted on Ctrl-C or SIGTERM."""
    require_worker()
    defaults = check_defaults(options.defaults)
    if _same_file(options.input, options.output):
        raise InputError(f"{options.output} is the input; write the answers to another file")
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(readable_twice(options.input))
        found = preflight(path, options.format, defaults, options.chat)
        writer = stack.enter_context(open_writer(options.output, found.source))
        url = options.redis_url or stack.enter_context(EmbeddedServer()).url
        queue = options.queue or keys.queue_name(options.engine.model)
        patience_s = PATIENCE_S if options.redis_url else _EMBEDDED_PATIENCE_S
        producer = stack.enter_context(Producer(url, model=options.engine.model, queue=queue, patience_s=patience_s))
        name = options.batch or new_batch_name(producer._settings.route.tenant)
        feeder = Feeder(producer, name, path, found, defaults, listed=options.redis_url is not None)
        worker = stack.enter_context(WorkerProcess(url, ["--queue", queue, *options.engine.words()]))
        stack.enter_context(feeder)
        own_lanes = [Lane(queue, priority, producer._settings.route.tenant).name for priority in PRIORITIES]
        forget = [] if options.redis_url else own_lanes
        tally = Tally(live=True)
        try:
            _collect(Collector(name), feeder, worker, writer, tally, forget)
        except KeyboardInterrupt:
            raise Interrupted(_interrupted_text(writer, found.count, options, name)) from None
        except HeadraceError as error:
            if not writer.num_written:
                raise
            raise HeadraceError(f"{error} ({_written(writer, found.count)})") from error
        return tally, writer


def _collect(
    collector: Collector,
    feeder: Feeder,
    worker: WorkerProcess,
    writer: ResultWriter,
    tally: Tally,
    forget: Sequence[str],
) -> None:
    """Write results until the batch ends. `forget` names the queues of a server that is ours alone to tidy."""
    with ProgressBar(feeder.num_jobs, tally) as bar:
        while not collector.finished:
            results = feeder.producer._run(collector.take(_POLL_S))
            writer.write(results)
            tally.add(results)
            bar.show()
            if forget:
                feeder.producer._run(collector.forget(results, forget))
            feeder.release(len(results))
            if not collector.finished:
                feeder.check()
                worker.check()


class Feeder:
    """Submits an input on a thread of its own, at most MAX_UNFINISHED jobs ahead of the results.

    As a context manager; at its end the thread stops submitting, and the batch is closed as it is.
    """

    def __init__(
        self,
        producer: Producer,
        name: str,
        path: str,
        found: Preflight,
        defaults: Mapping[str, Any],
        *,
        listed: bool,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        self.producer = producer
        self.num_jobs = found.count
        self._lines = read_lines(path, found.format, defaults, found.chat)
        self._submission: Submission = producer._submission(name, {}, source=found.source, listed=listed)
        self._room = max_unfinished
        self._changed = threading.Condition()
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._submit, name="headrace-submit", daemon=True)

    def __enter__(self) -> Feeder:
        self.producer._run(self._submission.open())
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=10.0)

    def release(self, num_jobs: int) -> None:
        """Say that so many jobs have their result."""
        with self._changed:
            self._room += num_jobs
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the submitting, if something did."""
        if self._error is not None:
            raise self._error

    def _submit(self) -> None:
        try:
            self.producer._fill(self._paced(), self._submission)
        except Exception as error:  # shown by the thread that collects
            self._error = error

    def _paced(self) -> Iterator[Line]:
        for line in self._lines:
            with self._changed:
                self._changed.wait_for(lambda: self._room > 0 or self._stopping)
                if self._stopping:
                    return
                self._room -= 1
            yield line


def _same_file(first: str, second: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(first, second)
    return False


def _written(writer: ResultWriter, total: int) -> str:
    return f"{writer.num_written:,} of {total:,} answers were written to {writer.path}"


def _interrupted_text(writer: ResultWriter, total: int, options: RunOptions, name: str) -> str:
    text = f"interrupted: {_written(writer, total)}"
    if options.redis_url is None:
        return text
    return f"{text}; batch {name} stays on the server: `headrace collect {name}` or `headrace cancel {name}`"
