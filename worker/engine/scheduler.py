"""Who is prefilled next. Newcomers are taken in order of arrival and padded together by like lengths."""

from __future__ import annotations

from collections import defaultdict, deque

from headrace.worker.engine.rows import Row

PAD_MULTIPLE = 32


def padded_length(length: int, max_context: int) -> int:
    """The length that a prompt is padded to: it follows from its own length alone, so neighbours can't change it."""
    return min(-(-length // PAD_MULTIPLE) * PAD_MULTIPLE, max_context)


def take_newcomers(waiting: deque[Row], free_slots: int, max_tokens: int, max_context: int) -> list[list[Row]]:
    """Take rows off the front of `waiting` and return them as groups of one padded length each.

    At most `free_slots` rows, and at most `max_tokens` padded tokens in all, so that live rows do not wait long for
    their next step; one row is taken whatever its length.
    """
    groups: defaultdict[int, list[Row]] = defaultdict(list)
    tokens = 0
    taken = 0
    while waiting and taken < free_slots:
        length = padded_length(waiting[0].length, max_context)
        if taken and tokens + length > max_tokens:
            break
        groups[length].append(waiting.popleft())
        tokens += length
        taken += 1
    return list(groups.values())
