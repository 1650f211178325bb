"""Taking over the jobs of workers that have died."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import redis

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.errors import InvalidRequest
from headrace.shared.job import decode_payload
from headrace.shared.lanes import Lane, check_batch_of, lane_of
from headrace.shared.schema import ErrorCode, ErrorInfo
from headrace.worker.fence import FencedWrite, Fences, Verdict, execute
from headrace.worker.lanes import Claims, Receipt, read_claims
from headrace.worker.lease import dead_workers
from headrace.worker.rq_adapter.jobs import Running, job_id_of
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.settle import Settler

logger = logging.getLogger("headrace.worker")


def readable_claims(fences: Fences, claims_key: str, claims: Claims) -> list[tuple[str, Receipt | None]]:
    """The ids of a claim list as text, and their receipts. What can't be a job's id is dropped from the list: no job
    can be found by it."""
    readable: list[tuple[str, Receipt | None]] = []
    for raw in claims.raw_ids:
        if (job_id := job_id_of(raw)) is not None:
            readable.append((job_id, claims.receipts.get(raw)))
        else:
            logger.warning("dropped %r from the queue: a job id has letters, digits, '_' and '-' only", raw[:80])
            fences.drop(claims_key, raw, claims.receipts.get(raw))
    return readable


class Recovery:
    """Every worker runs one. No lock is needed: each job changes hands through its fence, so it does so once."""

    def __init__(
        self, connection: redis.Redis, rq: RqWorker, fences: Fences, settler: Settler, *, max_crashes: int
    ) -> None:
        self._connection = connection
        self._rq = rq
        self._fences = fences
        self._settler = settler
        self._max_crashes = max_crashes

    def dead_workers(self) -> list[str]:
        """The other workers whose lease has run out."""
        return [worker for worker in dead_workers(self._connection) if worker != self._rq.name]

    def take_over(self, workers: Sequence[str]) -> int:
        """Put the jobs of dead workers back into their queues; returns how many."""
        count = 0
        for worker in workers:
            taken = self.give_back_claims(worker)
            taken += self._return(self._rq.executions_of(worker))
            self._rq.forget_worker(worker)
            self._connection.srem(keys.WORKERS, worker)
            if taken:
                logger.warning("worker %s is gone; put %d of its jobs back into the queue", worker, taken)
            count += taken
        return count

    def take_over_expired(self) -> int:
        """Put jobs back of which nothing was heard for long: of stock workers, or of all of ours at once."""
        count = self._return(self._rq.expired_executions())
        if count:
            logger.warning("put %d jobs back into the queue: no worker has spoken for them", count)
        return count

    def give_back_claims(self, worker: str) -> int:
        """Put the jobs back that a worker has claimed and not started."""
        claims_key = keys.claims(worker)
        raw_ids: list[bytes | str] = list(self._connection.lrange(claims_key, 0, -1))
        raw_receipts = self._connection.hmget(keys.receipts(worker), raw_ids) if raw_ids else []
        claimed = readable_claims(self._fences, claims_key, read_claims((raw_ids, raw_receipts, ()), worker))
        with self._connection.pipeline(transaction=False) as pipeline:
            for job_id, _ in claimed:
                pipeline.hget(keys.rq_job(job_id), "origin")
            origins = execute(pipeline)
        writes = [
            self._rq.writes.unclaim(job_id, claims_key, receipt.lane if receipt else self._lane_of(origin), receipt)
            for (job_id, receipt), origin in zip(claimed, origins, strict=True)
        ]
        return sum(verdict is Verdict.DONE for verdict in self._fences.unclaim(list(reversed(writes))))

    def _lane_of(self, origin: object) -> Lane:
        """The lane that a job's hash names, which may be another queue's; the queue itself if it can't be read."""
        return lane_of(_text_or(origin, "")) or self._rq.plain_lane

    def _return(self, jobs: Sequence[Running]) -> int:
        verdicts = self._fences.finish([self._write(job) for job in reversed(jobs)])
        return sum(verdict is Verdict.DONE for verdict in verdicts)

    def _write(self, running: Running) -> FencedWrite:
        blame = running.blame + 1
        # How far it came is not known: what its lane was charged stands.
        charge = running.receipt.forget(running.job_id) if running.receipt else []
        if blame < self._max_crashes:
            return self._rq.writes.hand_back(running, charge, blame=blame)
        text = f"{blame} workers died while running this job, which got no further; it is not tried again"
        try:
            payload = decode_payload(running.data)
            check_batch_of(running.lane.tenant, payload.batch)
            body, batch = payload.request, payload.batch
        except InvalidRequest:
            body, batch = None, None
        error = ErrorInfo(code=ErrorCode.WORKER_LOST, message=text)
        return self._settler.given_up(running, error, batch=batch, body=body, charge=charge)


def _text_or(raw: object, default: str) -> str:
    """A field of a job's hash as text; the default if there is none that can be read."""
    try:
        return (as_text(raw) if isinstance(raw, bytes | str) else "") or default
    except UnicodeDecodeError:
        return default
