"""An engine that computes nothing, and a worker around it: what is left is the queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import cast

import redis

from headrace.shared.connection import connect
from headrace.shared.schema import FinishReason, Message
from headrace.worker.batch_worker import BatchWorker
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.rows import Row, now_s
from headrace.worker.engine.stopping import Finish
from headrace.worker.runner import Runner
from headrace.worker.settings import QueueSettings

_MAX_CONTEXT = 1 << 20
_TOKEN_ID = 97
_VOCAB = 256


class IdleEngine:
    """Has what a BatchWorker asks of an Engine. Its steps take `step_s` and give each row a token, or, with 0, all."""

    def __init__(self, num_slots: int, step_s: float) -> None:
        self.num_slots = num_slots
        self._step_s = step_s
        self._waiting: deque[Row] = deque()
        self._live: list[Row] = []

    @property
    def num_rows(self) -> int:
        return len(self._waiting) + len(self._live)

    def submit(self, row: Row) -> None:
        self._waiting.append(row)

    def end(self, row_id: str, reason: FinishReason) -> bool:
        for row in (*self._waiting, *self._live):
            if row.row_id == row_id and row.finish is None:
                row.finish = Finish(reason=reason)
                return True
        return False

    def drop(self, row_id: str) -> None:
        self._waiting = deque(row for row in self._waiting if row.row_id != row_id)
        self._live = [row for row in self._live if row.row_id != row_id]

    def drop_waiting(self) -> list[Row]:
        rows = list(self._waiting)
        self._waiting.clear()
        return rows

    def drop_all(self) -> list[Row]:
        rows, self._live = self._live, []
        return rows + self.drop_waiting()

    def step(self) -> list[Row]:
        """Fill the free slots, let the step's time pass, and return the rows that are done."""
        while self._waiting and len(self._live) < self.num_slots:
            row = self._waiting.popleft()
            row.admitted_at_s = row.first_token_at_s = now_s()
            self._live.append(row)
        if self._step_s:
            time.sleep(self._step_s)
        for row in self._live:
            self._advance(row)
        done = [row for row in self._live if row.finish is not None]
        self._live = [row for row in self._live if row.finish is None]
        return done

    def _advance(self, row: Row) -> None:
        if row.finish is None:
            missing = row.stopping.max_tokens - len(row.token_ids)
            row.token_ids += [_TOKEN_ID] * (1 if self._step_s else missing)
            if len(row.token_ids) >= row.stopping.max_tokens:
                row.finish = Finish(reason=FinishReason.LENGTH)
        if row.finish is not None:
            row.finished_at_s = now_s()


class _ByteCodec:
    """Text as bytes."""

    eos_token_ids: frozenset[int] = frozenset()
    vocab_size = _VOCAB

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return [byte for message in messages for byte in message.text().encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    def stream(self) -> _ByteCodec:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id)


def serve_idly(redis_url: str, queue: str, *, num_slots: int, step_s: float) -> None:
    """Run such a worker until it is told to stop."""
    connection: redis.Redis = connect(redis_url)
    runner = Runner(_ByteCodec(), model_name=queue, max_context=_MAX_CONTEXT)
    engine = cast(Engine, IdleEngine(num_slots, step_s))
    with connection:
        worker = BatchWorker(connection, engine, runner, QueueSettings(queue=queue))
        worker.install_signal_handlers()
        worker.run()
