"""From lines of bytes to checked requests, in each of the formats; and the first pass over an input."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from headrace.producer.duplicates import MAX_NAMED, IdIndex, duplicate_text, raise_duplicates
from headrace.producer.files import MAX_LINE_BYTES, RawLine, raw_lines
from headrace.producer.lines import Chat, Defaults, Line, bad_line, line_from_file
from headrace.producer.openai_batch import CHAT_URL, COMPLETIONS_URL, parse_openai_line
from headrace.shared.errors import InputError

AUTO = "auto"


class Format(StrEnum):
    """What an input's lines are. All lines of an OpenAI Batch file have one url, as they must have there."""

    JSONL = "jsonl"
    TEXT = "text"
    OPENAI_CHAT = "openai"
    OPENAI_COMPLETIONS = "openai-completions"


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the first pass found: the requests, how many of them are malformed and why the first is."""

    count: int
    bad: int
    format: Format
    first_error: str | None
    chat: Chat | None = None

    @property
    def source(self) -> str:
        """What a batch's hash records, for whoever writes its results."""
        return self.format.value if self.format.value.startswith("openai") else "requests"


def preflight(path: str, format: str = AUTO, defaults: Defaults | None = None, chat: Chat | None = None) -> Preflight:
    """Read a whole input and check every line of it. `format`: auto, jsonl, text or openai.

    Raises InputError if it can't be read, holds no request or can't be made a chat, DuplicateIds if an id stands twice.
    """
    found = detect_format(path, format)
    if chat is not None and found not in (Format.TEXT, Format.JSONL):
        raise InputError(f"{path} has OpenAI Batch lines, whose url says whether they are a chat; leave --chat out")
    count, bad, first_error = 0, 0, None
    duplicates: list[str] = []
    with IdIndex() as index:
        for line in read_lines(path, found, defaults or {}, chat):
            count += 1
            if line.error is not None:
                bad += 1
                first_error = first_error or str(line.error)
            earlier = index.add(line.id, line.number)
            if earlier is not None and len(duplicates) <= MAX_NAMED:
                duplicates.append(duplicate_text(line.id, earlier, line.number, "line"))
    raise_duplicates(duplicates)
    if count == 0:
        raise InputError(f"{path} holds no request: it is empty, or all its lines are blank")
    return Preflight(count=count, bad=bad, format=found, first_error=first_error, chat=chat)


def detect_format(path: str, format: str = AUTO) -> Format:
    """The format as asked for, or the one that the first line speaks for. Raises InputError if it can't be read."""
    if format in (Format.JSONL, Format.TEXT):
        return Format(format)
    with contextlib.closing(raw_lines(path)) as lines:
        first = next(lines, None)
    data = first.data if first is not None and first.data is not None else b""
    if format == AUTO and not data.lstrip().startswith(b"{"):
        return Format.TEXT
    try:
        body = _decode(data)
    except ValueError:
        body = None
    line = body if isinstance(body, Mapping) else {}
    if format == AUTO and not ("custom_id" in line and ("body" in line or "url" in line)):
        return Format.JSONL
    return Format.OPENAI_COMPLETIONS if line.get("url") == COMPLETIONS_URL else Format.OPENAI_CHAT


def read_lines(path: str, format: Format, defaults: Defaults, chat: Chat | None = None) -> Iterator[Line]:
    """Each line, checked; a malformed one carries its error and the rest go on. Raises InputError.

    `chat` is for text and JSON Lines.
    """
    parse = _parser(format, chat)
    for raw in raw_lines(path):
        yield parse(raw.data, raw.number, defaults) if raw.data is not None else _too_long(raw)


def _parse_json(chat: Chat | None, data: bytes, number: int, defaults: Defaults) -> Line:
    try:
        body = _decode(data)
    except ValueError as error:
        return bad_line(number, str(error))
    return line_from_file(body, number, defaults, chat)


def _parse_openai(url: str, data: bytes, number: int, defaults: Defaults) -> Line:
    try:
        body = _decode(data)
    except ValueError as error:
        return bad_line(number, str(error))
    return parse_openai_line(body, number, defaults, url)


def _parse_text(chat: Chat | None, data: bytes, number: int, defaults: Defaults) -> Line:
    try:
        prompt = data.decode()
    except UnicodeDecodeError as error:
        return bad_line(number, _not_utf8(error))
    return line_from_file({"prompt": prompt}, number, defaults, chat)


def _parser(format: Format, chat: Chat | None) -> Callable[[bytes, int, Defaults], Line]:
    match format:
        case Format.JSONL:
            return partial(_parse_json, chat)
        case Format.TEXT:
            return partial(_parse_text, chat)
        case Format.OPENAI_CHAT:
            return partial(_parse_openai, CHAT_URL)
        case Format.OPENAI_COMPLETIONS:
            return partial(_parse_openai, COMPLETIONS_URL)


def _decode(data: bytes) -> object:
    """A line's JSON. Raises ValueError with a text for the reader."""
    try:
        value: object = json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        raise ValueError(_TOO_MANY_DIGITS if "digits" in str(error) else str(error)) from None
    return value


_TOO_MANY_DIGITS = f"not JSON that can be read: a whole number of over {sys.get_int_max_str_digits():,} digits"


def _refuse_constant(name: str) -> object:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"


def _too_long(raw: RawLine) -> Line:
    return bad_line(raw.number, f"longer than {MAX_LINE_BYTES:,} bytes, the most that a line may have")
