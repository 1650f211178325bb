"""Jobs as a worker has them, read from RQ's hashes without trust."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from rq.executions import Execution
from rq.job import Job, validate_job_id
from rq.serializers import JSONSerializer

from headrace.shared.connection import as_text
from headrace.shared.job import BLAME_FIELD, CANCEL_FIELD, CRASHES_FIELD
from headrace.shared.lanes import Lane
from headrace.worker.lanes import Receipt

# What RQ would decode for itself, without a limit, and what nothing here reads.
_UNREAD_FIELDS = frozenset((b"data", b"exc_info", b"result", b"meta", b"webhooks", b"created_at", b"enqueued_at"))
# What reaches beyond a job, and so beyond its tenant.
_FAR_REACHING_FIELDS = frozenset((b"dependency_ids", b"group_id", b"rate_limit_key", b"rate_limit_concurrency"))
# Beyond any use, and far within what EXPIRE and floating-point times can take.
_MAX_SECONDS = 100 * 365 * 24 * 3600
_MAX_CRASHES = 1_000_000


class MalformedJob(Exception):
    """A job's hash can't be read."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A started job: RQ's job and execution, its call as stored, and how many attempts have failed, `blame` of them
    since it last got any further. `receipt` says what its lane was charged, if it was."""

    job: Job
    execution: Execution
    data: bytes
    crashes: int
    blame: int
    lane: Lane
    receipt: Receipt | None

    @property
    def job_id(self) -> str:
        return str(self.job.id)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claimed job, read from its hash. `cancelled` while another worker ran it, which did not come to act on it."""

    job: Job
    data: bytes
    crashes: int
    blame: int
    cancelled: bool
    lane: Lane
    receipt: Receipt | None


def job_id_of(raw: bytes | str) -> str | None:
    """A queue's entry as a job id, or None if RQ could not have written it."""
    try:
        job_id = as_text(raw)
        validate_job_id(job_id)
    except ValueError:
        return None
    return job_id


def _time(raw: bytes | None) -> datetime | None:
    """A time as RQ writes it, read in a tenth of the time that RQ takes. Raises ValueError."""
    if not raw:
        return None
    moment = datetime.fromisoformat(raw.decode())
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is not between {low} and {high}")


class JobReader:
    """Makes RQ's jobs of hashes. `plain_lane` is the queue itself, where jobs wait that have no lane of their own."""

    def __init__(self, connection: redis.Redis, plain_lane: Lane) -> None:
        self._plain_lane = plain_lane
        # Each job is a copy of it: RQ would check the serializer anew for each, which takes longer than all the rest.
        self._blank_job = Job(connection=connection, serializer=JSONSerializer)

    def read(
        self, job_id: str, fields: Mapping[bytes, bytes], receipt: Receipt | None = None, lane: Lane | None = None
    ) -> Claimed:
        """A job from its hash. Raises MalformedJob if RQ can't make a job of it.

        It comes from the lane of its receipt, or `lane`, or the queue, whatever its hash says: who may write to a
        lane's list has been proved to the server. RQ's job is made without the call: RQ would inflate it without a
        limit, and has no business with it here.
        """
        lane = receipt.lane if receipt else lane or self._plain_lane
        try:
            validate_job_id(job_id)
            job = copy.copy(self._blank_job)
            job._id = job_id
            unread = _UNREAD_FIELDS | _FAR_REACHING_FIELDS if lane.tenant else _UNREAD_FIELDS
            read = {name: value for name, value in fields.items() if value and name not in unread}
            job.restore({**read, b"data": b""})
            job.origin = lane.name
            job.enqueued_at = _time(fields.get(b"enqueued_at"))
            crashes = int(fields.get(CRASHES_FIELD.encode(), b"0"))
            blame = int(fields.get(BLAME_FIELD.encode(), b"0"))
            for name, value in ((CRASHES_FIELD, crashes), (BLAME_FIELD, blame)):
                _check_range(name, value, 0, _MAX_CRASHES)
            for name in ("timeout", "result_ttl", "failure_ttl"):
                _check_range(name, getattr(job, name), -1, _MAX_SECONDS)
            return Claimed(
                job=job,
                data=fields.get(b"data", b""),
                crashes=crashes,
                blame=blame,
                cancelled=CANCEL_FIELD.encode() in fields,
                lane=lane,
                receipt=receipt,
            )
        except Exception as error:  # RQ raises whatever the field's parser does
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise MalformedJob(text.encode(errors="backslashreplace").decode()) from None


def running(claimed: Claimed, execution: Execution) -> Running:
    return Running(
        job=claimed.job,
        execution=execution,
        data=claimed.data,
        crashes=claimed.crashes,
        blame=claimed.blame,
        lane=claimed.lane,
        receipt=claimed.receipt,
    )
