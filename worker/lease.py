"""A worker's lease: a key that expires unless it is renewed. Whoever finds it gone may take the worker's jobs over."""

from __future__ import annotations

import redis

from headrace.shared import keys
from headrace.shared.connection import as_text


class Lease:
    """One worker's claim to be alive, timed by the server's clock."""

    def __init__(self, connection: redis.Redis, worker: str, duration_s: float) -> None:
        self._connection = connection
        self._worker = worker
        self._duration_ms = int(duration_s * 1000)
        self.key = keys.lease(worker)

    def acquire(self) -> None:
        """Begin to be alive."""
        with self._connection.pipeline() as pipeline:
            pipeline.sadd(keys.WORKERS, self._worker)
            pipeline.set(self.key, 1, px=self._duration_ms)
            pipeline.execute()

    def renew(self) -> bool:
        """Stay alive. False if the lease had run out, so that jobs may have been taken over; it is held again now.

        A server that is out of memory lets an expiry be set, and would refuse SET.
        """
        kept = self._connection.pexpire(self.key, self._duration_ms)
        if not kept:
            self.acquire()
        return bool(kept)

    def release(self) -> None:
        """Sign off; nothing may be left in hand."""
        with self._connection.pipeline() as pipeline:
            pipeline.srem(keys.WORKERS, self._worker)
            pipeline.delete(self.key, keys.receipts(self._worker))
            pipeline.execute()


def dead_workers(connection: redis.Redis) -> list[str]:
    """Workers that have signed on and whose lease has run out."""
    members = connection.smembers(keys.WORKERS)
    names = sorted(as_text(name) for name in members)
    with connection.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.exists(keys.lease(name))
        return [name for name, alive in zip(names, pipeline.execute(), strict=True) if not alive]
