"""The rows of a batch: what each was asked for, what it has so far, and the table of those that are live."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.worker.engine.sampling import BatchSampling, SamplingParams
from headrace.worker.engine.stopping import Finish, StopParams, StopStrings


@dataclass(eq=False, kw_only=True)
class Row:
    """One sequence in the making. `row_id` is the caller's; `deadline_s` is on time.monotonic's clock."""

    row_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    stopping: StopParams
    strings: StopStrings | None = None
    deadline_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    admitted_at_s: float = 0.0
    first_token_at_s: float = 0.0
    finished_at_s: float = 0.0

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.token_ids)


class LiveRows:
    """The live rows, dense: row i of every tensor, and slot i of the cache, belong to `rows[i]`.

    `on_move(source, target)` is told when a row changes its place.
    """

    def __init__(self, device: torch.device, on_move: Callable[[int, int], None]) -> None:
        self._device = device
        self._on_move = on_move
        self._sampling: BatchSampling | None = None
        self.rows: list[Row] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def sampling(self) -> BatchSampling:
        """The sampling parameters of all live rows, rebuilt only when rows have come or gone."""
        if self._sampling is None:
            self._sampling = BatchSampling([row.sampling for row in self.rows], self._device)
        return self._sampling

    def last_tokens(self) -> Tensor:
        """The token that each row feeds to its next step: (B,)."""
        return torch.tensor([row.token_ids[-1] for row in self.rows], device=self._device)

    def add(self, rows: list[Row]) -> None:
        """Take rows in at the end."""
        self.rows.extend(rows)
        self._sampling = None

    def take_out(self, leaves: Callable[[Row], bool]) -> list[Row]:
        """Take out the rows that leave and return them; from the end on, the last row fills each gap."""
        gone = [index for index, row in enumerate(self.rows) if leaves(row)]
        out = [self.rows[index] for index in gone]
        for index in reversed(gone):
            last = self.rows.pop()
            if index < len(self.rows):
                self.rows[index] = last
                self._on_move(len(self.rows), index)
        if gone:
            self._sampling = None
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
