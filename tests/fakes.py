"""Stand-ins that behave: models without weights, a codec of bytes, a clock that stands still."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.shared.errors import InvalidRequest
from headrace.shared.schema import Message
from headrace.worker.engine.kv_cache import KVCache

VOCAB = 61
EOS = 256


def next_token(history: Sequence[int]) -> int:
    """What HistoryModel says next: a function of all that the row has, so that any mix-up of rows shows."""
    return zlib.crc32(",".join(map(str, history)).encode()) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that HistoryModel gives a prompt."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class HistoryModel:
    """Keeps each row's tokens in its slot of the cache and continues what it finds there.

    A token of `poison` makes the row's logits NaN, and its slot too. `fail_at` is asked before each pass, by its
    name, and may raise.
    """

    def __init__(self, *, poison: Sequence[int] = (), fail_at: Callable[[str], None] | None = None) -> None:
        self._poison = set(poison)
        self._fail_at = fail_at or (lambda name: None)
        self.decoded: list[int] = []  # rows of each decode step
        self.prefilled: list[tuple[int, int]] = []  # rows and padded length of each prefill

    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, first_slot: int) -> Tensor:
        self._fail_at("prefill")
        rows, padded = token_ids.shape
        self.prefilled.append((rows, padded))
        cache.values[0, first_slot : first_slot + rows, 0, :padded, 0] = token_ids.float()
        return torch.stack([self._next(cache, first_slot + row, int(lengths[row])) for row in range(rows)])

    def decode_step(self, token_ids: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        self._fail_at("decode")
        rows = len(token_ids)
        self.decoded.append(rows)
        assert int(positions.max()) + 1 == longest
        cache.values[0, torch.arange(rows), 0, positions, 0] = token_ids.float()
        return torch.stack([self._next(cache, row, int(positions[row]) + 1) for row in range(rows)])

    def _next(self, cache: KVCache, slot: int, length: int) -> Tensor:
        read = cache.values[0, slot, 0, :, 0]
        if read.isnan().any():  # as in attention, also beyond the row's end
            return torch.full((VOCAB,), torch.nan)
        history = read[:length].long().tolist()
        if self._poison & set(history):
            cache.values[0, slot] = torch.nan
            return torch.full((VOCAB,), torch.nan)
        # The likeliest is next_token; the rest, for rows that sample, follows from the history as well.
        generator = torch.Generator().manual_seed(next_token([*history, 0]))
        logits = torch.rand(VOCAB, generator=generator) * 3
        logits[next_token(history)] = 4.0
        return logits


class ConstantModel:
    """Gives every row the same logits at every step."""

    def __init__(self, logits: Sequence[float]) -> None:
        self._logits = torch.tensor(logits)

    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KVCache, first_slot: int) -> Tensor:
        return self._logits.repeat(len(token_ids), 1)

    def decode_step(self, token_ids: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        return self._logits.repeat(len(token_ids), 1)


class FakeClock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class ByteStream:
    """Text of UTF-8 bytes that arrive one by one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < EOS else ""


class ByteCodec:
    """Tokens are the bytes of the text, and EOS; a chat begins with an EOS too. "refuse" is a chat that it refuses."""

    eos_token_ids = frozenset({EOS})
    vocab_size = EOS + 1

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.removeprefix("\0").encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        text = "\n".join(message.text() for message in messages)
        if text == "refuse":
            raise InvalidRequest("the template refuses", "messages")
        return [EOS, *text.encode()] if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        stream = self.stream()
        return "".join(stream.push(token_id) for token_id in token_ids)

    def stream(self) -> ByteStream:
        return ByteStream()
