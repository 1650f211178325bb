"""What is on a server: queues, workers and batches, read from RQ's keys and ours."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.producer import steps
from headrace.producer.batches import Progress, progress_of
from headrace.producer.steps import Call, Steps, text
from headrace.producer.submission import Route
from headrace.shared import keys
from headrace.shared.lanes import PRIORITIES, Lane

_WORKERS = "rq:workers"
_REGISTRIES = ("wip", "finished", "failed", "canceled")
_SHOWN_BATCHES = 100


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """Jobs of one queue. RQ forgets finished jobs after a while, so `finished` and `failed` are the recent ones."""

    name: str
    waiting: int
    running: int
    finished: int
    failed: int
    cancelled: int


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker, as it registered itself with RQ."""

    name: str
    state: str
    queues: str
    finished: int
    failed: int
    last_heartbeat: str


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """One batch; `created_at` is in ISO 8601."""

    name: str
    queue: str
    created_at: str
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """Everything on a server; of the batches the newest 100."""

    queues: list[QueueStatus]
    workers: list[WorkerStatus]
    batches: list[BatchStatus]


def server_status(route: Route) -> Steps[ServerStatus]:
    """Read the server's state; for a producer with a tenant what is this tenant's: its lanes of its queue, its batches.

    Lanes are shown as the queues that they are.
    """
    if (tenant := route.tenant) is not None:
        lanes = [Lane(route.queue_for(None), priority, tenant).name for priority in PRIORITIES]
        (names,) = yield Call([("ZREVRANGE", keys.batches(tenant), 0, _SHOWN_BATCHES - 1)])
        queues = yield from _queues(lanes)
        batches = yield from _batches([text(name) for name in names], keys.batches(tenant))
        return ServerStatus(queues=queues, workers=[], batches=batches)
    queue_keys, worker_keys, names = yield Call(
        [("SMEMBERS", keys.RQ_QUEUES), ("SMEMBERS", _WORKERS), ("ZREVRANGE", keys.BATCHES, 0, _SHOWN_BATCHES - 1)]
    )
    queues = yield from _queues(sorted(text(key).removeprefix("rq:queue:") for key in queue_keys))
    workers = yield from _workers(sorted(text(key) for key in worker_keys))
    batches = yield from _batches([text(name) for name in names], keys.BATCHES)
    return ServerStatus(queues=queues, workers=workers, batches=batches)


def _queues(names: list[str]) -> Steps[list[QueueStatus]]:
    if not names:
        return []
    commands = [
        command
        for name in names
        for command in (
            ("LLEN", keys.rq_queue(name)),
            *(("ZCARD", f"rq:{registry}:{name}") for registry in _REGISTRIES),
        )
    ]
    counts = iter((yield Call(commands)))
    found = []
    for name, *of_queue in zip(names, *[counts] * (1 + len(_REGISTRIES)), strict=True):
        waiting, running, finished, failed, cancelled = (int(count) for count in of_queue)
        status = QueueStatus(
            name=name, waiting=waiting, running=running, finished=finished, failed=failed, cancelled=cancelled
        )
        found.append(status)
    return found


def _workers(worker_keys: list[str]) -> Steps[list[WorkerStatus]]:
    if not worker_keys:
        return []
    replies = yield Call([("HGETALL", key) for key in worker_keys])
    found = []
    for key, reply in zip(worker_keys, replies, strict=True):
        values = steps.fields(reply)
        if not values or values.get("death"):
            continue
        status = WorkerStatus(
            name=key.removeprefix("rq:worker:"),
            state=values.get("state", "?"),
            queues=values.get("queues", ""),
            finished=_count(values.get("successful_job_count")),
            failed=_count(values.get("failed_job_count")),
            last_heartbeat=values.get("last_heartbeat", ""),
        )
        found.append(status)
    return found


def _batches(names: list[str], listed_in: str) -> Steps[list[BatchStatus]]:
    if not names:
        return []
    replies = yield Call([("HGETALL", keys.batch(name)) for name in names])
    found, expired = [], []
    for name, reply in zip(names, replies, strict=True):
        values = steps.fields(reply)
        if "created_at" not in values:
            expired.append(name)
            continue
        status = BatchStatus(
            name=name, queue=values.get("queue", ""), created_at=values["created_at"], progress=progress_of(values)
        )
        found.append(status)
    if expired:
        yield Call([("ZREM", listed_in, *expired)])
    return found


def _count(value: str | None) -> int:
    return int(value) if value and value.isascii() and value.isdigit() else 0
