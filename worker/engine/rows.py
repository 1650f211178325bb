"""The rows of a batch: what each was asked for, what it has so far, and the table of those that are live."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.worker.engine.sampling import SamplingParams
from headrace.worker.engine.stopping import Finish, StopParams, StopStrings

NO_SLOT = -1


@dataclass(eq=False, kw_only=True)
class Row:
    """One sequence in the making. `row_id` is the caller's; `deadline_s` is on time.monotonic's clock.

    A row may come with `token_ids`: one that was interrupted goes on where it was.
    """

    row_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stopping: StopParams
    strings: StopStrings | None = None
    deadline_s: float | None = None
    rank: int = 0  # rows of a lower one are admitted before it, if they come while it waits
    num_overtaken: int = 0
    token_ids: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    num_cached: int = 0  # positions that are in the cache
    num_reused: int = 0  # of the prompt's, those that were copied from another row
    finish: Finish | None = None
    error: str | None = None
    admitted_at_s: float = 0.0
    first_token_at_s: float = 0.0
    finished_at_s: float = 0.0

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that the model has not seen: one of a row that decodes, more of a newcomer."""
        return self.length - self.num_cached

    @property
    def is_decoding(self) -> bool:
        """True once the whole of the prompt is in the cache."""
        return self.num_cached > 0 and self.num_pending == 1

    def known(self, start: int, stop: int) -> list[int]:
        """Tokens of the prompt and of what has been generated, by position."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.token_ids[start - prompt : stop - prompt]
        return (self.prompt_ids + self.token_ids)[start:stop]


class LiveRows:
    """The rows that have a slot of the cache, in the order they came, and the slots that are free."""

    def __init__(self, num_slots: int) -> None:
        self.rows: list[Row] = []
        self._free = list(range(num_slots))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_free(self) -> int:
        """Slots without a row."""
        return len(self._free)

    def add(self, row: Row) -> None:
        """Give a row a slot: the one that was left the longest ago, for what the last ones held may be of use."""
        row.slot = self._free.pop(0)
        self.rows.append(row)

    def take_out(self, leaves: Callable[[Row], bool]) -> list[Row]:
        """Take out the rows that leave and return them. Their `slot` is NO_SLOT from here on."""
        out = [row for row in self.rows if leaves(row)]
        if out:
            self.rows = [row for row in self.rows if not leaves(row)]
        for row in out:
            self._free.append(row.slot)
            row.slot = NO_SLOT
        return out


def suppress_early_stops(logits: Tensor, rows: list[Row]) -> Tensor:
    """Make the stop tokens of rows below their min_tokens impossible: (B, V) -> (B, V), a copy if there are any."""
    pairs = [
        (index, token_id)
        for index, row in enumerate(rows)
        if len(row.token_ids) < row.stopping.min_tokens
        for token_id in row.stopping.suppressed_ids
        if token_id < logits.shape[-1]
    ]
    if not pairs:
        return logits
    at = torch.tensor(pairs, device=logits.device)
    return logits.index_put((at[:, 0], at[:, 1]), torch.tensor(-torch.inf, dtype=logits.dtype, device=logits.device))


def now_s() -> float:
    """The clock that rows are timed by."""
    return time.monotonic()
