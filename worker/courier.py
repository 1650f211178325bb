"""The thread between Redis and the engine: it claims and prepares jobs ahead of the engine and settles those done.

All that touches Redis or text happens here, beside the decode loop. What it could not write because Redis was away it
keeps and writes later; the fences make a write that did arrive harmless to repeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import redis

from headrace.shared import keys
from headrace.shared.backoff import Backoff
from headrace.shared.outages import trouble
from headrace.shared.schema import ErrorInfo
from headrace.worker.engine.rows import Row, now_s
from headrace.worker.fence import Fences, Verdict, Write
from headrace.worker.intake import Intake
from headrace.worker.lanes import Receipt
from headrace.worker.lease import Lease
from headrace.worker.recovery import readable_claims
from headrace.worker.rq_adapter.jobs import Running
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.runner import Runner
from headrace.worker.settings import QueueSettings
from headrace.worker.settle import Held, Returned, Settler, place_of, unforeseen

logger = logging.getLogger("headrace.worker")

_POLL_S = 0.05  # how often a queue that was empty is looked at again while rows run
_IDLE_BLOCK_S = 0.1  # and at its lanes, which can't be waited for together with it, while nothing runs
_SUSPENDED_WAIT_S = 1.0
_GIVE_UP_S = 15.0  # on leaving: how long to keep trying to write what is left


class Courier:
    """Owns the jobs in hand: from the claim until the result is stored or the job is put back.

    `capacity` is how many jobs it may hold; in this thread `on_claim` is told of jobs that are about to start, and
    `on_row` takes each prepared row.

    A worker that dies takes all its jobs along, and nobody can tell which of them it died of. So a job on the last of
    its attempts runs alone: if it is innocent it finishes, and only the one that workers die of is given up.
    """

    def __init__(
        self,
        connection: redis.Redis,
        rq: RqWorker,
        fences: Fences,
        lease: Lease,
        runner: Runner,
        settler: Settler,
        settings: QueueSettings,
        *,
        capacity: int,
        on_claim: Callable[[Sequence[str]], None],
        on_row: Callable[[Row], None],
    ) -> None:
        self._connection = connection
        self._rq = rq
        self._fences = fences
        self._lease = lease
        self._settler = settler
        self._settings = settings
        self._capacity = capacity
        self._on_claim = on_claim
        self._on_row = on_row
        self._claims_key = keys.claims(rq.name)
        self._intake = Intake(connection, rq, fences, runner, settler, claims_key=self._claims_key)
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()  # over _held
        self._done: deque[Row] = deque()
        self._returned: deque[Returned] = deque()
        self._committed: list[Running] = []  # settled, and RQ's dependents not yet told
        self._one_alone = False  # a job on its last attempt is in hand, or will be once nothing else is
        self._snapshot: list[tuple[Held, list[int]]] = []
        self._wake = threading.Event()
        self._claiming = True
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self.queue_empty = threading.Event()  # the last look found nothing, and nothing is in hand
        self.num_settled = 0
        self.num_looks = 0  # into the queue

    # Called by other threads

    def start(self) -> None:
        """Begin to claim."""
        self._thread.start()

    def settle(self, rows: Sequence[Row]) -> None:
        """Take finished rows; their results are stored soon."""
        self._done.extend(rows)
        if rows:
            self._wake.set()

    def put_back(self, returned: Sequence[Returned]) -> None:
        """Take rows that will not be finished here; their jobs go back to the front of the queue."""
        self._returned.extend(returned)
        if returned:
            self._wake.set()

    def limit(self, capacity: int) -> None:
        """Hold at most so many jobs from now on."""
        self._capacity = min(self._capacity, capacity)

    def failed_before(self) -> frozenset[str]:
        """Ids of the jobs in hand of which an earlier attempt has failed."""
        with self._lock:
            return frozenset(job_id for job_id, held in self._held.items() if held.running.crashes)

    def put_all_back(self, failure: ErrorInfo) -> None:
        """Put back all jobs in hand, whoever has their rows, except those that are done."""
        with self._lock:
            rows = [held.row for held in self._held.values() if held.row.finish is None]
        self.put_back([Returned(row=row, failure=failure) for row in rows])

    def snapshot(self) -> None:
        """Note how far the running jobs are; that is stored soon. Call it between two steps."""
        with self._lock:
            held = list(self._held.values())
        self._snapshot = [
            (each, each.row.token_ids.copy()) for each in held if each.row.finish is None and each.has_got_further
        ]
        if self._snapshot:
            self._wake.set()

    def stop_claiming(self) -> None:
        """Take no new jobs."""
        self._claiming = False
        self._wake.set()

    def leave(self) -> None:
        """End the thread after the round that it is in. `write_rest` then stores what is left."""
        self._claiming = False
        self._halt.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def write_rest(self) -> bool:
        """After `leave`: store and put back what is left, in the caller's thread, trying for _GIVE_UP_S if need be.

        False if some could not be written; those jobs return when the lease has run out.
        """
        give_up_s, backoff = now_s() + _GIVE_UP_S, Backoff()
        while True:
            try:
                self._return_rows()
                self._settle_done()
                return True
            except redis.RedisError as error:
                if now_s() > give_up_s:
                    logger.warning("%s; the jobs in hand return when the lease has run out", trouble(error))
                    return False
                time.sleep(backoff.next_s())

    def in_hand(self) -> list[Running]:
        """The jobs that this worker has started and not settled."""
        with self._lock:
            return [held.running for held in self._held.values()]

    def lose(self, running: Running) -> bool:
        """Drop a job that this worker has lost; False if it is not in hand (settled, or started anew) by now."""
        with self._lock:
            held = self._held.get(running.job_id)
            if held is None or held.running.execution.id != running.execution.id:
                return False
            del self._held[running.job_id]
            return True

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        backoff = Backoff()
        while not self._halt.is_set():
            self._wake.clear()
            try:
                worked = self._round()
                if backoff.reset():
                    logger.info("Redis takes commands again")
                if not worked:
                    self._wait_for_work()
            except redis.RedisError as error:
                if backoff.is_first:
                    logger.warning("%s; trying again, and decoding what is in hand", trouble(error))
                self._halt.wait(backoff.next_s())

    def _round(self) -> bool:
        """Put back, settle, checkpoint, claim; False if there was nothing to do."""
        # Putting back comes first: a server that is out of memory allows it, and refuses results.
        worked = self._return_rows() + self._settle_done() + self._write_checkpoints()
        if self._claiming:
            worked += self._claim()
        self._rq.show_busy(bool(self._held))
        return worked > 0

    def _wait_for_work(self) -> None:
        if self._held or not self._claiming or self._settings.burst:
            self._wake.wait(_POLL_S)
            return
        # Wait for the queue without taking from it: from left to left moves nothing, and a job that is claimed only
        # by the script can't be taken while work is suspended.
        queue_key = self._rq.queue.key
        block_s: Any = _IDLE_BLOCK_S  # which redis-py declares to be whole seconds
        arrived = self._connection.blmove(queue_key, queue_key, block_s, "LEFT", "LEFT")
        if arrived and self._connection.exists(keys.RQ_SUSPENDED):
            self._wake.wait(_SUSPENDED_WAIT_S)

    def _settle_done(self) -> int:
        rows = list(self._done)
        held = [self._held.get(row.row_id) for row in rows]
        pairs = [(job, row) for job, row in zip(held, rows, strict=True) if job is not None]
        verdicts = self._fences.finish([self._finished_write(job, row) for job, row in pairs])
        refused = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is Verdict.REFUSED]
        stored = self._stored_before(refused)
        for (job, row), verdict in zip(pairs, verdicts, strict=True):
            self._forget(row.row_id)
            if verdict in (Verdict.DONE, Verdict.DONE_FOR_NONE) or row.row_id in stored:
                self.num_settled += 1
                if verdict is not Verdict.DONE_FOR_NONE:
                    self._committed.append(job.running)
            else:
                logger.warning("job %s has moved on, or can't be written; its result from here was refused", row.row_id)
        for _ in rows:
            self._done.popleft()
        self._rq.writes.after_commit(self._committed)
        self._committed.clear()
        return len(rows)

    def _stored_before(self, refused: Sequence[tuple[Held, Row]]) -> set[str]:
        """Ids of the jobs whose result was stored by us already: only the answer was lost on the way."""
        if not refused:
            return set()
        raw = self._connection.mget([keys.result(row.row_id) for _, row in refused])
        found = zip(refused, raw, strict=True)
        return {row.row_id for (held, row), stored in found if self._settler.is_result(held, row, stored)}

    def _finished_write(self, held: Held, row: Row) -> Write:
        try:
            return self._settler.finished(held, row)
        except Exception as error:  # whatever it is, the results of the others must not wait for it
            logger.error("the result of job %s could not be made: %s", row.row_id, place_of(error))
            return self._settler.failed(held, unforeseen(error))

    def _return_rows(self) -> int:
        returned = list(self._returned)
        pairs = [(self._held.get(each.row.row_id), each) for each in reversed(returned)]  # each goes to the front
        self._fences.finish([self._settler.returned(held, each) for held, each in pairs if held is not None])
        for each in returned:
            self._forget(each.row.row_id)
            self._returned.popleft()
        return len(returned)

    def _write_checkpoints(self) -> int:
        snapshot, self._snapshot = self._snapshot, []
        in_hand = [(held, ids) for held, ids in snapshot if self._held.get(held.row.row_id) is held]
        self._fences.finish([self._settler.checkpoint(held, ids) for held, ids in in_hand])
        return len(in_hand)

    def _forget(self, job_id: str) -> None:
        with self._lock:
            self._held.pop(job_id, None)

    def _claim(self) -> int:
        self._one_alone = self._one_alone and bool(self._held)
        room = self._capacity - len(self._held)
        if room <= 0 or self._one_alone:
            return 0
        claims = self._fences.claim(self._rq.queue.name, self._rq.name, room)
        self.num_looks += 1
        if not claims.raw_ids and not self._held:
            self.queue_empty.set()
        for raw in claims.dropped:
            logger.warning("dropped %r from a tenant's lane: the ids of its jobs begin with its name and '-'", raw[:80])
        readable = readable_claims(self._fences, self._claims_key, claims)
        if readable:
            self._start(readable)
        return len(claims.raw_ids)

    def _start(self, claims: Sequence[tuple[str, Receipt | None]]) -> None:
        """Start claimed jobs, refuse those that can't be run, and hand the rows on."""
        self._on_claim([job_id for job_id, _ in claims])
        for held in self._started(self._one_if_last(self._intake.prepare(claims))):
            if held.row.finish is None:
                self._on_row(held.row)
            else:
                self._done.append(held.row)

    def _one_if_last(self, prepared: list[tuple[Write, Held | None]]) -> list[tuple[Write, Held | None]]:
        """All of the prepared jobs; or, if one is on its last attempt, that one alone, once nothing else is in hand.

        Until then it waits in the claim list, from where it returns unblamed if the worker dies. The others go back to
        the front of the queue.
        """
        last = [held for _, held in prepared if held is not None and self._settler.is_last_attempt(held.running)]
        if not last:
            return prepared
        self._one_alone = True
        back = [held.running for _, held in reversed(prepared) if held is not None and held is not last[0]]
        self._fences.unclaim([self._rq.writes.unclaim(r.job_id, self._claims_key, r.lane, r.receipt) for r in back])
        return [(write, held) for write, held in prepared if held is None or (held is last[0] and not self._held)]

    def _started(self, prepared: Sequence[tuple[Write, Held | None]]) -> list[Held]:
        """Send the writes, in one round trip; return the jobs that did start, taken in hand.

        A start whose answer was lost is refused when it is sent again, by us or by the client's own retries. Whether
        the job runs under the execution that was made for it tells the one refusal from the other.
        """
        try:
            verdicts = self._fences.start([write for write, _ in prepared])
            jobs = [(held, verdict) for (_, held), verdict in zip(prepared, verdicts, strict=True) if held is not None]
            doubtful = [held for held, verdict in jobs if verdict is Verdict.REFUSED]
            confirmed = self._fences.finish([self._rq.writes.add(held.running, []) for held in doubtful])
        except redis.RedisError:
            lost = [held for _, held in prepared if held is not None and held.row.row_id not in self._held]
            self._take_in_hand(lost)
            self._returned.extend(Returned(row=held.row) for held in lost)  # fenced: only what has started goes back
            raise
        jobs += zip(doubtful, confirmed, strict=True)
        started = [held for held, verdict in jobs if verdict is Verdict.DONE]
        self._take_in_hand(started)
        for held in doubtful:
            if (receipt := held.running.receipt) is not None and held not in started:  # cancelled while it waited
                self._fences.drop(self._claims_key, held.running.job_id, receipt)
        return started

    def _take_in_hand(self, jobs: Sequence[Held]) -> None:
        with self._lock:
            self._held.update({held.row.row_id: held for held in jobs})
