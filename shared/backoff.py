"""Pauses between attempts at something that fails."""

from __future__ import annotations

import random

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
_RANDOM = random.Random()  # the program's own random numbers, which it may have seeded, are not ours to draw


def jittered(pause_s: float, least: float = 0.5) -> float:
    """A pause cut at random to between `least` and all of it, so that many clients don't keep coming together."""
    return pause_s * _RANDOM.uniform(least, 1.0)


class Backoff:
    """Pauses that double from FIRST_PAUSE_S to MAX_PAUSE_S, each cut by up to a half at random: many clients that have
    lost their server together should not come back together."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        self._longest_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._longest_s))
        return jittered(self._longest_s)

    def reset(self) -> bool:
        """Begin anew, since an attempt went well. True if some had failed before it."""
        had_failed, self._longest_s = self._longest_s > 0, 0.0
        return had_failed

    @property
    def is_first(self) -> bool:
        """True if no attempt has failed since the last that went well."""
        return self._longest_s == 0
