"""The worker as RQ knows it: registered, heard of, told of commands, and its duties towards other workers' jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import redis
from redis.client import PubSub, PubSubWorkerThread
from rq import Queue
from rq.command import parse_payload
from rq.executions import Execution
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import now, parse_composite_key
from rq.worker.base import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.job import CANCEL_FIELD
from headrace.shared.lanes import Lane, lane_of
from headrace.worker.fence import Fences, execute
from headrace.worker.lanes import read_receipt
from headrace.worker.rq_adapter.jobs import JobReader, MalformedJob, Running, job_id_of
from headrace.worker.rq_adapter.jobs import running as as_running
from headrace.worker.rq_adapter.writes import EXECUTION_TTL_S, JobWrites

_MAINTENANCE_INTERVAL_S = 600

logger = logging.getLogger("headrace.worker")


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
        self.plain_lane = Lane(queue)  # the queue itself
        self.jobs = JobReader(connection, self.plain_lane)
        self.writes = JobWrites(self, fences, self.plain_lane)

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
                claimed = self.jobs.read(job_id, fields, read_receipt(receipt, worker), own)
            except (MalformedJob, ValueError, AttributeError):
                self.connection.zrem(f"rq:wip:{(lane or self.plain_lane).name}", member)  # nothing is left to run
                continue
            execution = Execution(
                execution_id, job_id, self.connection, worker_name=worker or claimed.job.worker_name or ""
            )
            found.append(as_running(claimed, execution))
        return found
