"""The writes that start, end and hand back jobs: RQ's bookkeeping and ours, made here and sent by worker/fence.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from redis.client import Pipeline
from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.rate_limit import release_slot
from rq.registry import BaseRegistry, FailedJobRegistry
from rq.results import Result as RqResult
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from rq.worker.base import BaseWorker

from headrace.shared import keys
from headrace.shared.job import BLAME_FIELD, CANCEL_FIELD, CRASHES_FIELD
from headrace.shared.lanes import Lane
from headrace.shared.outages import is_passing
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import Result
from headrace.worker import plain_jobs
from headrace.worker.fence import Command, FencedWrite, Fences, ScriptedWrite, Write, commands_of
from headrace.worker.lanes import Receipt, arrival
from headrace.worker.rq_adapter.jobs import Claimed, Running, running

# How long RQ believes in a job without hearing of it: the fallback for when no headrace worker is alive.
EXECUTION_TTL_S = 90

logger = logging.getLogger("headrace.worker")


class JobWrites:
    """Makes the writes of one worker. It sends nothing itself, but for `after_commit`."""

    def __init__(self, worker: BaseWorker, fences: Fences, plain_lane: Lane) -> None:
        self._worker = worker
        self._name: str = worker.name
        self._connection = worker.connection
        self._fences = fences
        self._plain_lane = plain_lane

    def start(self, claimed: Claimed, claims_key: str) -> tuple[Running, ScriptedWrite]:
        """The write that starts a claimed job, and the job as it will be when that is done."""
        job = claimed.job
        execution = Execution(uuid4().hex, job.id, self._connection, worker_name=self._name)
        started_at = job.started_at = job.last_heartbeat = execution.last_heartbeat = execution.created_at
        job.worker_name, job._status = self._name, JobStatus.STARTED
        write = plain_jobs.start(
            job.id,
            execution.id,
            started_at,
            claims_key=claims_key,
            queue=job.origin,
            worker=self._name,
            ttl_s=EXECUTION_TTL_S,
        )
        return running(claimed, execution), write

    def reject(
        self, job_id: str, message: str, claims_key: str, extra: Sequence[Command], receipt: Receipt | None = None
    ) -> FencedWrite:
        """The write that fails a claimed job that never starts: RQ's bookkeeping, then `extra`."""
        job = Job(job_id, connection=self._connection, serializer=JSONSerializer)
        job.origin = (receipt.lane if receipt else self._plain_lane).name
        record = self._fences.record()
        self._record_failure(job, None, JobStatus.FAILED, message, record)
        commands = [*commands_of(record), *extra, *(receipt.give_back(job_id, 0) if receipt else ())]
        return FencedWrite(fence=claims_key, member=job_id, job_key=job.key, commands=commands)

    def unclaim(self, job_id: str, claims_key: str, lane: Lane, receipt: Receipt | None) -> tuple[FencedWrite, str]:
        """The write that gives a claimed job back to the front of its lane, and the lane's key; for Fences.unclaim."""
        commands = [*arrival(lane), *(receipt.give_back(job_id, 0) if receipt else ())]
        write = FencedWrite(fence=claims_key, member=job_id, job_key=keys.rq_job(job_id), commands=commands)
        return write, keys.rq_queue(lane.name)

    # Finishing

    def succeed(
        self, running: Running, return_value: Any, result: Result, result_ttl_s: int, charge: Sequence[Command] = ()
    ) -> Write:
        """The write that ends a job well: RQ's bookkeeping, our result, which has a usage and no error, and `charge`.

        RQ keeps only the small `return_value`.
        """
        job = running.job
        job.ended_at = now()
        job._status = JobStatus.FINISHED
        rq_ttl_s = job.get_result_ttl(DEFAULT_RESULT_TTL)
        if rq_ttl_s <= 0 or job.has_rate_limit or charge:
            return self._succeed_as_rq_does(running, return_value, [*outcome_commands(result, result_ttl_s), *charge])
        return plain_jobs.success(
            result,
            running.execution.id,
            running.execution.created_at,
            job.ended_at,
            return_value=JSONSerializer.dumps(return_value),
            rq_ttl_s=rq_ttl_s,
            queue=job.origin,
            worker=self._name,
            ttl_s=result_ttl_s,
        )

    def _succeed_as_rq_does(self, running: Running, return_value: Any, extra: Sequence[Command]) -> FencedWrite:
        job, record = running.job, self._fences.record()
        ttl = job.get_result_ttl(DEFAULT_RESULT_TTL)
        if ttl == 0:
            job.delete(pipeline=record, remove_from_queue=False)
        else:
            job.set_status(JobStatus.FINISHED, pipeline=record)
            record.hset(job.key, "ended_at", utcformat(job.ended_at))
            RqResult.create(
                job, RqResult.Type.SUCCESSFUL, return_value=return_value, **self._outcome(running, ttl, record)
            )
            job.finished_job_registry.add(job, ttl, record)
            job.cleanup(ttl, pipeline=record, remove_from_queue=False)
        self._worker.increment_successful_job_count(pipeline=record)
        self._worker.increment_total_working_time(job.ended_at - job.started_at, record)
        running.execution.delete(job=job, pipeline=record)
        return self._finish_write(running, [*commands_of(record), *extra])

    def fail(self, running: Running, message: str, extra: Sequence[Command], *, stopped: bool = False) -> FencedWrite:
        """The write that ends a job badly, or as stopped on request: RQ's bookkeeping, then `extra`."""
        record = self._fences.record()
        running.job.ended_at = now()
        status = JobStatus.STOPPED if stopped else JobStatus.FAILED
        self._record_failure(running.job, running, status, message, record)
        if running.job.started_at:
            self._worker.increment_total_working_time(running.job.ended_at - running.job.started_at, record)
        running.execution.delete(job=running.job, pipeline=record)
        return self._finish_write(running, [*commands_of(record), *extra])

    def hand_back(self, running: Running, extra: Sequence[Command] = (), *, blame: int | None = None) -> FencedWrite:
        """The write that puts a running job back at the front of its queue, as if it had never been started.

        With `blame` this attempt has failed, and is the last of so many in which the job got no further.
        """
        job, record = running.job, self._fences.record()
        running.execution.delete(job=job, pipeline=record)
        record.hset(job.key, mapping={"status": JobStatus.QUEUED, "started_at": "", "worker_name": ""})
        if blame is not None:
            record.hincrby(job.key, CRASHES_FIELD, 1)
            record.hset(job.key, BLAME_FIELD, blame)
        record.lpush(keys.rq_queue(job.origin), job.id)
        return self._finish_write(running, [*commands_of(record), *arrival(running.lane), *extra])

    def add(self, running: Running, commands: Sequence[Command]) -> FencedWrite:
        """A write beside a running job, which goes on."""
        return self._finish_write(running, commands)

    def forgive(self, running: Running) -> list[Command]:
        """The commands that take the blame from a job, which has got further."""
        return [("HDEL", running.job.key, BLAME_FIELD)] if running.blame else []

    def after_commit(self, settled: Sequence[Running]) -> None:
        """What RQ does once outcomes are stored: let dependents run and free the slots of rate limits.

        To be called again for all of them if it raises RedisError. Not for tenants, whose dependents could be other
        tenants' jobs.
        """
        settled = [running for running in settled if running.lane.tenant is None]
        if not settled:
            return
        with self._connection.pipeline(transaction=False) as pipeline:
            for running in settled:
                pipeline.exists(running.job.dependents_key)
            have_dependents = pipeline.execute()
        for running, has_dependents in zip(settled, have_dependents, strict=True):
            try:
                if has_dependents:
                    self._worker.queues[0].enqueue_dependents(running.job)
                if running.job.has_rate_limit:
                    release_slot(running.job)
            except Exception as error:  # RQ raises whatever it finds in the dependents' hashes
                if is_passing(error):
                    raise
                logger.exception("what waits for job %s could not be enqueued", running.job_id)

    def _record_failure(
        self, job: Job, running: Running | None, status: JobStatus, message: str, record: Pipeline
    ) -> None:
        ttl = job.failure_ttl if job.failure_ttl is not None else DEFAULT_FAILURE_TTL
        job.set_status(status, pipeline=record)
        record.hset(job.key, "ended_at", utcformat(now()))
        # Somebody may requeue it: it is then not to be cancelled again, and has all its attempts.
        record.hdel(job.key, CANCEL_FIELD, CRASHES_FIELD, BLAME_FIELD)
        record.srem(keys.cancels(self._name), job.id)
        # Not FailedJobRegistry.add: it would write the whole hash again, which a malformed job does not have.
        BaseRegistry.add(FailedJobRegistry(job.origin, connection=self._connection), job, ttl, record)
        if ttl > 0:
            record.expire(job.key, ttl)
        outcome = self._outcome(running, ttl, record) if running else {"ttl": ttl, "pipeline": record}
        RqResult.create_failure(job, exc_string=message, **outcome)
        self._worker.increment_failed_job_count(pipeline=record)

    def _outcome(self, running: Running, ttl: int, record: Pipeline) -> dict[str, Any]:
        """The arguments that both kinds of RQ's results share."""
        return {
            "ttl": ttl,
            "worker_name": self._name,
            "pipeline": record,
            "execution_id": running.execution.id,
            "execution_started_at": running.execution.created_at,
            "execution_ended_at": running.job.ended_at,
        }

    def _finish_write(self, running: Running, commands: Sequence[Command]) -> FencedWrite:
        job, execution = running.job, running.execution
        return FencedWrite(
            fence=f"rq:wip:{job.origin}", member=execution.composite_key, job_key=job.key, commands=commands
        )
