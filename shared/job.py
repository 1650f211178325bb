"""A job's wire form: RQ's job hash with JSON data, `[task, null, [], {"request": …, "batch": …}]`.

The task's name is data to us: it is compared, never imported. A stock `rq worker` imports it and runs the job alone.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from headrace.shared import keys
from headrace.shared.errors import InvalidRequest
from headrace.shared.lanes import job_id_prefix
from headrace.shared.schema import Request, check_encodable

TASK = "headrace.worker.tasks.generate"
MAX_DATA_BYTES = 64 * 2**20
# RQ's own cleanup, which acts only when no headrace worker is alive, puts a job back that has retries left.
RETRIES = 3
NO_TIMEOUT = -1
# In a running job's hash: somebody wants it cancelled. It stays until the job's result, whichever worker writes that.
CANCEL_FIELD = "headrace_cancel"
CRASHES_FIELD = "headrace_crashes"  # attempts that have failed
BLAME_FIELD = "headrace_blame"  # of these, the last ones in a row in which the job got no further
RQ_RESULT_TTL_S = 600


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A job's arguments: the request as JSON that can be encoded again, and the batch that it belongs to."""

    request: Any
    batch: str | None


def new_job_id(batch: str | None, request_id: str | None, tenant: str | None = None) -> str:
    """An id for a job: the same for the same (batch, request id), random where either is missing.

    A tenant's begin with its name and "-", by which the server can tell whose a job's keys are.
    """
    prefix = job_id_prefix(tenant)
    if batch is None or request_id is None:
        return prefix + uuid4().hex
    return prefix + hashlib.sha256(f"{batch}\0{request_id}".encode()).hexdigest()[:32]


def job_hash(
    request: Request, *, queue: str, batch: str | None, created_at: datetime | None = None
) -> dict[str, str | bytes | int]:
    """The fields of `rq:job:{id}` for a request that is to be queued, as RQ itself would write them."""
    body = request.model_dump(mode="json", exclude_defaults=True)
    data = json.dumps([TASK, None, [], {"request": body, "batch": batch}], ensure_ascii=False, separators=(",", ":"))
    stamp = (created_at or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "created_at": stamp,
        "enqueued_at": stamp,
        "data": zlib.compress(data.encode(), 1),
        "description": "headrace generate",  # otherwise RQ's views build one from the whole call
        "origin": queue,
        "status": "queued",
        "timeout": NO_TIMEOUT,
        "result_ttl": RQ_RESULT_TTL_S,
        "retries_left": RETRIES,
        "started_at": "",
        "ended_at": "",
        "last_heartbeat": "",
        "worker_name": "",
        "group_id": "",
        "success_callback_name": "",
        "failure_callback_name": "",
        "stopped_callback_name": "",
    }


def decode_payload(data: bytes, max_bytes: int = MAX_DATA_BYTES) -> Payload:
    """Read the `data` field of a job's hash, which anyone who can write to Redis may have written.

    Raises InvalidRequest if it is not the JSON form above, names another task or an impossible batch, holds what a
    result could not repeat as JSON, or is over `max_bytes`, compressed or not.
    """
    text = _inflate(data, max_bytes)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "the job's data is not JSON; enqueue with RQ's JSON serializer, or through headrace"
        ) from None
    check_encodable(call)
    if not (isinstance(call, list) and len(call) == 4):
        raise InvalidRequest('the job\'s data is not of the form [task, null, [], {"request": …}]')
    task, instance, args, kwargs = call
    if task != TASK:
        raise InvalidRequest(f"the job's task is {str(task)[:80]!r}; this queue runs {TASK!r} only")
    if instance is not None or args != [] or not isinstance(kwargs, dict):
        raise InvalidRequest('the job takes keyword arguments only: {"request": …, "batch": …}')
    unknown = sorted(set(kwargs) - {"request", "batch"})
    batch = kwargs.get("batch")
    if unknown or "request" not in kwargs or not (batch is None or isinstance(batch, str)):
        found = ", ".join(sorted(kwargs)) or "nothing"
        raise InvalidRequest(f"the job's arguments are request and, optionally, batch (a string); found {found[:200]}")
    if batch is not None and not keys.is_batch_name(batch):
        raise InvalidRequest(f"the batch name is {batch[:140]!r}; {keys.BATCH_NAME_RULE}", "batch")
    return Payload(request=kwargs["request"], batch=batch)


def _inflate(data: bytes, max_bytes: int) -> bytes:
    """RQ compresses the data; clients in other languages may leave it plain. Bounded, whatever it claims to be."""
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(data, max_bytes)
        over = bool(unzip.unconsumed_tail)
    except zlib.error:
        text, over = data, len(data) > max_bytes
    if over:
        raise InvalidRequest(f"the job's data is over the limit of {max_bytes:,} bytes")
    return text
