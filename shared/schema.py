"""The wire types: what a request may say and what a result says. Everything else is derived from these."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from headrace.shared.errors import InvalidRequest
from headrace.shared.lanes import DEFAULT_PRIORITY, TENANT_PATTERN, Priority

DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 64
# Readers of JSON give up at some depth, the strictest of ours at 200: what is accepted must be readable in a result.
MAX_DEPTH = 64
_INT64_MAX = 2**63 - 1
_MAX_UNIX_TIME = 253_402_300_799.0  # the end of the year 9999: whoever sends milliseconds is told so


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the context's end
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"  # the row itself failed, for example on non-finite logits


class ErrorCode(StrEnum):
    """Stable codes of `Result.error`."""

    INVALID_REQUEST = "invalid_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    MODEL_MISMATCH = "model_mismatch"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL_ERROR = "internal_error"


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Input(_Wire):
    """What others write. Its faults are few, however long the input: each costs memory, and a line of the error."""

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: object) -> object:
        if isinstance(value, Mapping) and len(value) > 2 * len(cls.model_fields):
            unknown = reprlib.repr(next(name for name in value if name not in cls.model_fields))
            raise ValueError(f"has {len(value):,} fields, of which {unknown} and others are unknown")
        return value


class TextPart(_Input):
    """One part of a message's content, as OpenAI's clients send it. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Input):
    """One chat message. `content` is text or a list of text parts."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def text(self) -> str:
        """The content as one string; parts are joined by newlines."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


def _as_list(value: object) -> object:
    """A single stop string or id may be written without its list."""
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


def _off_is_zero(value: object) -> object:
    """Other APIs write -1 for "no top_k"."""
    return 0 if value == -1 and not isinstance(value, bool) else value


def _within_depth(value: object) -> object:
    """Refuses what is nested more than MAX_DEPTH deep."""
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [item for outer in layer if isinstance(outer, dict | list) for item in _items(outer)]
        if not layer:
            return value
    raise ValueError(f"is nested more than {MAX_DEPTH} deep")


def _items(outer: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(outer.values()) if isinstance(outer, dict) else outer


JsonObject = Annotated[dict[str, JsonValue], BeforeValidator(_within_depth)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1)]


class Request(_Input):
    """One generation request. The names are those of the OpenAI and vLLM APIs.

    `seed` fixes the randomness; without it the job's id does, so that a job that is run again gives the same
    text. `timeout` is in seconds from when a worker starts the job, `expires_at` in Unix seconds; what has not finished
    by the earlier of them ends there with what text it has. `priority` and `tenant` choose the lane in which it waits.

    The fields from `repetition_penalty` on are part of the contract but only their neutral values are
    accepted by this version.
    """

    id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    prompt: str | Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    model: str | None = None
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1, le=_INT64_MAX)
    min_tokens: int = Field(0, ge=0, le=_INT64_MAX)
    temperature: float = Field(1.0, ge=0.0)
    top_k: Annotated[int, BeforeValidator(_off_is_zero)] = Field(0, ge=0, le=_INT64_MAX)
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    stop: Annotated[list[StopString], Field(fail_fast=True), BeforeValidator(_as_list)] = Field(
        [], max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_as_list)] = Field(
        [], max_length=MAX_STOP_STRINGS
    )
    ignore_eos: bool = False
    metadata: JsonObject | None = None
    timeout: float | None = Field(None, gt=0)
    expires_at: float | None = Field(None, gt=0, le=_MAX_UNIX_TIME)
    priority: Priority = DEFAULT_PRIORITY
    tenant: str | None = Field(None, pattern=TENANT_PATTERN)

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    n: int = 1
    logprobs: bool | int | None = None
    response_format: JsonObject | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Request:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        if self.prompt is not None and len(self.prompt) == 0:
            raise ValueError("prompt is empty; it needs at least one character or token id")
        if self.messages is not None and len(self.messages) == 0:
            raise ValueError("messages is empty; it needs at least one message")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value not in neutral:
                raise ValueError(
                    f"{name}={value!r} is not supported by this version; leave it out or use {neutral[0]!r}"
                )
        return self


