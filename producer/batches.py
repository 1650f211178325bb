"""What a client asks about a batch, as steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headrace.producer import steps
from headrace.producer.jobs import lost_result, parse_result
from headrace.producer.steps import Call, Command, Steps, stream_entries
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

    It holds one chunk of results. Each result comes once; a job that is retried meanwhile has another, which comes too,
    and after a failover that lost what was read already, it may come again. So what it has seen does not tell that
    nothing is to come: the batch's own counts do, and that there is no further entry.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.finished = False
        self._last_id = "0-0"
        self._progress: Progress | None = None

    def take(self, block_s: float) -> Steps[list[Result]]:
        """The next results, at most RESULTS_CHUNK; waits up to `block_s` if there is none. Raises BatchNotFound."""
        if self._progress is None:
            self._note(*(yield Call(self._state(), atomic=True)))
        if self.finished:
            return []
        (reply,) = yield Call([self._read(block_s)], blocking=block_s > 0)
        entries = [(entry_id, values.get("job_id", "")) for entry_id, values in stream_entries(reply)]
        commands: list[Command] = []
        if entries:
            self._last_id = entries[-1][0]
            commands.append(("MGET", *(keys.result(job_id) for _, job_id in entries)))
        *stored, header, more = yield Call([*commands, *self._state()], atomic=True)
        self._note(header, more)
        return (yield from self._results(entries, stored[0])) if stored else []

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
        """For error texts: how many of how many jobs have their result."""
        done, total = (self._progress.done, self._progress.total) if self._progress else (0, 0)
        return f"{done:,} of {total:,} jobs have their result"

    def _state(self) -> list[Command]:
        """The batch's counts, and whether there is another entry: as of one moment, so that none can be missed."""
        return [("HGETALL", keys.batch(self.name)), self._read(0.0, count=1)]

    def _read(self, block_s: float, count: int = RESULTS_CHUNK) -> Command:
        block = ("BLOCK", math.ceil(block_s * 1000)) if block_s > 0 else ()  # rounded up: 0 would block for ever
        return ("XREAD", "COUNT", count, *block, "STREAMS", keys.batch_done(self.name), self._last_id)

    def _note(self, header: Any, more: Any) -> None:
        found = steps.fields(header)
        if "created_at" not in found:
            raise BatchNotFound(batch_not_found_text(self.name))
        self._progress = progress_of(found)
        self.finished = self._progress.finished and not more

    def _results(self, entries: Sequence[tuple[str, str]], stored: Sequence[bytes | None]) -> Steps[list[Result]]:
        """The results of entries, given as their ids and jobs. One without a result may have been retried just now."""
        done = keys.batch_done(self.name)
        missing = [entry_id for (entry_id, _), raw in zip(entries, stored, strict=True) if raw is None]
        found = (yield Call([("XRANGE", done, entry_id, entry_id) for entry_id in missing])) if missing else []
        retried = {entry_id for entry_id, reply in zip(missing, found, strict=True) if not reply}
        return [
            self._result(job_id, raw)
            for (entry_id, job_id), raw in zip(entries, stored, strict=True)
            if entry_id not in retried
        ]

    def _result(self, job_id: str, raw: bytes | None) -> Result:
        if raw is None:
            return lost_result(job_id, self.name, "the result has expired or was deleted before it was collected")
        return parse_result(job_id, raw)


def _count(value: str) -> int:
    return int(value) if value.isascii() and value.isdigit() else 0
