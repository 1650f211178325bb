"""RQ seen from the worker: the only module that touches RQ's worker internals (pinned to rq 3.0).

It keeps RQ's own bookkeeping right, so that `rq info`, the dashboards and the registries tell the truth, and it
leaves out what a queue must not be able to ask of a worker: no callback or function is imported, nothing is unpickled.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import redis
from redis.client import Pipeline, PubSub, PubSubWorkerThread
from rq import Queue
from rq.command import parse_payload
from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL
from rq.executions import Execution
from rq.job import Job, JobStatus, validate_job_id
from rq.rate_limit import release_slot
from rq.registry import BaseRegistry, FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.results import Result as RqResult
from rq.serializers import JSONSerializer
from rq.utils import now, parse_composite_key, utcformat
from rq.worker.base import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.job import BLAME_FIELD, CANCEL_FIELD, CRASHES_FIELD
from headrace.shared.lanes import Lane, lane_of
from headrace.shared.outages import is_passing
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import Result
from headrace.worker import plain_jobs
from headrace.worker.fence import Command, FencedWrite, Fences, ScriptedWrite, Write, commands_of, execute
from headrace.worker.lanes import Receipt, arrival, read_receipt

# How long RQ believes in a job without hearing of it: the fallback for when no headrace worker is alive.
EXECUTION_TTL_S = 90
_MAINTENANCE_INTERVAL_S = 600
# What RQ would decode for itself, without a limit, and what nothing here reads.
_UNREAD_FIELDS = frozenset((b"data", b"exc_info", b"result", b"meta", b"webhooks", b"created_at", b"enqueued_at"))
# What reaches beyond a job, and so beyond its tenant.
_FAR_REACHING_FIELDS = frozenset((b"dependency_ids", b"group_id", b"rate_limit_key", b"rate_limit_concurrency"))
# Beyond any use, and far within what EXPIRE and floating-point times can take.
_MAX_SECONDS = 100 * 365 * 24 * 3600
_MAX_CRASHES = 1_000_000

logger = logging.getLogger("headrace.worker")


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


class RqWorker(BaseWorker):  # type: ignore[misc]
    """A worker as RQ knows it: registered, heard of, with many executions at once. It runs nothing itself.

    `on_stop(job_id)` and `on_shutdown()` are called from RQ's pub/sub thread, for its `stop-job`, `stop-execution` and
    `shutdown` commands.
    """

    def __init__(
        self,
        queue: str,
        name: str,
        connection: redis.Redis,
        fences: Fences,
        *,
        on_stop: Callable[[str], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        super().__init__([queue], name=name, connection=connection, serializer=JSONSerializer)
        self._fences = fences
        self._on_stop = on_stop
        self._on_shutdown = on_shutdown
        self._listens = False
        self.queue: Queue = self.queues[0]
        # Each job is a copy of it: RQ would check the serializer anew for each, which takes longer than all the rest.
        self._blank_job = Job(connection=connection, serializer=JSONSerializer)
        self.plain_lane = Lane(queue)  # the queue itself

    # Registration

    def enter(self) -> None:
        """Register with RQ and listen for its commands. May be called again if it failed halfway."""
        super()._set_ip_address(self.connection)
        self.connection.delete(self.key)  # of an attempt whose answer was lost: RQ would take it for another worker
        self.bootstrap(logging_level=logging.WARNING)

    def leave(self) -> None:
        """Sign off."""
        self.teardown()

    def stop_listening(self) -> None:
        """End the thread that listens for commands, also if signing off has failed before that."""
        if self._listens:
            self.pubsub_thread.stop()

    def show_busy(self, busy: bool) -> None:
        """Set the state that `rq info` shows."""
        state = WorkerStatus.BUSY if busy else WorkerStatus.IDLE
        if self.get_state() != state:
            self.set_state(state)

    def handle_payload(self, message: Mapping[str, Any]) -> None:
        """One of RQ's commands from the pub/sub channel. Stock RQ would stop the first execution that it finds."""
        try:
            payload = parse_payload(message)
            command = payload.get("command")
        except (ValueError, KeyError, AttributeError):
            logger.warning("ignored a malformed command on %s", self.pubsub_channel_name)
            return
        if command in ("stop-job", "stop-execution"):
            self._on_stop(str(payload.get("job_id", "")))
        elif command == "shutdown":
            self._on_shutdown()

    def subscribe(self) -> None:
        """Listen for RQ's commands; as stock RQ does, but with a thread that ends when it is asked to."""
        if self._listens:
            return
        self.pubsub = self.connection.pubsub()
        self.pubsub.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        self.pubsub_thread = self.pubsub.run_in_thread(
            sleep_time=0.2, daemon=True, exception_handler=self._pubsub_exception_handler
        )
        self._listens = True

    def _pubsub_exception_handler(self, exc: Exception, pubsub: PubSub, pubsub_thread: PubSubWorkerThread) -> None:
        """Whatever happens to the connection, listen on: redis-py subscribes anew when the server is back."""
        logger.warning("listening for commands failed, trying again: %s", exc)
        time.sleep(1.0)

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Stock RQ asks the server while it is constructed; `enter` does, and may be called again."""
        self.ip_address = "unknown"

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """Stock RQ raises the socket timeout to minutes; a worker with a lease must notice a dead server sooner."""
        return connection

    # Claiming and starting

    def read(
        self, job_id: str, fields: Mapping[bytes, bytes], receipt: Receipt | None = None, lane: Lane | None = None
    ) -> Claimed:
        """A job from its hash. Raises MalformedJob if RQ can't make a job of it.

        It comes from the lane of its receipt, or `lane`, or the queue, whatever its hash says: who may write to a
        lane's list has been proved to the server. RQ's job is made without the call: RQ would inflate it without a
        limit, and has no business with it here.
        """
        lane = receipt.lane if receipt else lane or self.plain_lane
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

    def start(self, claimed: Claimed, claims_key: str) -> tuple[Running, ScriptedWrite]:
        """The write that starts a claimed job, and the job as it will be when that is done."""
        job = claimed.job
        execution = Execution(uuid4().hex, job.id, self.connection, worker_name=self.name)
        started_at = job.started_at = job.last_heartbeat = execution.last_heartbeat = execution.created_at
        job.worker_name, job._status = self.name, JobStatus.STARTED
        write = plain_jobs.start(
            job.id,
            execution.id,
            started_at,
            claims_key=claims_key,
            queue=job.origin,
            worker=self.name,
            ttl_s=EXECUTION_TTL_S,
        )
        return _running(claimed, execution), write

    def reject(
        self, job_id: str, message: str, claims_key: str, extra: Sequence[Command], receipt: Receipt | None = None
    ) -> FencedWrite:
        """The write that fails a claimed job that never starts: RQ's bookkeeping, then `extra`."""
        job = Job(job_id, connection=self.connection, serializer=JSONSerializer)
        job.origin = (receipt.lane if receipt else self.plain_lane).name
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
            worker=self.name,
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
        self.increment_successful_job_count(pipeline=record)
        self.increment_total_working_time(job.ended_at - job.started_at, record)
        running.execution.delete(job=job, pipeline=record)
        return self._finish_write(running, [*commands_of(record), *extra])

    def fail(self, running: Running, message: str, extra: Sequence[Command], *, stopped: bool = False) -> FencedWrite:
        """The write that ends a job badly, or as stopped on request: RQ's bookkeeping, then `extra`."""
        record = self._fences.record()
        running.job.ended_at = now()
        status = JobStatus.STOPPED if stopped else JobStatus.FAILED
        self._record_failure(running.job, running, status, message, record)
        if running.job.started_at:
            self.increment_total_working_time(running.job.ended_at - running.job.started_at, record)
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
        record.lpush(Queue.redis_queue_namespace_prefix + job.origin, job.id)
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
        with self.connection.pipeline(transaction=False) as pipeline:
            for running in settled:
                pipeline.exists(running.job.dependents_key)
            have_dependents = pipeline.execute()
        for running, has_dependents in zip(settled, have_dependents, strict=True):
            try:
                if has_dependents:
                    self.queue.enqueue_dependents(running.job)
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
        record.srem(keys.cancels(self.name), job.id)
        # Not FailedJobRegistry.add: it would write the whole hash again, which a malformed job does not have.
        BaseRegistry.add(FailedJobRegistry(job.origin, connection=self.connection), job, ttl, record)
        if ttl > 0:
            record.expire(job.key, ttl)
        outcome = self._outcome(running, ttl, record) if running else {"ttl": ttl, "pipeline": record}
        RqResult.create_failure(job, exc_string=message, **outcome)
        self.increment_failed_job_count(pipeline=record)

    def _outcome(self, running: Running, ttl: int, record: Pipeline) -> dict[str, Any]:
        """The arguments that both kinds of RQ's results share."""
        return {
            "ttl": ttl,
            "worker_name": self.name,
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

    # Heartbeats and recovery

    def beat(self, running: Sequence[Running]) -> None:
        """Tell RQ that the worker and its jobs are alive. Call it several times within EXECUTION_TTL_S."""
        with self.connection.pipeline(transaction=False) as pipeline:
            self.heartbeat(pipeline=pipeline)
            for each in running:
                each.execution.heartbeat(each.job.started_job_registry, EXECUTION_TTL_S, pipeline=pipeline)
            is_new = pipeline.execute()[0]
        if is_new:  # the hash had expired; a heartbeat alone would leave a stub
            self.connection.hset(self.key, mapping=self.serialize())
            self.connection.hset(self.key, "state", self.get_state())
            self.connection.sadd(self.redis_workers_keys, self.key)

    def lost(self, running: Sequence[Running]) -> list[Running]:
        """Those of `running` that this worker no longer holds: taken over, deleted or cancelled by others."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for each in running:
                pipeline.zscore(each.job.started_job_registry.key, each.execution.composite_key)
                pipeline.hget(each.job.key, "status")
            answers = iter(execute(pipeline))
        return [
            each
            for each, score, status in zip(running, answers, answers, strict=False)
            if score is None or status != b"started"
        ]

    def cancelled(self, in_hand: Sequence[Running] = ()) -> list[str]:
        """Ids of jobs that somebody has asked to cancel while this worker ran them; some may have ended.

        A tenant can't write to a worker's keys: it marks its job, which has to be `in_hand`.
        """
        raw_ids = self.connection.smembers(keys.cancels(self.name))
        asked = [job_id for raw in raw_ids if (job_id := job_id_of(raw)) is not None]
        of_tenants = [running for running in in_hand if running.lane.tenant is not None]
        if not of_tenants:
            return asked
        with self.connection.pipeline(transaction=False) as pipeline:
            for running in of_tenants:
                pipeline.hexists(running.job.key, CANCEL_FIELD)
            marks = execute(pipeline)
        return asked + [running.job_id for running, mark in zip(of_tenants, marks, strict=True) if mark == 1]

    def lanes(self) -> list[Lane]:
        """The queue itself, and those of its lanes that RQ knows."""
        names = (raw.decode(errors="replace") for raw in self.connection.smembers(keys.RQ_QUEUES))
        found = (lane_of(name.removeprefix(Queue.redis_queue_namespace_prefix)) for name in names)
        plain = self.plain_lane
        return [plain, *(lane for lane in found if lane is not None and lane.queue == plain.queue and lane != plain)]

    def announce_lanes(self) -> None:
        """Have claims look at the lanes that have jobs: RQ's own tools put some there and tell nobody."""
        lanes = self.lanes()[1:]
        with self.connection.pipeline(transaction=False) as pipeline:
            for lane in lanes:
                pipeline.llen(keys.rq_queue(lane.name))
            lengths = execute(pipeline)
        waiting = [lane.name for lane, length in zip(lanes, lengths, strict=True) if isinstance(length, int) and length]
        if waiting:
            self.connection.sadd(keys.arrivals(self.queue.name), *waiting)

    def executions_of(self, worker: str) -> list[Running]:
        """The jobs that another worker has in hand, of whichever queue."""
        members = self.connection.smembers(f"rq:worker:{worker}:executions")
        return self._read_executions([as_text(member) for member in members], worker)

    def expired_executions(self) -> list[Running]:
        """The queue's jobs of which RQ has heard nothing for EXECUTION_TTL_S."""
        lanes = self.lanes()
        with self.connection.pipeline(transaction=False) as pipeline:
            for lane in lanes:
                pipeline.zrangebyscore(f"rq:wip:{lane.name}", 0, datetime.now(UTC).timestamp())
            expired = pipeline.execute()
        return [
            running
            for lane, members in zip(lanes, expired, strict=True)
            for running in self._read_executions([as_text(member) for member in members], "", lane)
        ]

    def forget_worker(self, worker: str) -> None:
        """Remove a dead worker from RQ's registers once its jobs are taken over."""
        key = f"rq:worker:{worker}"
        with self.connection.pipeline() as pipeline:
            pipeline.srem("rq:workers", key)
            pipeline.srem(f"rq:workers:{self.queue.name}", key)
            pipeline.delete(key, f"{key}:executions", keys.receipts(worker))
            pipeline.execute()

    def tidy(self) -> None:
        """RQ's periodic cleaning, one worker at a time, without the parts that can lose or double a job.

        Left out: the cleanup of started jobs (it imports callbacks that a job names, and two at once requeue a job
        twice; ours is the takeover) and of the intermediate queue (ours are the claim lists).
        """
        # What RQ had made ready when its connection broke it never puts on the queue by itself.
        ReadyJobRegistry(queue=self.queue).cleanup()
        if not self.should_run_maintenance_tasks:
            return
        self.last_cleaned_at = now()
        if self.queue.acquire_maintenance_lock():
            for registry in (FinishedJobRegistry, FailedJobRegistry):
                registry(queue=self.queue).cleanup()
            self._tidy_lanes(self.lanes()[1:])
            clean_worker_registry(self.queue)
            self.queue.release_maintenance_lock()

    def _tidy_lanes(self, lanes: Sequence[Lane]) -> None:
        """Clean the lanes' registries, and have RQ forget the lanes of which nothing is left. There may be many."""
        with self.connection.pipeline(transaction=False) as pipeline:
            for lane in lanes:
                for registry in ("finished", "failed"):
                    pipeline.zremrangebyscore(f"rq:{registry}:{lane.name}", 0, datetime.now(UTC).timestamp())
            execute(pipeline)
        self._fences.forget_lanes(lanes)

    def _read_executions(self, members: Sequence[str], worker: str, lane: Lane | None = None) -> list[Running]:
        """Jobs from "job:execution"; without the lane of whose registry they are, their hashes say it, which every
        write's fence checks."""
        found: list[Running] = []
        for member in members:
            try:
                job_id, execution_id = parse_composite_key(member)
                with self.connection.pipeline(transaction=False) as pipeline:
                    pipeline.hgetall(keys.rq_job(job_id))
                    pipeline.hget(keys.receipts(worker), job_id)
                    fields, receipt = execute(pipeline)
                own = lane or lane_of(as_text(fields.get(b"origin", b""))) or self.plain_lane
                claimed = self.read(job_id, fields, read_receipt(receipt, worker), own)
            except (MalformedJob, ValueError, AttributeError):
                self.connection.zrem(f"rq:wip:{(lane or self.plain_lane).name}", member)  # nothing is left to run
                continue
            execution = Execution(
                execution_id, job_id, self.connection, worker_name=worker or claimed.job.worker_name or ""
            )
            found.append(_running(claimed, execution))
        return found


def _running(claimed: Claimed, execution: Execution) -> Running:
    return Running(
        job=claimed.job,
        execution=execution,
        data=claimed.data,
        crashes=claimed.crashes,
        blame=claimed.blame,
        lane=claimed.lane,
        receipt=claimed.receipt,
    )
