"""Token ids to text, one at a time, exactly: what the pieces add up to is what decoding them at once gives.

The two kinds of vocabulary in use turn each token into a fixed run of bytes, so text is a matter of concatenating
these and of holding back a character of which some bytes are missing. Any other kind is decoded through the
tokenizer again and again over a short window.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN_LENGTH = len("<0x00>")


class TextStream(Protocol):
    """The text of one growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete, and for special tokens."""
        ...


class Detokenizer:
    """Makes the streams of one tokenizer. Safe to share between threads; a stream belongs to one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = _decoder_steps(tokenizer)
        self._to_bytes = _bytes_of_piece(steps)
        self._drops_first_space = any(step["type"] == "Strip" for step in steps)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._bytes_of: dict[int, bytes] = {}

    def stream(self) -> TextStream:
        """A new stream, at the start of a text."""
        if self._to_bytes is None:
            return _WindowStream(self._tokenizer)
        return _ByteStream(self.bytes_of, self._drops_first_space)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for special tokens and for ids that no token has."""
        known = self._bytes_of.get(token_id)
        if known is None:
            assert self._to_bytes is not None
            piece = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
            known = self._bytes_of[token_id] = b"" if piece is None else self._to_bytes(piece)
        return known


class _ByteStream:
    """For vocabularies whose tokens are bytes. Broken UTF-8 becomes U+FFFD as soon as it is known to be broken."""

    def __init__(self, bytes_of: Callable[[int], bytes], drops_first_space: bool) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = drops_first_space

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._bytes_of(token_id))
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


class _WindowStream:
    """For any other decoder: decode the last tokens with and without the new ones, and take the difference."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_told = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        told = self._tokenizer.decode(self._window[: self._num_told])
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(told):
            return ""
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        return text[len(told) :]


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as its steps; empty if it has none."""
    if tokenizer.decoder is None:
        return []
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    return steps


def _bytes_of_piece(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """How a token's spelling becomes bytes, if the decoder is one of the two kinds of which that is known."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _replaces_spaces(steps[0]) and _strips_space(steps[3:]):
        return _sentencepiece
    return None


def _replaces_spaces(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": "▁"} and step.get("content") == " "


def _strips_space(rest: list[dict[str, Any]]) -> bool:
    return rest in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}])


def _alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level(piece: str) -> bytes:
    """A token with any character outside the alphabet is one that was added, and is spelled as plain text."""
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == _BYTE_TOKEN_LENGTH and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode()
