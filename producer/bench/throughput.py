"""A workload end to end through Redis: submitted in the order of arrival, decoded by a worker's process, collected."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.producer.batches import Collector
from headrace.producer.bench.figures import RunCounts
from headrace.producer.client import Producer
from headrace.producer.embedded import EmbeddedServer
from headrace.producer.formats import Preflight, read_lines
from headrace.producer.progress import ProgressBar, Tally
from headrace.producer.run import Feeder
from headrace.producer.settings import new_batch_name
from headrace.producer.steps import Call, Steps
from headrace.producer.worker_process import WorkerProcess
from headrace.shared import keys
from headrace.shared.engine_report import EngineReport
from headrace.shared.errors import HeadraceError
from headrace.shared.options import EngineOptions

_POLL_S = 0.05
_TAKE_S = 0.5
_RESULT_TTL_S = 600


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """`found` is the dataset's preflight. `redis_url` None starts an embedded server."""

    dataset: str
    found: Preflight
    engine: EngineOptions
    redis_url: str | None
    defaults: Mapping[str, Any]


def run_workload(options: ThroughputOptions) -> tuple[RunCounts, EngineReport]:
    """The clock runs from the first job's submission to the last result, with the model loaded before."""
    name = f"bench-{new_batch_name()}"
    queue = f"headrace-{name}"
    with contextlib.ExitStack() as stack:
        report = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-"))) / "report.json"
        url = options.redis_url or stack.enter_context(EmbeddedServer()).url
        producer = stack.enter_context(
            Producer(url, model=options.engine.model, queue=queue, result_ttl_s=_RESULT_TTL_S)
        )
        arguments = ["--queue", queue, "--result-ttl", str(_RESULT_TTL_S), "--report", str(report)]
        with WorkerProcess(url, [*arguments, *options.engine.words()]) as worker:
            wait_for_workers(producer, queue, [worker])
            found = options.found
            lines = read_lines(options.dataset, found.format, options.defaults, found.chat)
            submission = producer._submission(name, {}, source=found.source)
            feeder = Feeder(producer, submission, lines, found.count)
            with _nothing_left_behind(producer, name, queue):
                producer._run(submission.open())
                counts = _timed(feeder, Collector(name), worker)
        return counts, _read(report)


def wait_for_workers(producer: Producer, queue: str, workers: Sequence[WorkerProcess]) -> None:
    """Until all have their model and have registered. Raises HeadraceError if one ends before that."""
    while producer._run(_num_workers(queue)) < len(workers):
        for worker in workers:
            worker.check()
        time.sleep(_POLL_S)


def _timed(feeder: Feeder, collector: Collector, worker: WorkerProcess) -> RunCounts:
    tally = Tally(live=True)
    prompt_tokens = generated_tokens = 0
    started = time.monotonic()
    with feeder, ProgressBar(feeder.num_jobs, tally) as bar:
        while not collector.finished:
            results = feeder.producer._run(collector.take(_TAKE_S))
            for result in results:
                if result.ok and result.usage is not None:
                    prompt_tokens += result.usage.prompt_tokens
                    generated_tokens += result.usage.completion_tokens
            tally.add(results)
            feeder.release(len(results))
            if not collector.finished:
                bar.show()
                feeder.check()
                worker.check()
        wall_s = time.monotonic() - started
        bar.show()
    return RunCounts(
        jobs=tally.jobs,
        failed=tally.failed,
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
    )


@contextlib.contextmanager
def _nothing_left_behind(producer: Producer, name: str, queue: str) -> Iterator[None]:
    """On a server that others use: no jobs that nobody will run, no queue that nobody serves. Results expire."""
    try:
        yield
    finally:
        with contextlib.suppress(HeadraceError):
            producer.batch(name).cancel()
            producer._run(_forget_queue(queue))


def _num_workers(queue: str) -> Steps[int]:
    (count,) = yield Call([("SCARD", f"rq:workers:{queue}")])
    return int(count)


def _forget_queue(queue: str) -> Steps[None]:
    yield Call([("SREM", keys.RQ_QUEUES, keys.rq_queue(queue))])


def _read(path: Path) -> EngineReport:
    try:
        return EngineReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise HeadraceError("the worker ended without its report; it had to be killed") from None
