"""The thread that keeps a worker's lease and its jobs' heartbeats, and looks after those of dead workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import redis

from headrace.shared.backoff import jittered
from headrace.shared.outages import is_passing, trouble
from headrace.worker.courier import Courier
from headrace.worker.engine.rows import now_s
from headrace.worker.lease import Lease
from headrace.worker.recovery import Recovery
from headrace.worker.rq_adapter.jobs import Running
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.rq_adapter.writes import EXECUTION_TTL_S

logger = logging.getLogger("headrace.worker")

_RQ_BEAT_S = EXECUTION_TTL_S / 5
_EXPIRED_SWEEP_S = 30.0
_LOOK_S = 1.0


class Keeper:
    """Beats three times a lease, and looks for what has been cancelled every second.

    After a time in which it could not beat, or did so late, it takes nothing over until all others have had a lease's
    time to beat: whatever held it up (a server that was away or stood still, a machine that was paused) may have held
    them up, too; on the server's clock they are dead, and will be back as it is.

    `on_lost` is told of each job that this worker holds no longer, `on_cancel` of each id that is to be cancelled, at
    every look until the job has ended.
    """

    def __init__(
        self,
        lease: Lease,
        rq: RqWorker,
        courier: Courier,
        recovery: Recovery,
        *,
        lease_s: float,
        on_lost: Callable[[Running], None],
        on_cancel: Callable[[str], None],
    ) -> None:
        self._lease = lease
        self._rq = rq
        self._courier = courier
        self._recovery = recovery
        self._lease_s = lease_s
        self._beat_s = lease_s / 3
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._beat_due_s = 0.0
        self._answered_s = now_s()
        self._rq_beat_due_s = 0.0
        self._sweep_due_s = 0.0
        self._take_over_from_s = 0.0
        self._failing = False
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin to beat. The lease must be held."""
        self._answered_s = now_s()
        self._thread.start()

    def leave(self) -> None:
        """End the thread."""
        self._halt.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._halt.is_set():
            self.try_to_look()
            self._halt.wait(self._pause_s())

    def _pause_s(self) -> float:
        """How long to wait for the next look: not beyond the time of the next beat, unless that has failed already."""
        pause_s, until_beat_s = jittered(min(_LOOK_S, self._beat_s), 0.75), self._beat_due_s - now_s()
        return min(pause_s, until_beat_s) if until_beat_s > 0 else pause_s

    def try_to_look(self) -> None:
        """As `look`; whatever goes wrong is met again at the next one."""
        try:
            self.look()
            self._note_success()
        except redis.RedisError as error:
            self._note_failure(error)
        except Exception:  # a worker that no longer beats would lose its jobs
            logger.exception("a heartbeat failed")

    def _note_success(self) -> None:
        if self._failing:
            logger.info("heartbeats are sent again")
        self._failing = False

    def _note_failure(self, error: redis.RedisError) -> None:
        if not self._failing:
            logger.warning("heartbeats fail, trying again until they don't: %s", trouble(error))
        self._failing = True
        if is_passing(error):
            self._spare_others()

    def _note_answer(self) -> None:
        """The server has answered. If it was silent for long, leases that were kept up may have run out meanwhile: one
        that is renewed in time has two beats' time left, and half a beat of that is for delays."""
        now = now_s()
        if now - self._answered_s > 1.5 * self._beat_s:
            self._spare_others()
        self._answered_s = now

    def _spare_others(self) -> None:
        self._take_over_from_s = now_s() + self._lease_s

    def look(self) -> None:
        """Cancel what is to be cancelled, and beat if it is time. A beat that fails is tried again at the next look."""
        cancelled = self._rq.cancelled(self._courier.in_hand())
        self._note_answer()
        for job_id in cancelled:
            self._on_cancel(job_id)
        now = now_s()
        if now >= self._beat_due_s:
            self.beat()
            self._beat_due_s = now + self._beat_s

    def beat(self) -> None:
        """Renew the lease, notice lost jobs, take over those of dead workers; now and then RQ's own duties."""
        if not self._lease.renew():
            logger.warning("the lease had run out; jobs may have gone to other workers")
            self._spare_others()
        self._note_answer()
        in_hand = self._courier.in_hand()
        for lost in self._rq.lost(in_hand):
            self._on_lost(lost)
        dead = self._recovery.dead_workers()
        self._note_answer()
        now = now_s()
        may_take_over = now >= self._take_over_from_s
        if may_take_over:
            self._recovery.take_over(dead)
        if now >= self._rq_beat_due_s:
            self._rq.beat(in_hand)
            self._rq_beat_due_s = now + _RQ_BEAT_S
        if may_take_over and now >= self._sweep_due_s:
            self._recovery.take_over_expired()
            self._rq.announce_lanes()
            self._rq.tidy()
            self._sweep_due_s = now + _EXPIRED_SWEEP_S
        self._note_answer()
