"""Which slots hold the beginning of which prompts, so that a prompt's beginning is computed once.

Most bulk files begin every prompt alike. A newcomer copies what another row, live or gone, has left in its slot; the
bits are those that it would have computed itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.worker.engine.rows import Row

MIN_SHARED = 16  # positions; for fewer, looking and copying are not worth their while


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The longest beginning to be had: copy `length` positions of `slot`, or wait while a row computes them there."""

    slot: int
    length: int
    is_ready: bool


class PrefixIndex:
    """Knows the prompt of the last row of each slot."""

    def __init__(self) -> None:
        self._row_of: dict[int, Row] = {}
        self._slots: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # by the first MIN_SHARED tokens

    def put(self, row: Row) -> None:
        """A row has got a slot; what was there before is gone."""
        self.forget(row.slot)
        if len(row.prompt_ids) > MIN_SHARED:
            self._row_of[row.slot] = row
            self._slots[_key(row.prompt_ids)].append(row.slot)

    def forget(self, slot: int) -> None:
        """What a slot holds is not to be used."""
        row = self._row_of.pop(slot, None)
        if row is not None:
            key = _key(row.prompt_ids)
            self._slots[key].remove(slot)
            if not self._slots[key]:
                del self._slots[key]

    def find(self, prompt_ids: Sequence[int]) -> Shared | None:
        """The longest beginning of a prompt, short of its last token, that can be copied.

        One that is still being computed for another row is worth waiting for if it is longer by a good part.
        """
        ready, coming = Shared(slot=0, length=0, is_ready=True), Shared(slot=0, length=0, is_ready=False)
        for slot in self._slots.get(_key(prompt_ids), ()):
            row = self._row_of[slot]
            length = min(_common(row.prompt_ids, prompt_ids), len(prompt_ids) - 1)
            done = min(length, row.num_cached)
            if done > max(ready.length, MIN_SHARED - 1):
                ready = Shared(slot=slot, length=done, is_ready=True)
            if row.slot == slot and length > max(done, coming.length):
                coming = Shared(slot=slot, length=length, is_ready=False)
        if coming.length - ready.length >= max(MIN_SHARED, len(prompt_ids) // 4):
            return coming
        return ready if ready.length else None


def _key(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(prompt_ids[:MIN_SHARED])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts have in common from the start, by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
