"""The decode loop: every step advances all live rows by one token; rows come and go between steps."""

from __future__ import annotations

from collections import deque
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
        """Rows waiting and live."""
        return len(self._waiting) + len(self._live)

    def submit(self, row: Row) -> None:
        """Queue a row; it is admitted when a slot is free. Its prompt must leave a position to generate in."""
        assert 0 < len(row.prompt_ids) < self.max_context
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
        for row in (*self._waiting, *self._live.rows):
            if row.row_id == row_id:
                row.finish = Finish(reason=FinishReason.CANCELLED)
        self._leave()

    def drop_waiting(self) -> list[Row]:
        """Forget the rows that have not begun and return them."""
        rows = list(self._waiting)
        self._waiting.clear()
        return rows

    def drop_all(self) -> list[Row]:
        """Forget all rows and return them."""
        rows = [*self._live.rows, *self.drop_waiting()]
        self._live = LiveRows(self._device, on_move=self._cache.move)
        return rows

    def step(self) -> list[Row]:
        """Admit newcomers, advance every live row by a token, and return the rows that are done."""
        self._end_overdue()
        done = self._leave()
        self._admit()
        done += self._leave()
        if self._live:
            self._decode()
            done += self._leave()
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
        free = self.num_slots - len(self._live)
        for group in take_newcomers(self._waiting, free, MAX_PREFILL_TOKENS, self.max_context):
            self._prefill(group)

    def _prefill(self, group: list[Row]) -> None:
        """Bring in rows of one padded length and give each its first token."""
        started = now_s()
        first_slot = len(self._live)
        lengths = [len(row.prompt_ids) for row in group]
        padded = padded_length(lengths[0], self.max_context)
        token_ids = torch.tensor([row.prompt_ids + [0] * (padded - len(row.prompt_ids)) for row in group])  # (B, T)
        logits = self._model.prefill(
            token_ids.to(self._device), torch.tensor(lengths, device=self._device), self._cache, first_slot
        )
        for offset, row in enumerate(group):
            self._cache.commit(first_slot + offset, lengths[offset])
            row.admitted_at_s = started
        self._live.add(group)
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

    def _leave(self) -> list[Row]:
        """Take finished rows out, waiting or live."""
        for slot, row in enumerate(self._live.rows):
            if row.error is not None:
                self._cache.clear(slot)
        done = [row for row in self._waiting if row.finish is not None]
        for row in done:
            self._waiting.remove(row)
        done += self._live.remove_finished()
        for row in done:
            row.finished_at_s = now_s()
        return done

    def _end_overdue(self) -> None:
        now = now_s()
        for row in (*self._waiting, *self._live.rows):
            if row.deadline_s is not None and row.deadline_s < now and row.finish is None:
                row.finish = Finish(reason=FinishReason.TIMEOUT)
