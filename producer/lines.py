"""An input's item, checked: a request, or why it is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.shared.errors import InvalidRequest
from headrace.shared.schema import Request, parse_request

Defaults = Mapping[str, Any]
MAX_ID_CHARS = 512
MAX_MESSAGE_CHARS = 2_000


@dataclass(frozen=True, kw_only=True)
class Line:
    """One item of an input, with the id that its result will have: exactly one of `request` and `error` is set."""

    number: int
    id: str
    request: Request | None = None
    error: InvalidRequest | None = None


@dataclass(frozen=True)
class Chat:
    """How prompts become messages: as a user's, behind the system's if there is one."""

    system: str | None = None

    def applied_to(self, body: object) -> object:
        """A line that has a prompt, with messages in its place; any other as it is. Raises InvalidRequest."""
        if not isinstance(body, Mapping) or "prompt" not in body or "messages" in body:
            return body
        if not isinstance(body["prompt"], str):
            raise InvalidRequest("with --chat a prompt is text; token ids can't be put into a message", "prompt")
        messages = [{"role": "user", "content": body["prompt"]}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {name: value for name, value in body.items() if name != "prompt"} | {"messages": messages}


def line_from_file(body: object, number: int, defaults: Defaults, chat: Chat | None = None) -> Line:
    """Check a decoded line of a file, with its prompt made a chat if that is asked for; lines count from 1."""
    if chat is not None:
        try:
            body = chat.applied_to(body)
        except InvalidRequest as error:
            return bad_line(number, str(error), line_id=explicit_id(body), param=error.param)
    return _checked(body, number, explicit_id(body) or f"line-{number}", f"line {number}: ", defaults)


def bad_line(number: int, message: str, *, line_id: str | None = None, param: str | None = None) -> Line:
    """A line of a file that holds no request."""
    return Line(number=number, id=line_id or f"line-{number}", error=_error(f"line {number}: {message}", param))


def line_from_item(item: object, position: int, defaults: Defaults) -> Line:
    """Check an item that a program submits: a prompt, a mapping, a Request. Its id is its own or its position."""
    if isinstance(item, Line):
        return item
    item_id = explicit_id(item) or str(position)
    if isinstance(item, Request):
        if not defaults:
            return Line(number=position, id=item_id, request=item.model_copy(update={"id": item_id}))
        item = item.model_dump(mode="json", exclude_unset=True)
    elif isinstance(item, str):
        item = {"prompt": item}
    return _checked(item, position, item_id, "", defaults)


def explicit_id(item: object) -> str | None:
    """The id that an item brings along, if it is one that can be used."""
    if isinstance(item, Line | Request):
        return item.id
    value = item.get("id") if isinstance(item, Mapping) else None
    return value if isinstance(value, str) and _is_usable_id(value) else None


def _is_usable_id(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no result could carry
        return False
    return 0 < len(value) <= MAX_ID_CHARS


def check_defaults(defaults: Defaults) -> dict[str, Any]:
    """The defaults without those that are None. Raises InvalidRequest for a field or value that no request may have."""
    given = {name: value for name, value in defaults.items() if value is not None}
    for name in ("id", "prompt", "messages"):
        if name in given:
            raise InvalidRequest(f"{name} belongs to each request; it can't be a default", name)
    parse_request({"prompt": "any", **given})
    return given


def _checked(body: object, number: int, line_id: str, label: str, defaults: Defaults) -> Line:
    try:
        if isinstance(body, Mapping):
            merged = {**defaults, **body}
            if merged.get("id") is None:
                merged["id"] = line_id
            body = merged
        return Line(number=number, id=line_id, request=parse_request(body))
    except InvalidRequest as error:
        return Line(number=number, id=line_id, error=_error(f"{label}{error}", error.param))


def _error(message: str, param: str | None) -> InvalidRequest:
    """An error whose texts, which may quote a hostile input, can be stored and shown."""
    return InvalidRequest(_showable(message), None if param is None else _showable(param[:200]))


def _showable(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
