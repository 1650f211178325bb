"""The only bridge between text and token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.shared.errors import InvalidRequest, ModelError
from headrace.shared.schema import Message
from headrace.worker.models.control_tokens import ControlTokens
from headrace.worker.models.detokenize import Detokenizer, TextStream

MAX_CHAT_CHARACTERS = 16 * 2**20


class TextCodec:
    """Encodes prompts and chats, decodes token ids. Safe to share between threads, except that a stream has one."""

    def __init__(self, reference: Any, eos_token_ids: frozenset[int]) -> None:
        """`reference` is a tokenizer of transformers; it renders chats, and its backend does the rest."""
        self._reference = reference
        self._tokenizer: Tokenizer = reference.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._detokenizer = Detokenizer(self._tokenizer)
        self._control = ControlTokens(self._tokenizer, str(reference.chat_template or ""))
        self.eos_token_ids = eos_token_ids
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """The tokenizer of a model's folder. Runs no code from there, and makes no network access.

        Raises ModelError if there is none, or none that can be used.
        """
        from transformers import AutoTokenizer

        try:
            reference = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # The library lets through whatever its parts raise for a malformed file.
        except Exception as error:
            raise ModelError(f"can't load the tokenizer in {folder}: {_first_line(error)}") from error
        if not isinstance(getattr(reference, "backend_tokenizer", None), Tokenizer):
            raise ModelError(f"the tokenizer in {folder} is of a kind that is not supported: it has no tokenizer.json")
        return cls(reference, _eos_token_ids(folder, reference.eos_token_id))

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain prompt, with BOS and the like where the tokenizer adds them.

        A prompt is all that the model sees, so what looks like a control token is one, as a program needs that
        writes a chat's form itself. What others wrote belongs into a message.
        """
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, up to where the assistant is to speak. Control tokens come from the template alone: in
        a message, their names are text.

        Raises InvalidRequest if the model has no chat template, if the template refuses the messages, or if these
        or what it makes of them are over MAX_CHAT_CHARACTERS.
        """
        chat = [_for_template(message) for message in messages]
        if not any(self._control.are_named_in(text) for message in chat for text in message.values()):
            return list(self._tokenizer.encode(self._render(chat), add_special_tokens=False).ids)
        covered = [{field: self._control.cover(text) for field, text in message.items()} for message in chat]
        return self._control.encode_covered(self._render(covered))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens; an incomplete character at the end is left out."""
        stream = self.stream()
        return "".join([stream.push(token_id) for token_id in token_ids])

    def stream(self) -> TextStream:
        """A stream for a new text. All that it returns, joined, equals `decode` of all that was pushed."""
        return self._detokenizer.stream()

    def _render(self, chat: Sequence[dict[str, str]]) -> str:
        if not self._reference.chat_template:
            raise InvalidRequest("this model has no chat template; send a prompt instead", "messages")
        _check_length(sum(len(text) for message in chat for text in message.values()))
        try:
            rendered = self._reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        # A template is a program of the model's, run in a sandbox; it can raise anything.
        except Exception as error:
            reason = _first_line(error)
            raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", "messages") from error
        _check_length(len(rendered))
        return str(rendered)


def _for_template(message: Message) -> dict[str, str]:
    described = {"role": message.role, "content": message.text()}
    return described if message.name is None else described | {"name": message.name}


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_CHAT_CHARACTERS:
        raise InvalidRequest(
            f"the messages have {num_characters:,} characters; at most {MAX_CHAT_CHARACTERS:,} are allowed", "messages"
        )


def _eos_token_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """All tokens that end a text, by the model's configuration, its settings for generation, and its tokenizer."""
    found = set() if of_tokenizer is None else {of_tokenizer}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found |= _listed_eos(folder / name)
    return frozenset(found)


def _listed_eos(path: Path) -> set[int]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in listed):
        raise ModelError(f"{path}: eos_token_id should be a token id or a list of these, not {value!r}")
    return set(listed)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
