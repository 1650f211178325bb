"""The worker's main loop: rows in, step, rows out. Everything on Redis happens in the courier and the keeper."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from types import FrameType

import redis

from headrace.shared import keys
from headrace.shared.backoff import Backoff
from headrace.shared.errors import EngineFailure
from headrace.shared.outages import is_passing, trouble
from headrace.shared.schema import ErrorCode, ErrorInfo, FinishReason
from headrace.worker.bisection import isolate, works
from headrace.worker.courier import Courier
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.rows import Row, now_s
from headrace.worker.fence import Fences
from headrace.worker.keeper import Keeper
from headrace.worker.lease import Lease
from headrace.worker.memory import is_out_of_memory, release_unused_memory
from headrace.worker.recovery import Recovery
from headrace.worker.rq_adapter.jobs import Running
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.runner import Runner
from headrace.worker.settings import QueueSettings
from headrace.worker.settle import Returned, Settler, unforeseen
from headrace.worker.watchdog import Watchdog

logger = logging.getLogger("headrace.worker")

_IDLE_WAIT_S = 0.2
_LOOKAHEAD_SHARE = 8  # one job prepared ahead for every so many slots, so that a freed slot never waits for Redis


def worker_name() -> str:
    """A new name. Never a fixed one: RQ would refuse it for minutes after a crash."""
    host = "".join(char if char.isalnum() or char == "-" else "-" for char in socket.gethostname())
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


def _failure(error: Exception) -> ErrorInfo:
    info = unforeseen(error)
    return info.model_copy(update={"code": ErrorCode.OUT_OF_MEMORY}) if is_out_of_memory(error) else info


class BatchWorker:
    """One engine, one queue. `run` returns when the worker is told to stop or, in burst mode, the queue is empty."""

    def __init__(self, connection: redis.Redis, engine: Engine, runner: Runner, settings: QueueSettings) -> None:
        self.name = worker_name()
        self._engine = engine
        self._settings = settings
        self._watchdog = Watchdog(settings.step_timeout_s, self._abandon)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop_by_s: float | None = None
        self._checkpoint_due_s = now_s() + (settings.checkpoint_interval_s or inf)
        self._stops_asked = 0
        self._cancelled_early: deque[str] = deque(maxlen=256)
        self._queue = settings.queue or keys.queue_name(runner.model_name)
        fences = Fences(connection)
        self._rq = RqWorker(
            self._queue,
            self.name,
            connection,
            fences,
            on_stop=lambda job_id: self._inbox.put(lambda: self._cancel(job_id)),
            on_shutdown=self.ask_to_stop,
        )
        self._lease = Lease(connection, self.name, settings.lease_s)
        settler = Settler(self._rq, runner, result_ttl_s=settings.result_ttl_s, max_crashes=settings.max_crashes)
        self._courier = Courier(
            connection,
            self._rq,
            fences,
            self._lease,
            runner,
            settler,
            settings,
            capacity=engine.num_slots + engine.num_slots // _LOOKAHEAD_SHARE,
            on_claim=lambda job_ids: self._inbox.put(lambda: self._expect(job_ids)),
            on_row=lambda row: self._inbox.put(lambda: self._submit(row)),
        )
        self._recovery = Recovery(connection, self._rq, fences, settler, max_crashes=settings.max_crashes)
        self._keeper = Keeper(
            self._lease,
            self._rq,
            self._courier,
            self._recovery,
            lease_s=settings.lease_s,
            on_lost=lambda running: self._inbox.put(lambda: self._lose(running)),
            on_cancel=lambda job_id: self._inbox.put(lambda: self._cancel(job_id)),
        )

    @property
    def num_settled(self) -> int:
        """Jobs whose results this worker has stored."""
        return self._courier.num_settled

    def ask_to_stop(self) -> None:
        """Once: take no new jobs and finish the running ones within the drain timeout. Again: put them back now.

        May be called from any thread and from a signal handler.
        """
        self._stops_asked += 1
        self._inbox.put(lambda: None)

    def install_signal_handlers(self) -> None:
        """Stop on SIGTERM and SIGINT."""

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self.ask_to_stop()

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    def run(self) -> None:
        """Work until told to stop. Raises RedisError if the server refuses to have this worker at all."""
        if not self._sign_on():
            return
        self._keeper.start()
        self._courier.start()
        self._watchdog.start()
        logger.info("worker %s takes jobs from queue %s", self.name, self._queue)
        try:
            while not self._is_done():
                self._take_in()
                self._step()
                self._checkpoint()
        finally:
            self._leave()

    def _sign_on(self) -> bool:
        """Become known as a worker, once the server lets us; False if told to stop before that."""
        backoff = Backoff()
        while not self._stops_asked:
            try:
                self._lease.acquire()
                self._rq.enter()
                return True
            except redis.RedisError as error:
                if not is_passing(error):
                    raise
                if backoff.is_first:
                    logger.warning("%s; trying again before taking any jobs", trouble(error))
            time.sleep(backoff.next_s())
        return False

    def _take_in(self) -> None:
        """Do what other threads have asked for; wait for it a little if there is nothing to decode."""
        idle = self._engine.num_rows == 0 and self._courier.is_alive
        try:
            self._inbox.get(block=idle, timeout=_IDLE_WAIT_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _step(self) -> None:
        if not self._engine.num_rows:
            return
        try:
            self._courier.settle(self._watched_step())
        except Exception as error:  # whatever the device or the model raises, the jobs must not be lost with it
            self._recover(error)

    def _watched_step(self) -> list[Row]:
        with self._watchdog.watching():
            return self._engine.step()

    def _recover(self, error: Exception) -> None:
        """After a failed step: let each row go on, but those that can't be run. Raises EngineFailure if none can."""
        rows = self._engine.drop_all()
        self._courier.settle([row for row in rows if row.finish is not None])
        live = [row for row in rows if row.finish is None]
        if is_out_of_memory(error):
            release_unused_memory()
            if len(live) > 1:
                self._shrink(live)
                return
        logger.error("a step with %d rows failed", len(live), exc_info=error)
        broken = works(self._engine, self._watched_step)
        if broken is not None:
            self._courier.put_back([Returned(row=row) for row in live])
            raise EngineFailure(f"the engine fails whatever it runs; its jobs are back in the queue: {broken}")
        found = isolate(self._engine, self._watched_step, live, suspects=self._courier.failed_before())
        self._courier.settle(found.done)
        self._courier.put_back(
            [Returned(row=row, failure=_failure(error), culprit=True) for row, error in found.culprits]
        )
        for row in found.rest:
            self._engine.submit(row)

    def _shrink(self, rows: list[Row]) -> None:
        """Memory does not suffice for so many rows: put them back, and hold half as many from now on."""
        fewer = len(rows) // 2
        logger.error(
            "out of memory with %d rows; they go back into the queue, and at most %d run now", len(rows), fewer
        )
        self._courier.limit(fewer)
        self._courier.put_back([Returned(row=row) for row in rows])

    def _checkpoint(self) -> None:
        now = now_s()
        if now >= self._checkpoint_due_s:
            self._courier.snapshot()
            self._checkpoint_due_s = now + (self._settings.checkpoint_interval_s or inf)

    def _is_done(self) -> bool:
        if not self._courier.is_alive:
            raise RuntimeError("the courier thread has ended; see the error above")
        if self._stops_asked:
            return self._drain()
        return self._settings.burst and self._engine.num_rows == 0 and self._courier.queue_empty.is_set()

    def _drain(self) -> bool:
        """Stop claiming, put back what has not begun; True when nothing runs or its time is up."""
        if self._stop_by_s is None:
            logger.info(
                "stopping: no new jobs; %d rows have %g s", self._engine.num_rows, self._settings.drain_timeout_s
            )
            self._stop_by_s = now_s() + self._settings.drain_timeout_s
            self._courier.stop_claiming()
        self._courier.put_back([Returned(row=row) for row in self._engine.drop_waiting()])
        return self._engine.num_rows == 0 or self._stops_asked > 1 or now_s() > self._stop_by_s

    def _expect(self, job_ids: Sequence[str]) -> None:
        """Jobs are about to start: to cancel them was meant for an earlier attempt, which has ended and was retried."""
        for job_id in set(self._cancelled_early).intersection(job_ids):
            self._cancelled_early.remove(job_id)

    def _submit(self, row: Row) -> None:
        self._engine.submit(row)
        if row.row_id in self._cancelled_early:
            self._engine.end(row.row_id, FinishReason.CANCELLED)

    def _cancel(self, job_id: str) -> None:
        if not self._engine.end(job_id, FinishReason.CANCELLED) and job_id not in self._cancelled_early:
            self._cancelled_early.append(job_id)  # it may be on its way here

    def _lose(self, running: Running) -> None:
        """A job has gone to another worker, or was deleted: stop decoding it."""
        if self._courier.lose(running):
            logger.warning("job %s has moved on; dropped its row", running.job_id)
            self._engine.drop(running.job_id)

    def _abandon(self) -> None:
        """The engine hangs, and its thread with it: hand all jobs back from this one, and end the process."""
        try:
            self._courier.leave()
            text = f"a step did not come back for {self._settings.step_timeout_s:g} s"
            self._courier.put_all_back(ErrorInfo(code=ErrorCode.INTERNAL_ERROR, message=text))
            self._sign_off()
        finally:
            os._exit(EngineFailure.exit_code)

    def _leave(self) -> None:
        """Hand back what is in hand and sign off, so that no job waits for the lease to run out."""
        self._watchdog.leave()
        self._courier.leave()
        self._take_in()  # rows that were on their way
        rows = self._engine.drop_all()
        self._courier.settle([row for row in rows if row.finish is not None])
        self._courier.put_back([Returned(row=row) for row in rows if row.finish is None])
        self._sign_off()

    def _sign_off(self) -> None:
        all_written = self._courier.write_rest()
        self._keeper.leave()
        if all_written:  # otherwise the lease has to run out, for others to look after what is left
            self._deregister()
        self._rq.stop_listening()
        logger.info("worker %s has stopped after %d jobs", self.name, self.num_settled)

    def _deregister(self) -> None:
        try:
            self._recovery.give_back_claims(self.name)
            self._lease.release()
            self._rq.leave()
        except redis.RedisError as error:
            logger.warning("could not sign off: %s; jobs in hand return when the lease has run out", trouble(error))
