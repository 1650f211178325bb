"""What a client asks about a batch, as steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from headrace.producer import steps
from headrace.producer.jobs import lost_result, parse_result
from headrace.producer.steps import Call, Command, Steps, stream_entries, text
from headrace.shared import keys
from headrace.shared.errors import BatchNotFound
from headrace.shared.schema import Result

RESULTS_CHUNK = 200


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A batch's counts. `failed` includes what was refused as invalid; `submitted` is False while more may come."""

    total: int
    completed: int
    failed: int
    cancelled: int
    prompt_tokens: int
    completion_tokens: int
    submitted: bool

    @property
    def done(self) -> int:
        """Jobs that have their result."""
        return self.completed + self.failed + self.cancelled

    @property
    def finished(self) -> bool:
        """True if all is submitted and all has its result."""
        return self.submitted and self.done >= self.total


def batch_fields(name: str) -> Steps[dict[str, str]]:
    """The batch's hash. Raises BatchNotFound."""
    (reply,) = yield Call([("HGETALL", keys.batch(name))])
    found = steps.fields(reply)
    if "created_at" not in found:
        raise BatchNotFound(batch_not_found_text(name))
    return found


def batch_progress(name: str) -> Steps[Progress]:
    """The batch's counts. Raises BatchNotFound."""
    return progress_of((yield from batch_fields(name)))


def progress_of(found: dict[str, str]) -> Progress:
    """Progress from a batch's hash; what is missing or no number counts as 0."""
    counts = {field.name: _count(found.get(field.name, "")) for field in fields(Progress) if field.name != "submitted"}
    return Progress(**counts, submitted=found.get("submitted") == "1")


def batch_not_found_text(name: str) -> str:
    return f"no batch {name!r} on the server: it was never submitted, or has expired"


class Collector:
    """Reads a batch's results in the order of finishing; `finished` when there are no more to come.

    It holds one chunk of results. Each result comes once; after a failover that lost what was read already, it may come
    again. So what it has seen does not tell that nothing is to come: the batch's own counts do, and an empty read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_seen = 0
        self.finished = False
        self._last_id = "0-0"
        self._total = -1
        self._complete = False  # all jobs have their entry in the stream

    def take(self, block_s: float) -> Steps[list[Result]]:
        """The next results, at most RESULTS_CHUNK; waits up to `block_s` if there is none. Raises BatchNotFound."""
        if self._total < 0:
            self._note((yield Call([self._header()]))[0])
        if self.finished:
            return []
        block_s = 0.0 if self._complete else block_s
        (reply,) = yield Call([self._read(block_s)], blocking=block_s > 0)
        entries = stream_entries(reply)
        if not entries and self._complete:
            self.finished = True
            return []
        job_ids = [values.get("job_id", "") for _, values in entries]
        commands = [self._header()]
        if job_ids:
            self._last_id = entries[-1][0]
            self.num_seen += len(job_ids)
            commands.append(("MGET", *(keys.result(job_id) for job_id in job_ids)))
        header, *stored = yield Call(commands)
        self._note(header)
        return [self._result(*pair) for pair in zip(job_ids, stored[0], strict=True)] if stored else []

    def forget(self, results: Sequence[Result], queues: Sequence[str]) -> Steps[None]:
        """Delete from the server all that is kept of these jobs, which `take` gave, for a server that is ours alone."""
        job_ids = [result.job_id for result in results]
        if not job_ids:
            return
        kinds = (keys.result, keys.rq_job, keys.rq_results)
        commands: list[Command] = [("DEL", *(kind(job_id) for job_id in job_ids for kind in kinds))]
        for queue in queues:
            commands += [("ZREM", f"rq:{registry}:{queue}", *job_ids) for registry in ("finished", "failed")]
        commands.append(("XTRIM", keys.batch_done(self.name), "MINID", self._last_id))
        yield Call(commands)

    def counts(self) -> str:
        """For error texts: how many results of how many jobs were seen."""
        return f"{self.num_seen:,} of {max(self._total, 0):,} jobs have their result"

    def _header(self) -> Command:
        return ("HMGET", keys.batch(self.name), "created_at", "submitted", "total", "completed", "failed", "cancelled")

    def _read(self, block_s: float) -> Command:
        block = ("BLOCK", math.ceil(block_s * 1000)) if block_s > 0 else ()  # rounded up: 0 would block for ever
        return ("XREAD", "COUNT", RESULTS_CHUNK, *block, "STREAMS", keys.batch_done(self.name), self._last_id)

    def _note(self, header: Sequence[bytes | None]) -> None:
        created_at, submitted, *counts = header
        if created_at is None:
            raise BatchNotFound(batch_not_found_text(self.name))
        self._total, *done = (_count(text(count)) for count in counts)
        self._complete = text(submitted) == "1" and sum(done) >= self._total

    def _result(self, job_id: str, raw: bytes | None) -> Result:
        if raw is None:
            return lost_result(job_id, self.name, "the result has expired or was deleted before it was collected")
        return parse_result(job_id, raw)


def _count(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() else 0
