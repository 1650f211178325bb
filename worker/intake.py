"""From claimed ids to jobs that can start: read, checked, tokenized, with their tokens so far."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import redis

from headrace.shared import keys
from headrace.shared.errors import InvalidRequest
from headrace.shared.job import decode_payload
from headrace.shared.lanes import PRIORITIES, check_batch_of, check_tenant_of
from headrace.shared.schema import ErrorCode, ErrorInfo, FinishReason, Request, parse_encodable
from headrace.worker.checkpoint import InvalidCheckpoint, decode_checkpoint
from headrace.worker.engine.rows import Row, now_s
from headrace.worker.engine.stopping import Finish
from headrace.worker.fence import Fences, Write, execute
from headrace.worker.lanes import Receipt
from headrace.worker.rq_adapter.jobs import Claimed, MalformedJob
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.runner import Rejected, Runner, deadline
from headrace.worker.settle import Held, Settler, place_of, unforeseen

logger = logging.getLogger("headrace.worker")


class Intake:
    """Prepares the jobs of one claim list. Nothing that is in a job can make it raise anything but RedisError."""

    def __init__(
        self,
        connection: redis.Redis,
        rq: RqWorker,
        fences: Fences,
        runner: Runner,
        settler: Settler,
        *,
        claims_key: str,
    ) -> None:
        self._connection = connection
        self._fences = fences
        self._rq = rq
        self._runner = runner
        self._settler = settler
        self._claims_key = claims_key

    def prepare(self, claims: Sequence[tuple[str, Receipt | None]]) -> list[tuple[Write, Held | None]]:
        """For each claimed job the write that starts it, and the job in hand; or the write that refuses it, and None.

        Jobs that are gone are dropped from the claim list. One round trip, whatever the number, and one for each of
        those.
        """
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id, _ in claims:
                pipeline.hgetall(keys.rq_job(job_id))
            pipeline.mget([keys.checkpoint(job_id) for job_id, _ in claims])
            *hashes, checkpoints = execute(pipeline)
        prepared: list[tuple[Write, Held | None]] = []
        for (job_id, receipt), fields, checkpoint in zip(claims, hashes, checkpoints, strict=True):
            if not fields or isinstance(fields, redis.ResponseError):  # deleted while it waited, or never a job
                self._fences.drop(self._claims_key, job_id, receipt)
            else:
                prepared.append(self._one(job_id, receipt, fields, checkpoint))
        return prepared

    def _one(
        self, job_id: str, receipt: Receipt | None, fields: dict[bytes, bytes], checkpoint: bytes | None
    ) -> tuple[Write, Held | None]:
        """The write that starts or refuses a claimed job and, if it starts, the job in hand."""
        body: Any = None
        batch: str | None = None
        try:
            claimed = self._rq.jobs.read(job_id, fields, receipt)
            payload = decode_payload(claimed.data, self._runner.limits.payload_bytes)
            body = payload.request
            check_batch_of(claimed.lane.tenant, payload.batch)
            batch = payload.batch
            request = parse_encodable(body)
            check_tenant_of(claimed.lane.tenant, request.tenant)
            row = self._row(request, claimed, checkpoint)
            row.rank = PRIORITIES.index(claimed.lane.priority)
            row.finish = _over_before_start(claimed, row)
            running, write = self._rq.writes.start(claimed, self._claims_key)
        except Exception as error:  # whatever it is, one bad job must not stop the others
            info = _refusal(error, job_id)
            refused = self._settler.rejected(
                job_id, info, batch=batch, body=body, claims_key=self._claims_key, receipt=receipt
            )
            return refused, None
        held = Held(
            running=running,
            row=row,
            num_resumed=len(row.token_ids),
            request=request,
            batch=batch,
            started_at=datetime.now(UTC),
        )
        return write, held

    def _row(self, request: Request, claimed: Claimed, checkpoint: bytes | None) -> Row:
        """The job's row, with its tokens so far if there is a checkpoint that it can go on from. Raises Rejected."""
        job_id, deadline_s = str(claimed.job.id), deadline(request, claimed.job.timeout)
        row = self._runner.row(request, job_id, deadline_s=deadline_s)
        if checkpoint is None:
            return row
        try:
            token_ids = decode_checkpoint(checkpoint, model=self._runner.model_name, data=claimed.data)
            self._runner.resume(row, token_ids)
        except InvalidCheckpoint as error:
            logger.warning("ignored the checkpoint of job %s, which starts from its beginning: %s", job_id, error)
            return self._runner.row(request, job_id, deadline_s=deadline_s)
        return row


def _over_before_start(claimed: Claimed, row: Row) -> Finish | None:
    """Why a job has ended that no worker need run; what it has is its result."""
    if claimed.cancelled:
        return Finish(reason=FinishReason.CANCELLED)
    if row.deadline_s is not None and row.deadline_s <= now_s():
        return Finish(reason=FinishReason.TIMEOUT)
    return None


def _refusal(error: Exception, job_id: str) -> ErrorInfo:
    """What the result of a job says that could not be prepared."""
    if isinstance(error, Rejected):
        return error.error
    if isinstance(error, InvalidRequest):
        return ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=str(error), param=error.param)
    if isinstance(error, MalformedJob):
        return ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=f"the job's hash can't be read: {error}")
    logger.error("job %s could not be prepared: %s", job_id, place_of(error))
    return unforeseen(error)
