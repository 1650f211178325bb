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
from headrace.worker.engine.packing import PackedTokens

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
    """Keeps each token in its row's slot of the cache, at its position, and continues what it finds there.

    So a row goes wrong if a part of its prompt, of a copied beginning or of what it was resumed with is missing or
    misplaced. From a token of `poison` on, the row's slot is NaN, and so are its logits. `fail_at` is asked before each
    pass, by its number from one, and may raise; what the pass had to store is then NaN.
    """

    def __init__(self, *, poison: Sequence[int] = (), fail_at: Callable[[int], None] | None = None) -> None:
        self._poison = set(poison)
        self._fail_at = fail_at or (lambda number: None)
        self.passes: list[tuple[int, int]] = []  # tokens of each pass, and rows that got one

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        self.passes.append((len(tokens.token_ids), len(tokens.last)))
        assert tokens.longest == int(tokens.positions.max()) + 1
        stored = cache.values[0, :, 0, :, 0]  # (slots, S)
        try:
            self._fail_at(len(self.passes))
        except RuntimeError:
            stored[tokens.slots, tokens.positions] = torch.nan
            raise
        stored[tokens.slots, tokens.positions] = tokens.token_ids.float()
        places = list(zip(tokens.token_ids.tolist(), tokens.slots.tolist(), tokens.positions.tolist(), strict=True))
        for token_id, slot, position in places:
            if token_id in self._poison:
                stored[slot, position:] = torch.nan
        wanted = [self._next(stored[slot], position + 1) for _, slot, position in (places[i] for i in tokens.last)]
        return torch.stack(wanted) if wanted else torch.empty(0, VOCAB)

    def _next(self, stored: Tensor, length: int) -> Tensor:
        if stored.isnan().any():  # as in attention, also beyond the row's end
            return torch.full((VOCAB,), torch.nan)
        history = stored[:length].long().tolist()
        # The likeliest is next_token; the rest, for rows that sample, follows from the history as well.
        generator = torch.Generator().manual_seed(next_token([*history, 0]))
        logits = torch.rand(VOCAB, generator=generator) * 3
        logits[next_token(history)] = 4.0
        return logits


class ConstantModel:
    """Gives every row the same logits at every step."""

    def __init__(self, logits: Sequence[float]) -> None:
        self._logits = torch.tensor(logits)

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        return self._logits.repeat(len(tokens.last), 1)


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