# Fields of the contract that this version does not act on yet, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None, {}),
    "n": (1,),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
}


def parse_request(body: object) -> Request:
    """Check a value and return it as a Request.

    Raises InvalidRequest with a text that names each field at fault, what was found and what is allowed.
    """
    if isinstance(body, Mapping):
        check_encodable(body)
    return parse_encodable(body)


def parse_encodable(body: object) -> Request:
    """As `parse_request`, for what `check_encodable` has seen already."""
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"a request is a JSON object, not {_json_type(body)}")
    try:
        return Request.model_validate(dict(body))
    except ValidationError as error:
        raise InvalidRequest(*_describe(error)) from None


def check_encodable(value: object) -> None:
    """Raise InvalidRequest for what can't travel as UTF-8 JSON: lone surrogates, NaN and infinities, at any depth."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            "the text has a lone surrogate (half of a \\uD800–\\uDFFF pair), which no encoding allows"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the request is not JSON: {error}") from None


_MAX_FAULTS = 20  # looked at; a union's branches make several of one
_MAX_FAULTS_SHOWN = 5
_REPR = reprlib.Repr()  # of a value of any size
_REPR.maxlevel, _REPR.maxstring, _REPR.maxlong, _REPR.maxother = 3, 60, 60, 60


def _describe(error: ValidationError) -> tuple[str, str | None]:
    """One line for all faults, and the first field at fault."""
    lines: list[str] = []
    params: list[str] = []
    for fault in error.errors(include_url=False)[:_MAX_FAULTS]:
        path = ".".join(str(part) for part in fault["loc"] if not _is_union_branch(part))
        params.append(path)
        if fault["type"] == "extra_forbidden":
            text = "unknown field"
        elif fault["type"] == "value_error":
            text = str(fault["ctx"]["error"])
        else:
            text = f"{fault['msg'][0].lower()}{fault['msg'][1:]} (got {_shorten(fault['input'])})"
        line = f"{path}: {text}" if path else text
        if line not in lines:
            lines.append(line)
    return "; ".join(lines[:_MAX_FAULTS_SHOWN]), params[0] or None


def _is_union_branch(part: int | str) -> bool:
    """Pydantic puts the tried branch of a union into the path ("str", "list[...]"), which says nothing to a user."""
    return isinstance(part, str) and (part in {"str", "bool", "int"} or "[" in part)


def _shorten(value: object, limit: int = 60) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _json_type(value: object) -> str:
    names = {str: "a string", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


class Output(_Wire):
    """One generated continuation. `stop_reason` is the stop string or token id that ended it, if one did."""

    index: int = 0
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: JsonValue = None


class Usage(_Wire):
    """Tokens counted: the prompt's, the generated ones, and those of the prompt read from a cache.

    `resumed_tokens` of the generated ones come from a checkpoint: an earlier attempt had made them.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    resumed_tokens: int = 0


class Timing(_Wire):
    """Seconds: waiting in the queue, in prefill, and from there to the last token."""

    queued_s: float
    prefill_s: float
    decode_s: float


class ErrorInfo(_Wire):
    """Why a job has no answer, or only part of one."""

    code: ErrorCode
    message: str
    param: str | None = None


class Result(_Wire):
    """What became of one job: outputs, or an error, or (cancelled, timed out) a part of the one with the other."""

    # Results are read back from Redis or a file by readers that may be older than their writer.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=False)

    id: str | None
    job_id: str
    batch: str | None = None
    model: str | None = None
    outputs: list[Output] = []
    usage: Usage | None = None
    timing: Timing | None = None
    worker: str | None = None
    attempt: int = 1
    error: ErrorInfo | None = None
    metadata: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True if the job has its whole answer."""
        return self.error is None

    @property
    def text(self) -> str:
        """The first output's text; empty if there is none."""
        return self.outputs[0].text if self.outputs else ""

    def to_json(self) -> str:
        """One line of JSON, as written to Redis and to output files."""
        return self.model_dump_json()
