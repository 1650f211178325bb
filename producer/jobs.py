"""What a client asks about one job, as steps."""

from __future__ import annotations

import time

from pydantic import ValidationError

from headrace.producer.enqueue import Entry, send_one
from headrace.producer.steps import MAX_BLOCK_S, Call, Steps, stream_entries, text
from headrace.shared import keys
from headrace.shared.errors import JobNotFound, ResultTimeout
from headrace.shared.schema import ErrorCode, ErrorInfo, Result

# Ends that RQ's own tools can give a job, without a result of ours.
_ENDED_OUTSIDE = {
    "canceled": ErrorCode.CANCELLED,
    "stopped": ErrorCode.CANCELLED,
    "failed": ErrorCode.INTERNAL_ERROR,
    "finished": ErrorCode.INTERNAL_ERROR,
}


def submit_entry(entry: Entry) -> Steps[None]:
    """Queue one job that belongs to no batch."""
    yield Call([send_one(entry)])


def job_status(job_id: str) -> Steps[str]:
    """RQ's status of the job: queued, started, finished, failed, canceled … Raises JobNotFound."""
    status, result = yield Call([("HGET", keys.rq_job(job_id), "status"), ("GET", keys.result(job_id))])
    if status is not None:
        return text(status)
    if result is None:
        raise JobNotFound(not_found_text(job_id))
    return "finished" if parse_result(job_id, result).ok else "failed"  # RQ forgets its job before the result expires


def wait_for_result(job_id: str, timeout_s: float | None) -> Steps[Result]:
    """The job's result, waiting for it. Raises JobNotFound, ResultTimeout."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    last_seen = "0-0"
    while True:
        raw, status = yield Call(
            [("GET", keys.result(job_id)), ("HGET", keys.rq_job(job_id), "status")],
            atomic=True,
        )
        if raw is not None:
            return parse_result(job_id, raw)
        if status is None:
            raise JobNotFound(not_found_text(job_id))
        if text(status) in _ENDED_OUTSIDE:
            return _ended_outside(job_id, text(status))
        block_ms = int(remaining_s(deadline, MAX_BLOCK_S) * 1000)
        if block_ms <= 0:
            raise ResultTimeout(f"job {job_id} has no result after {timeout_s} s; it is {text(status)}")
        stream = keys.rq_results(job_id)
        (reply,) = yield Call([("XREAD", "COUNT", 10, "BLOCK", block_ms, "STREAMS", stream, last_seen)], blocking=True)
        # An entry need not be the end: RQ writes one for an attempt that is to be retried, too.
        last_seen = next((entry_id for entry_id, _ in reversed(stream_entries(reply))), last_seen)


def remaining_s(deadline: float | None, limit_s: float) -> float:
    """Seconds to the deadline (of time.monotonic), at most `limit_s`."""
    return limit_s if deadline is None else min(limit_s, deadline - time.monotonic())


def parse_result(job_id: str, raw: bytes | str) -> Result:
    """A stored result; one that can't be read becomes an error result."""
    try:
        return Result.model_validate_json(raw)
    except ValidationError:
        return lost_result(job_id, None, "the stored result can't be read; it was written by something else")


def lost_result(job_id: str, batch: str | None, message: str) -> Result:
    """The error result for a job whose own is gone."""
    error = ErrorInfo(code=ErrorCode.INTERNAL_ERROR, message=message)
    return Result(id=None, job_id=job_id, batch=batch, error=error)


def not_found_text(job_id: str) -> str:
    return f"no job {job_id!r} on the server, and no result of it: it was never submitted, or has expired"


def _ended_outside(job_id: str, status: str) -> Result:
    message = f"RQ records the job as {status}, and no result was written"
    return Result(id=None, job_id=job_id, error=ErrorInfo(code=_ENDED_OUTSIDE[status], message=message))
