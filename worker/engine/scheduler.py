"""What one pass computes: a token of every row that decodes, then as much of newcomers' prompts as has room."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.worker.engine.rows import Row

MAX_PROMPT_TOKENS = 1024  # in one pass, so that live rows do not wait long for their next token


def share_out(rows: Sequence[Row], max_prompt_tokens: int) -> list[tuple[Row, int]]:
    """How many of its pending tokens each row gets computed: all rows that decode, newcomers in order of arrival."""
    shares = [(row, 1) for row in rows if row.num_pending == 1]
    for row in rows:
        if row.num_pending > 1 and max_prompt_tokens > 0:
            count = min(row.num_pending, max_prompt_tokens)
            shares.append((row, count))
            max_prompt_tokens -= count
    return shares
