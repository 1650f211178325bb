"""A BatchWorker in a thread of the test, on an engine whose model has no weights: fast, and every text is predictable.

Tokens are bytes. The fake model continues each prompt with its last byte plus one, plus one, … so that "a" gives
"bcd…". Its steps can be held up, so that a test decides how far a job has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import torch
from torch import Tensor

from headrace.producer import Producer
from headrace.shared.schema import Message
from headrace.worker.batch_worker import BatchWorker
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.runner import Runner
from headrace.worker.settings import QueueSettings

MODEL = "fake"
QUEUE = "headrace-fake"
VOCAB = 257
EOS = 256
DEADLINE_S = 20.0


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The condition's value once it is true. Fails the test at the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:g} s in vain for: {what}"
        time.sleep(0.005)
    return value


class SuccessorModel:
    """The next token is the last one plus one. `gate` is passed at every pass; clear it to hold the engine up.

    After `hold_after` passes it is cleared by itself.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = 0  # passes, also the one that is held up
        self.rows_of_steps: list[int] = []  # those that got a token
        self.hold_after: int | None = None
        self.fail_with: Exception | None = None
        self.before_pass: Callable[[list[int]], None] = lambda last_ids: None  # told what each row feeds in

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        self.num_begun += 1
        assert self.gate.wait(DEADLINE_S)
        self.rows_of_steps.append(len(tokens.last))
        if len(self.rows_of_steps) == self.hold_after:
            self.gate.clear()
        if self.fail_with is not None:
            raise self.fail_with
        last_ids = tokens.token_ids[tokens.last]
        self.before_pass(last_ids.tolist())
        return torch.nn.functional.one_hot((last_ids + 1) % 256, VOCAB).float() * 50


class ByteCodec:
    """Text as its UTF-8 bytes."""

    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return list("\n".join(message.text() for message in messages).encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode(errors="ignore")

    def stream(self) -> ByteCodec:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id)


def batch_worker(
    connection: redis.Redis, model: SuccessorModel, *, slots: int = 4, max_context: int = 64, **settings: Any
) -> BatchWorker:
    """A worker on the fake model."""
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        max_positions=max_context,
        norm_eps=1e-5,
        rope_theta=1e4,
    )
    cache = KVCache(config, num_slots=slots, max_context=max_context, dtype=torch.float32, device=torch.device("cpu"))
    runner = Runner(ByteCodec(), model_name=MODEL, max_context=max_context)
    settings = {"lease_s": 2.0, "drain_timeout_s": DEADLINE_S, **settings}
    return BatchWorker(connection, Engine(model, cache), runner, QueueSettings(**settings))


class WorkerThread:
    """One running worker."""

    def __init__(
        self,
        connection: redis.Redis,
        *,
        slots: int = 4,
        max_context: int = 64,
        model: SuccessorModel | None = None,
        **settings: Any,
    ) -> None:
        self.model = model or SuccessorModel()
        self.worker = batch_worker(connection, self.model, slots=slots, max_context=max_context, **settings)
        self._connection = connection
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait for the worker's end; raise what it raised."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the worker did not stop"
        if self.error is not None:
            raise self.error

    def pretend_to_die(self) -> None:
        """As good as killed while a step is held up: it renews nothing, and its rows stand still."""
        self.worker._keeper.leave()
        self._connection.delete(self.worker._lease.key)


@contextmanager
def running_worker(connection: redis.Redis, **settings: Any) -> Iterator[WorkerThread]:
    """A worker that is stopped at the end of the block; it takes what WorkerThread does."""
    running = WorkerThread(connection, **settings)
    try:
        yield running
    finally:
        running.model.gate.set()
        running.worker.ask_to_stop()
        running.join()


def producer_for(connection: redis.Redis) -> Producer:
    """A producer for the fake model's queue."""
    return Producer(connection=connection, model=MODEL)


def successors(prompt: str, count: int) -> str:
    """The text that the fake model gives."""
    last = prompt.encode()[-1]
    return bytes((last + 1 + i) % 256 for i in range(count)).decode(errors="ignore")
