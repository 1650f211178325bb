"""The queue alone: a producer and workers whose engines compute nothing, on a private server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from headrace.producer.bench import engine_tools
from headrace.producer.bench.throughput import wait_for_workers
from headrace.producer.client import Producer
from headrace.producer.embedded import EmbeddedServer
from headrace.producer.worker_process import WorkerProcess
from headrace.shared import keys
from headrace.shared.connection import connect

SHORT_QUEUE = 1_000
MIDDLE_QUEUE = 10_000
_QUEUE = "headrace-bench"
_PROMPT = "A prompt of a few hundred bytes, as a question with its context has. " * 8
_OUTPUT_TOKENS = 32
_SLOTS = 128
_MOST_SETTLED = 100_000  # of a long queue: enough to time, and to see whether the worker grows
_TENTHS = 10
_SCALING_SLOTS = 32
_SCALING_WAVES = 8  # jobs a slot
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """A queue of so many jobs, of which `settled` were waited for.

    Bytes of a job are Redis's; those of a finished one None if not all were waited for. `worker_bytes` are resident in
    the worker at its start and after each tenth of the jobs waited for; empty where the system does not tell.
    """

    jobs: int
    settled: int
    enqueued_per_s: float
    settled_per_s: float
    queued_job_bytes: float
    finished_job_bytes: float | None
    worker_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class ScalingFigures:
    """So many workers on one queue; linear is their number times what one does."""

    workers: int
    jobs_per_s: float
    share_of_linear: float


@dataclass(frozen=True, kw_only=True)
class QueueFigures:
    """All of it."""

    lengths: list[LengthFigures]
    scaling: list[ScalingFigures]
    scaling_slots: int
    step_ms: float


def measure_queue(longest: int, step_ms: float, most_workers: int) -> QueueFigures:
    """Queues of a thousand jobs, of ten thousand and of `longest`, then 1, 2, 4, … workers up to `most_workers`."""
    lengths = sorted({min(SHORT_QUEUE, longest), min(MIDDLE_QUEUE, longest), longest})
    return QueueFigures(
        lengths=[_measure_length(length) for length in lengths],
        scaling=_measure_scaling(step_ms, _doublings(most_workers)),
        scaling_slots=_SCALING_SLOTS,
        step_ms=step_ms,
    )


def rate_between(times_s: Sequence[float], first: float, last: float) -> float:
    """Events a second between the shares `first` and `last` of them, so that starts and ends don't count."""
    low, high = int(first * len(times_s)), int(last * len(times_s)) - 1
    return (high - low) / max(times_s[high] - times_s[low], 1e-3)


def scaling_of(rates: Sequence[tuple[int, float]]) -> list[ScalingFigures]:
    """From (workers, jobs a second); the first is what linear is reckoned from."""
    base_workers, base_rate = rates[0]
    return [
        ScalingFigures(workers=workers, jobs_per_s=rate, share_of_linear=rate / (base_rate / base_workers * workers))
        for workers, rate in rates
    ]


def _doublings(last: int) -> list[int]:
    """1, 2, 4, … and `last`."""
    return [*(1 << power for power in range((last - 1).bit_length())), last]


class _Bench:
    """A private server with one queue, which can be held shut while it is filled."""

    def __init__(self, url: str, producer: Producer, client: redis.Redis) -> None:
        self.url = url
        self.producer = producer
        self._client = client

    def worker(self, slots: int, step_ms: float) -> WorkerProcess:
        arguments = ["idle-worker", "--queue", _QUEUE, "--slots", str(slots), "--step-ms", str(step_ms)]
        return WorkerProcess(self.url, arguments, command=engine_tools.COMMAND)

    def hold(self) -> None:
        self._client.set(keys.RQ_SUSPENDED, 1)

    def release(self) -> None:
        self._client.delete(keys.RQ_SUSPENDED)

    def enqueue(self, batch: str, lengths: Iterator[int]) -> float:
        """Queue a job for each length of output; returns the seconds that it took."""
        requests = (
            {"id": str(number), "prompt": _PROMPT, "max_tokens": length, "ignore_eos": True}
            for number, length in enumerate(lengths)
        )
        started = time.perf_counter()
        self.producer.submit_many(requests, batch=batch)
        return time.perf_counter() - started

    def wait_settled(self, batch: str, count: int, workers: Sequence[WorkerProcess]) -> None:
        """Wait until so many jobs are done."""
        while int(self._client.hget(keys.batch(batch), "completed") or 0) < count:
            for worker in workers:
                worker.check()
            time.sleep(_POLL_S)

    def settled_at_s(self, batch: str, count: int) -> list[float]:
        """When each of the first so many jobs was done, by the server's clock."""
        entries: Any = self._client.xrange(keys.batch_done(batch), count=count)
        return [int(entry_id.partition(b"-")[0]) / 1000 for entry_id, _ in entries]

    def used_bytes(self) -> int:
        info: Any = self._client.info("memory")
        return int(info["used_memory"])


@contextlib.contextmanager
def _bench() -> Iterator[_Bench]:
    with EmbeddedServer() as server, connect(server.url) as client:
        with Producer(server.url, model="idle", queue=_QUEUE) as producer:
            yield _Bench(server.url, producer, client)


def _measure_length(num_jobs: int) -> LengthFigures:
    with _bench() as bench, bench.worker(_SLOTS, 0) as worker:
        wait_for_workers(bench.producer, _QUEUE, [worker])
        bench.hold()
        empty_bytes = bench.used_bytes()
        enqueue_s = bench.enqueue("b", iter([_OUTPUT_TOKENS] * num_jobs))
        queued_bytes = bench.used_bytes()
        worker_bytes = [worker.resident_bytes()]
        bench.release()
        count = min(num_jobs, _MOST_SETTLED)
        for tenth in range(1, _TENTHS + 1):
            bench.wait_settled("b", count * tenth // _TENTHS, [worker])
            worker_bytes.append(worker.resident_bytes())
        times_s = bench.settled_at_s("b", count)
        finished_bytes = bench.used_bytes()
    return LengthFigures(
        jobs=num_jobs,
        settled=count,
        enqueued_per_s=num_jobs / enqueue_s,
        settled_per_s=rate_between(times_s, 0.1, 0.9),
        queued_job_bytes=(queued_bytes - empty_bytes) / num_jobs,
        finished_job_bytes=(finished_bytes - empty_bytes) / num_jobs if count == num_jobs else None,
        worker_bytes=[num_bytes for num_bytes in worker_bytes if num_bytes is not None],
    )


def _measure_scaling(step_ms: float, worker_counts: Sequence[int]) -> list[ScalingFigures]:
    rates: list[tuple[int, float]] = []
    with _bench() as bench, contextlib.ExitStack() as stack:
        workers: list[WorkerProcess] = []
        for count in worker_counts:
            while len(workers) < count:
                workers.append(stack.enter_context(bench.worker(_SCALING_SLOTS, step_ms)))
            wait_for_workers(bench.producer, _QUEUE, workers)
            bench.hold()
            num_jobs = count * _SCALING_SLOTS * _SCALING_WAVES
            # Different lengths, so that jobs end one by one and not in waves.
            bench.enqueue(str(count), (8 + number * 7919 % 49 for number in range(num_jobs)))
            bench.release()
            bench.wait_settled(str(count), num_jobs, workers)
            rates.append((count, rate_between(bench.settled_at_s(str(count), num_jobs), 0.2, 0.8)))
    return scaling_of(rates)
