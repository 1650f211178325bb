"""What becomes of a job: from a finished row, a refusal or a lost worker to its result and the write that stores it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import ErrorCode, ErrorInfo, Request, Result
from headrace.worker.checkpoint import encode_checkpoint
from headrace.worker.engine.rows import Row
from headrace.worker.fence import Command, FencedWrite, Write
from headrace.worker.lanes import Receipt
from headrace.worker.rq_adapter.jobs import Running
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.runner import Runner, computed_tokens, error_of, timing, usage


@dataclass(frozen=True, kw_only=True)
class Held:
    """A job that this worker has started and not settled. `num_resumed` of its row's tokens come from a checkpoint."""

    running: Running
    row: Row
    num_resumed: int
    request: Request
    batch: str | None
    started_at: datetime

    @property
    def has_got_further(self) -> bool:
        """True if this attempt has made tokens."""
        return len(self.row.token_ids) > self.num_resumed

    @property
    def computed_tokens(self) -> int:
        """Tokens that this attempt took to compute."""
        return computed_tokens(self.row, num_resumed=self.num_resumed)

    @property
    def queued_s(self) -> float:
        """Seconds that the job waited in the queue."""
        enqueued_at = self.running.job.enqueued_at
        return (self.started_at - enqueued_at).total_seconds() if enqueued_at else 0.0


@dataclass(frozen=True, kw_only=True)
class Returned:
    """A row to be put back into the queue. `failure` says what went wrong, if anything did, and `culprit` that it was
    certainly because of this row; else it may have been another's fault, and counts only if this one got no further.
    """

    row: Row
    failure: ErrorInfo | None = None
    culprit: bool = False


