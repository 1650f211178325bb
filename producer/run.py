"""`headrace run`: a file in, a file out, on this machine."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.producer.batches import Collector
from headrace.producer.client import Producer
from headrace.producer.embedded import EmbeddedServer
from headrace.producer.files import fingerprint, readable_twice
from headrace.producer.formats import preflight, read_lines
from headrace.producer.lines import Chat, Line, check_defaults
from headrace.producer.progress import ProgressBar, Tally
from headrace.producer.settings import new_batch_name
from headrace.producer.submission import Submission
from headrace.producer.unfinished import Note
from headrace.producer.worker_process import WorkerProcess, require_worker
from headrace.producer.writers import ResultWriter, check_writable, is_kept, open_writer
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
        mark = fingerprint(path, _what_texts_depend_on(options, defaults))
        note = Note(options.output, mark) if is_kept(options.output) else None
        earlier = note.read() if note is not None else None
        check_writable(options.output)
        url = options.redis_url or stack.enter_context(EmbeddedServer()).url
        queue = options.queue or keys.queue_name(options.engine.model)
        patience_s = PATIENCE_S if options.redis_url else _EMBEDDED_PATIENCE_S
        producer = stack.enter_context(Producer(url, model=options.engine.model, queue=queue, patience_s=patience_s))
        name = earlier or options.batch or new_batch_name(producer._settings.route.tenant)
        submission = producer._submission(
            name,
            {},
            source=found.source,
            listed=options.redis_url is not None,
            fingerprint=mark,
            also_closed=earlier is not None,
        )
        # Whatever refuses the run does so before what the output held is gone.
        producer._run(submission.open())
        writer = stack.enter_context(open_writer(options.output, found.source, anew=earlier is None))
        if note is not None:
            note.write(name)
        lines = read_lines(path, found.format, defaults, found.chat)
        if options.redis_url is None:  # a server of our own, which knows nothing of what was done before
            lines = (line for line in lines if not writer.has(line.id))
        feeder = Feeder(producer, submission, lines, found.count - writer.num_kept)
        engine = replace(options.engine, most_slots=max(1, feeder.num_jobs))
        worker = stack.enter_context(WorkerProcess(url, ["--queue", queue, *engine.words()]))
        stack.enter_context(feeder)
        own_lanes = [Lane(queue, priority, producer._settings.route.tenant).name for priority in PRIORITIES]
        forget = [] if options.redis_url else own_lanes
        tally = Tally(live=True, num_kept=writer.num_kept, num_kept_failed=writer.num_kept_failed)
        try:
            _collect(Collector(name), feeder, worker, writer, tally, forget)
        except KeyboardInterrupt:
            raise Interrupted(_interrupted_text(writer, found.count, options, name)) from None
        except HeadraceError as error:
            if not writer.num_written:
                raise
            raise HeadraceError(f"{error} ({_written(writer, found.count)})") from error
        if note is not None:
            note.remove()
        return tally, writer


def _what_texts_depend_on(options: RunOptions, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """With the input, what makes two runs the same, so that one can go on with what the other has left."""
    engine, chat = options.engine, options.chat
    return {
        "batch": options.batch,
        "format": options.format,
        "chat": None if chat is None else [chat.system],
        "queue": options.queue,
        "engine": [engine.model, engine.dtype, engine.quantization, engine.max_context],
        **defaults,
    }


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
            tally.add(writer.write(results))
            bar.show()
            if forget:
                feeder.producer._run(collector.forget(results, forget))
            feeder.release(len(results))
            if not collector.finished:
                feeder.check()
                worker.check()


class _Stopped(Exception):
    """There is no need to submit any more."""


class Feeder:
    """Submits an input to an open batch, on a thread of its own, at most MAX_UNFINISHED jobs ahead of the results.

    As a context manager; at its end the thread stops submitting. A submission that can be gone on with is left open.
    """

    def __init__(
        self,
        producer: Producer,
        submission: Submission,
        lines: Iterator[Line],
        num_jobs: int,
        *,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        self.producer = producer
        self.num_jobs = num_jobs
        self._submission = submission
        self._lines = lines
        self._room = max_unfinished
        self._changed = threading.Condition()
        self._stopping = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._submit, name="headrace-submit", daemon=True)

    def __enter__(self) -> Feeder:
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
        except _Stopped:
            pass
        except Exception as error:  # shown by the thread that collects
            self._error = error

    def _paced(self) -> Iterator[Line]:
        for line in self._lines:
            with self._changed:
                self._changed.wait_for(lambda: self._room > 0 or self._stopping)
                if self._stopping:
                    raise _Stopped
                self._room -= 1
            yield line


def _same_file(first: str, second: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(first, second)
    return False


def _written(writer: ResultWriter, total: int) -> str:
    text = f"{writer.num_kept + writer.num_written:,} of {total:,} answers were written to {writer.path}"
    return f"{text}; the same command goes on from there" if is_kept(writer.path) else text


def _interrupted_text(writer: ResultWriter, total: int, options: RunOptions, name: str) -> str:
    text = f"interrupted: {_written(writer, total)}"
    if options.redis_url is None:
        return text
    return f"{text}; the jobs of batch {name} stay on the server: `headrace cancel {name}` ends them"
