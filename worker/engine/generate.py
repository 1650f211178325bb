"""The decode loop: every step advances all live rows by one token; rows come and go between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.shared.schema import FinishReason
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.rows import LiveRows, Row, now_s, suppress_early_stops
from headrace.worker.engine.sampling import BatchSampling, sample
from headrace.worker.engine.scheduler import padded_length, take_newcomers
from headrace.worker.engine.stopping import Finish, finish_of

MAX_PREFILL_TOKENS = 2048


class Model(Protocol):
    """What the loop needs of a model; `Decoder` is one."""

    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, first_slot: int) -> Tensor:
        """(B, T), (B,) -> (B, V)."""

    def decode_step(self, token_ids: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """(B,), (B,) -> (B, V)."""


@dataclass
class StepCounts:
    """What the engine has done since it started. A row-step is one row's share of one decode step."""

    decode_steps: int = 0
    row_steps: int = 0
    idle_row_steps: int = 0  # slots that were empty in a step while rows waited
    prompt_tokens: int = 0
    padding_tokens: int = 0  # of prefill


class Engine:
    """A batch that runs for as long as there are rows. Not thread-safe: one thread submits, steps and cancels."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._device = cache.keys.device
        self._waiting: deque[Row] = deque()
        self._live = LiveRows(self._device, on_move=cache.move)
        self._done: list[Row] = []  # out of the batch; the step that took them out returns them
        self.counts = StepCounts()

    @property
    def num_slots(self) -> int:
        return self._cache.num_slots

    @property
    def max_context(self) -> int:
        """Positions a row can have, prompt and answer together."""
        return self._cache.max_context

    @property
    def num_rows(self) -> int:
        """Rows waiting, live, and done but not returned yet."""
        return len(self._waiting) + len(self._live) + len(self._done)

    def submit(self, row: Row) -> None:
        """Queue a row; it is admitted when a slot is free. A row that has tokens already goes on from there.

        What it has must leave a position to generate in.
        """
        assert 0 < len(row.prompt_ids)
        assert row.length < self.max_context
        self._waiting.append(row)

    def end(self, row_id: str, reason: FinishReason) -> bool:
        """Ask for a row to end as it stands (cancelled, timed out); the next step returns it. False: no such row."""
        for row in (*self._waiting, *self._live.rows):
            if row.row_id == row_id and row.finish is None:
                row.finish = Finish(reason=reason)
                return True
        return False

    def drop(self, row_id: str) -> None:
        """Forget a row, if it is here; no step returns it."""
        self._take_out(lambda row: row.row_id == row_id)

    def drop_waiting(self) -> list[Row]:
        """Forget the rows that have not begun and return them."""
        rows = list(self._waiting)
        self._waiting.clear()
        return rows

    def drop_all(self) -> list[Row]:
        """Forget all rows and return them, also those that a failed step has left half done."""
        for slot in range(len(self._live)):
            self._cache.clear(slot)  # who knows what a failed step has left there
        rows = [*self._done, *self._live.rows, *self.drop_waiting()]
        self._live = LiveRows(self._device, on_move=self._cache.move)
        self._done = []
        return rows

    def step(self) -> list[Row]:
        """Admit newcomers, advance every live row by a token, and return the rows that are done.

        If the model raises, every row is still here, those that are done too: `drop_all` returns them.
        """
        self._end_overdue()
        self._leave()
        self._admit()
        self._leave()
        if self._live:
            self._decode()
            self._leave()
        done, self._done = self._done, []
        return done

    def _decode(self) -> None:
        rows = len(self._live)
        positions = self._cache.lengths[:rows].clone()  # (B,) on the host
        logits = self._model.decode_step(
            self._live.last_tokens(), positions.to(self._device), int(positions.max()) + 1, self._cache
        )
        self._cache.advance(rows)
        self._accept(self._live.rows, logits, self._live.sampling)
        self.counts.decode_steps += 1
        self.counts.row_steps += rows
        self.counts.idle_row_steps += min(self.num_slots - rows, len(self._waiting))

    def _admit(self) -> None:
        first_slot = len(self._live)
        groups = take_newcomers(self._waiting, self.num_slots - first_slot, MAX_PREFILL_TOKENS, self.max_context)
        for group in groups:
            self._live.add(group)  # all of them before any is run, so that none is lost if that fails
        for group in groups:
            self._prefill(group, first_slot)
            first_slot += len(group)

    def _prefill(self, group: list[Row], first_slot: int) -> None:
        """Run what rows of one padded length have so far; they have the slots from `first_slot` on."""
        started = now_s()
        lengths = [row.length for row in group]
        padded = padded_length(lengths[0], self.max_context)
        token_ids = torch.tensor(  # (B, T)
            [row.prompt_ids + row.token_ids + [0] * (padded - row.length) for row in group]
        )
        logits = self._model.prefill(
            token_ids.to(self._device), torch.tensor(lengths, device=self._device), self._cache, first_slot
        )
        for offset, row in enumerate(group):
            self._cache.commit(first_slot + offset, lengths[offset])
            row.admitted_at_s = started
        self._accept(group, logits, BatchSampling([row.sampling for row in group], self._device))
        for row in group:
            row.first_token_at_s = now_s()
        self.counts.prompt_tokens += sum(lengths)
        self.counts.padding_tokens += padded * len(group) - sum(lengths)

    def _accept(self, rows: list[Row], logits: Tensor, sampling: BatchSampling) -> None:
        """Sample one token a row, append it, and mark the rows that are done with it."""
        logits = suppress_early_stops(logits, rows)
        positions = torch.tensor([row.length for row in rows], device=self._device)
        token_ids, failed = sample(logits, sampling, positions)
        chosen = torch.stack((token_ids, failed.long())).tolist()  # the step's one host synchronisation
        for row, token_id, has_failed in zip(rows, *chosen, strict=True):
            if has_failed:
                row.finish = Finish(reason=FinishReason.ERROR)
                row.error = "the model gave no finite logits for this row"
                continue
            row.token_ids.append(token_id)
            row.finish = finish_of(row.stopping, len(row.token_ids), token_id, row.strings)

    def _leave(self) -> None:
        """Take out the rows that are done."""
        for slot, row in enumerate(self._live.rows):
            if row.error is not None:
                self._cache.clear(slot)
        done = self._take_out(lambda row: row.finish is not None)
        for row in done:
            row.finished_at_s = now_s()
        self._done += done

    def _take_out(self, leaves: Callable[[Row], bool]) -> list[Row]:
        """Take rows out of the waiting and the live ones, and return them."""
        out = [row for row in self._waiting if leaves(row)]
        for row in out:
            self._waiting.remove(row)
        return out + self._live.take_out(leaves)

    def _end_overdue(self) -> None:
        now = now_s()
        for row in (*self._waiting, *self._live.rows):
            if row.deadline_s is not None and row.deadline_s < now and row.finish is None:
                row.finish = Finish(reason=FinishReason.TIMEOUT)
