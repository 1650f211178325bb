"""The thread that notices a step which does not come back: a device that hangs holds its thread and raises nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.worker.engine.rows import now_s

logger = logging.getLogger("headrace.worker")


class Watchdog:
    """Calls `on_hang`, once and in its own thread, if what it watches takes longer than `limit_s`."""

    def __init__(self, limit_s: float, on_hang: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._began_s: float | None = None
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def leave(self) -> None:
        """End the thread."""
        self._halt.set()
        self._thread.join()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block."""
        self._began_s = now_s()
        try:
            yield
        finally:
            self._began_s = None

    def _run(self) -> None:
        while not self._halt.wait(min(1.0, self._limit_s / 4)):
            began_s = self._began_s
            if began_s is not None and now_s() - began_s > self._limit_s:
                logger.error("a step has not come back for %g s: the engine hangs", self._limit_s)
                self._on_hang()
                return
