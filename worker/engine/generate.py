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
from headrace.worker.engine.packing import PackedTokens, pack
from headrace.worker.engine.prefixes import PrefixIndex
from headrace.worker.engine.rows import LiveRows, Row, now_s, suppress_early_stops
from headrace.worker.engine.sampling import BatchSampling, sample
from headrace.worker.engine.scheduler import MAX_PROMPT_TOKENS, share_out
from headrace.worker.engine.stopping import Finish, finish_of

MAX_OVERTAKEN = 7


class Model(Protocol):
    """What the loop needs of a model; `Decoder` is one."""

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        """Store the tokens in the cache; the logits that follow the `last` ones: (B, V)."""


@dataclass
class StepCounts:
    """What the engine has done since it started. A row-step is one row's share of one step."""

    steps: int = 0
    row_steps: int = 0  # tokens generated
    prompt_tokens: int = 0  # computed, those of interrupted rows' answers too
    reused_tokens: int = 0  # of prompts, copied from other rows


class Engine:
    """A batch that runs for as long as there are rows. Not thread-safe: one thread submits, steps and cancels."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._waiting: deque[Row] = deque()
        self._live = LiveRows(cache.num_slots)
        self._prefixes = PrefixIndex()
        self._done: list[Row] = []  # out of the batch; the step that took them out returns them
        self._sampling_of: tuple[list[Row], BatchSampling] = ([], BatchSampling([], cache.device))
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
        """Queue a row; it is admitted when a slot is free. It must leave a position to generate in.

        It goes before waiting rows of a higher rank, but each is overtaken MAX_OVERTAKEN times at most.

        A row that has tokens already goes on behind them, as if it had never been interrupted, to the bit.
        """
        assert row.prompt_ids
        assert row.length < self.max_context
        at = len(self._waiting)
        while at and self._waiting[at - 1].rank > row.rank and self._waiting[at - 1].num_overtaken < MAX_OVERTAKEN:
            at -= 1
            self._waiting[at].num_overtaken += 1
        self._waiting.insert(at, row)

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
        slots = [row.slot for row in self._live.rows]
        rows = [*self._done, *self._take_out(lambda row: True)]
        self._done = []
        for slot in slots:  # who knows what a failed step has left there
            self._wipe(slot)
        return rows

    def step(self) -> list[Row]:
        """Admit newcomers, advance every live row, and return the rows that are done.

        If the model raises, every row is still here, those that are done too: `drop_all` returns them.
        """
        self._end_overdue()
        self._leave()
        self._admit()
        if self._live.rows:
            self._advance()
            self._leave()
        done, self._done = self._done, []
        return done

    def _advance(self) -> None:
        """One pass through the model: a token for each row whose prompt is complete, and a part of the others'."""
        shares = share_out(self._live.rows, MAX_PROMPT_TOKENS)
        tokens = pack(shares, self._cache.device)
        logits = self._model.forward(tokens, self._cache)
        for row, count in shares:
            self.counts.prompt_tokens += 0 if row.first_token_at_s else count
            row.num_cached += count
        complete = [row for row, _ in shares if row.num_pending == 0]
        self.counts.steps += 1
        self.counts.row_steps += len(complete)
        if complete:
            self._accept(complete, logits)

    def _admit(self) -> None:
        """Give free slots to waiting rows, in order, as long as this pass has room for their prompts."""
        room = MAX_PROMPT_TOKENS - sum(row.num_pending for row in self._live.rows if row.num_pending > 1)
        while self._waiting and self._live.num_free and room > 0:
            row = self._waiting[0]
            shared = self._prefixes.find(row.prompt_ids)
            if shared is not None and not shared.is_ready:
                break  # the next pass can copy what this one computes
            self._live.add(self._waiting.popleft())
            row.admitted_at_s = now_s()
            row.num_cached = row.num_reused = 0
            if shared is not None:
                self._cache.copy_prefix(shared.slot, row.slot, shared.length)
                row.num_cached = row.num_reused = shared.length
                self.counts.reused_tokens += shared.length
            self._prefixes.put(row)
            room -= row.num_pending

    def _accept(self, rows: list[Row], logits: Tensor) -> None:
        """Sample one token a row, append it, and mark the rows that are done with it."""
        logits = suppress_early_stops(logits, rows)
        positions = torch.tensor([row.length for row in rows], device=self._cache.device)
        token_ids, failed = sample(logits, self._sampling(rows), positions)
        chosen = torch.stack((token_ids, failed.long())).tolist()  # the step's one host synchronisation
        now = now_s()
        for row, token_id, has_failed in zip(rows, *chosen, strict=True):
            row.first_token_at_s = row.first_token_at_s or now
            if has_failed:
                row.finish = Finish(reason=FinishReason.ERROR)
                row.error = "the model gave no finite logits for this row"
                continue
            row.token_ids.append(token_id)
            row.finish = finish_of(row.stopping, len(row.token_ids), token_id, row.strings)

    def _sampling(self, rows: list[Row]) -> BatchSampling:
        """The rows' sampling parameters, built anew only when other rows sample than before."""
        if rows != self._sampling_of[0]:
            self._sampling_of = (rows, BatchSampling([row.sampling for row in rows], self._cache.device))
        return self._sampling_of[1]

    def _leave(self) -> None:
        """Take out the rows that are done."""
        done = self._take_out(lambda row: row.finish is not None)
        for row in done:
            row.finished_at_s = now_s()
        self._done += done

    def _wipe(self, slot: int) -> None:
        self._prefixes.forget(slot)
        self._cache.clear(slot)

    def _take_out(self, leaves: Callable[[Row], bool]) -> list[Row]:
        """Take rows out of the live and the waiting ones, and return them.

        NaN may lie in the slots of those that failed, and of those that no logits have been asked of.
        """
        for row in self._live.rows:
            if leaves(row) and (row.error is not None or row.num_pending > 1):
                self._wipe(row.slot)
        out = [row for row in self._waiting if leaves(row)]
        for row in out:
            self._waiting.remove(row)
        return out + self._live.take_out(leaves)

    def _end_overdue(self) -> None:
        now = now_s()
        for row in (*self._waiting, *self._live.rows):
            if row.deadline_s is not None and row.deadline_s < now and row.finish is None:
                row.finish = Finish(reason=FinishReason.TIMEOUT)
