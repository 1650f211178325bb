"""When a row is done. `finish_of` is the only place that decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.shared.schema import FinishReason

PushToken = Callable[[int], str]
"""Takes a row's next token id and returns the text that it completes, '' while a character is incomplete."""


@dataclass(frozen=True, kw_only=True)
class StopParams:
    """What ends a row. `max_tokens` is already within the context; ids count only after `min_tokens`."""

    max_tokens: int
    min_tokens: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    @property
    def suppressed_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled before `min_tokens`."""
        return (self.eos_ids | self.stop_ids) if self.min_tokens else frozenset()


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Why a row is done. `reason` with `stopped_by` the stop string or stop token id, if it was one."""

    reason: FinishReason
    stopped_by: str | int | None = None


class StopStrings:
    """Watches a row's text for its stop strings, also across the borders of tokens."""

    def __init__(self, strings: tuple[str, ...], push: PushToken, min_tokens: int) -> None:
        self._strings = strings
        self._reach = max(map(len, strings)) - 1  # how far back a string that ends in new text may begin
        self._push = push
        self._tokens_to_skip = min_tokens
        self._searched_from = 0  # text of the first min_tokens tokens is not searched
        self.text = ""

    def match(self, token_id: int) -> str | None:
        """Take the next token; at the first stop string, cut the text before it and return the string."""
        known = len(self.text)
        self.text += self._push(token_id)
        if self._tokens_to_skip > 0:
            self._tokens_to_skip -= 1
            self._searched_from = len(self.text)
            return None
        start = max(self._searched_from, known - self._reach)
        found = [(at, string) for string in self._strings if (at := self.text.find(string, start)) >= 0]
        if not found:
            return None
        at, string = min(found)
        self.text = self.text[:at]
        return string


def finish_of(params: StopParams, num_tokens: int, token_id: int, strings: StopStrings | None) -> Finish | None:
    """Judge a row that has just got `token_id` as its `num_tokens`-th token. Asked once a token."""
    if num_tokens > params.min_tokens or params.min_tokens == 0:
        if token_id in params.eos_ids:
            return Finish(reason=FinishReason.STOP)
        if token_id in params.stop_ids:
            return Finish(reason=FinishReason.STOP, stopped_by=token_id)
    if strings is not None and (string := strings.match(token_id)) is not None:
        return Finish(reason=FinishReason.STOP, stopped_by=string)
    if num_tokens >= params.max_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