class Settler:
    """Builds results and the fenced writes that store them. It writes nothing itself.

    A job that fails `max_crashes` times without getting any further is given up.
    """

    def __init__(self, rq: RqWorker, runner: Runner, *, result_ttl_s: int, max_crashes: int) -> None:
        self._worker_name = rq.name
        self._writes = rq.writes
        self._runner = runner
        self._ttl_s = result_ttl_s
        self._max_crashes = max_crashes

    def finished(self, held: Held, row: Row) -> Write:
        """The write for a row that is done, well or not."""
        result = self.result(held, row)
        charge = _settle_charge(held)
        if result.error is None:
            return self._writes.succeed(held.running, _return_value(result), result, self._ttl_s, charge)
        stopped = result.error.code is ErrorCode.CANCELLED
        extra = [*outcome_commands(result, self._ttl_s), *charge]
        return self._writes.fail(held.running, _describe(result.error), extra, stopped=stopped)

    def result(self, held: Held, row: Row) -> Result:
        """The result of a row that is done."""
        return Result(
            id=held.request.id,
            job_id=row.row_id,
            batch=held.batch,
            model=self._runner.model_name,
            outputs=[] if row.error is not None else [self._runner.output(row)],
            usage=usage(row, num_resumed=held.num_resumed),
            timing=timing(row, held.queued_s),
            worker=self._worker_name,
            attempt=held.running.crashes + 1,
            error=error_of(row),
            metadata=held.request.metadata,
        )

    def is_result(self, held: Held, row: Row, raw: bytes | str | None) -> bool:
        """True if a stored result is the one that `finished` makes of this row."""
        try:
            return raw is not None and self.result(held, row).to_json() == as_text(raw)
        except Exception:  # there is none, as `finished` may have met before
            return False

    def checkpoint(self, held: Held, token_ids: Sequence[int]) -> FencedWrite:
        """The write that notes how far a running job is."""
        return self._writes.add(held.running, [self._checkpoint(held, token_ids), *self._writes.forgive(held.running)])

    def returned(self, held: Held, returned: Returned) -> FencedWrite:
        """The write that puts a running job back with its tokens so far, or gives it up."""
        blame = None
        if (failure := returned.failure) is not None:
            running = held.running
            blame = 0 if returned.culprit else 1 if held.has_got_further else running.blame + 1
            times = running.crashes + 1 if returned.culprit else blame
            if times >= self._max_crashes:
                text = f"failed {times} times, the last with: {failure.message}"
                return self.failed(held, ErrorInfo(code=failure.code, message=text))
        token_ids = held.row.token_ids
        extra = [self._checkpoint(held, token_ids)] if token_ids else []
        if (receipt := held.running.receipt) is not None:
            extra += receipt.give_back(held.running.job_id, held.computed_tokens)
        return self._writes.hand_back(held.running, extra, blame=blame)

    def is_last_attempt(self, running: Running) -> bool:
        """True if a job is given up should its worker die, or hang, once more."""
        return 0 < running.blame == self._max_crashes - 1

    def failed(self, held: Held, error: ErrorInfo) -> FencedWrite:
        """The write for a job in hand that has no output and is not tried again."""
        body, charge = {"id": held.request.id}, _settle_charge(held)
        return self.given_up(held.running, error, batch=held.batch, body=body, charge=charge)

    def _checkpoint(self, held: Held, token_ids: Sequence[int]) -> Command:
        value = encode_checkpoint(token_ids, model=self._runner.model_name, data=held.running.data)
        return ("SET", keys.checkpoint(held.running.job_id), value, "EX", self._ttl_s)

    def rejected(
        self,
        job_id: str,
        error: ErrorInfo,
        *,
        batch: str | None,
        body: Any,
        claims_key: str,
        receipt: Receipt | None = None,
    ) -> FencedWrite:
        """The write for a claimed job that can't be run. `body` is its request as far as it could be read."""
        result = self._without_output(job_id, error, batch=batch, body=body)
        extra = outcome_commands(result, self._ttl_s)
        return self._writes.reject(job_id, _describe(error), claims_key, extra, receipt)

    def given_up(
        self, running: Running, error: ErrorInfo, *, batch: str | None, body: Any, charge: Sequence[Command]
    ) -> FencedWrite:
        """The write for a running job that is not tried again. `charge` settles what its lane was charged."""
        attempt = running.crashes + 1
        result = self._without_output(running.job_id, error, batch=batch, body=body, attempt=attempt)
        return self._writes.fail(running, _describe(error), [*outcome_commands(result, self._ttl_s), *charge])

    def _without_output(
        self, job_id: str, error: ErrorInfo, *, batch: str | None, body: Any, attempt: int = 1
    ) -> Result:
        request_id = body.get("id") if isinstance(body, dict) else None
        return Result(
            id=request_id if isinstance(request_id, str) else None,
            job_id=job_id,
            batch=batch,
            model=self._runner.model_name,
            worker=self._worker_name,
            attempt=attempt,
            error=error,
        )


def _settle_charge(held: Held) -> Sequence[Command]:
    """The commands that charge a job's lane for what it took, if it has lanes beside it."""
    receipt = held.running.receipt
    return receipt.settle(held.running.job_id, held.computed_tokens) if receipt else ()


def unforeseen(error: Exception) -> ErrorInfo:
    """What a result says of a failure that nothing was prepared for."""
    text = f"{type(error).__name__}: {error}"
    return ErrorInfo(code=ErrorCode.INTERNAL_ERROR, message=text.encode(errors="backslashreplace").decode())


def place_of(error: Exception) -> str:
    """What a log may say of such a failure: its kind and where it arose, but not its text, which may quote the job."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at " + " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:])
    )


def _return_value(result: Result) -> dict[str, Any]:
    """What RQ keeps as the job's return value: small, and where to find the rest."""
    return {
        "result": keys.result(result.job_id),
        "finish_reasons": [output.finish_reason.value for output in result.outputs],
        "completion_tokens": result.usage.completion_tokens if result.usage else 0,
    }


def _describe(error: ErrorInfo) -> str:
    return f"{error.code.value}: {error.message}"
