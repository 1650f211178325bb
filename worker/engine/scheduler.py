"""What one pass computes: a token of every row that decodes, then as much of newcomers' prompts as has room."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.worker.engine.rows import Row

MAX_PROMPT_TOKENS = 1024  # in one pass, so that live rows do not wait long for their next token
# In a part of a pass, for each core: every part reads all weights, which with fewer would take longer than to multiply.
_LEAST_TOKENS = 16
_MOST_UNEVEN = 1.2  # the largest part against an equal one

Share = tuple[Row, int]  # a row, and how many of its pending tokens a pass computes


def share_out(rows: Sequence[Row], max_prompt_tokens: int) -> list[Share]:
    """How many of its pending tokens each row gets computed: all rows that decode, newcomers in order of arrival."""
    shares = [(row, 1) for row in rows if row.num_pending == 1]
    for row in rows:
        if row.num_pending > 1 and max_prompt_tokens > 0:
            count = min(row.num_pending, max_prompt_tokens)
            shares.append((row, count))
            max_prompt_tokens -= count
    return shares


def split(shares: list[Share], cores: int) -> list[list[Share]]:
    """The shares in as many parts as are worth while on so many cores, with about as many tokens each.

    Cores that do a part each need not wait for each other after every product, nor read what the other has just
    written; and while one reads the cache the other multiplies. One part, if there is too little for two or a long
    prompt would leave cores idle.
    """
    total = sum(count for _, count in shares)
    num_parts = min(cores, total // (_LEAST_TOKENS * cores))
    if num_parts < 2:
        return [shares]
    parts: list[list[Share]] = [[] for _ in range(num_parts)]
    loads = [(0, 0, index) for index in range(num_parts)]  # tokens, and positions that they look at
    for row, count in sorted(shares, key=lambda share: (share[1], share[0].num_cached), reverse=True):
        tokens, positions, index = min(loads)
        parts[index].append((row, count))
        loads[index] = (tokens + count, positions + count * (row.num_cached + count), index)
    return parts if max(loads)[0] * num_parts <= total * _MOST_UNEVEN else [shares]
