"""Stopping in order when a person or the system asks for it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def signals_raise_once() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal stop the run in order; a second one must not break the tidying up."""
    fired = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        if not fired:
            fired = True
            raise KeyboardInterrupt

    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.signal(name, interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
