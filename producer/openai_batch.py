"""Lines of the OpenAI Batch API: its input mapped to requests, and results mapped to its output."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from headrace.producer.lines import Defaults, Line, bad_line, explicit_id, line_from_file
from headrace.shared.schema import ErrorCode, FinishReason, Output, Result, Usage

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
_LINE_FIELDS = {"custom_id", "method", "url", "body"}
# What other fields of a body may say without asking for anything that we don't do.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default", "flex", "priority"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_LABELS = {"user", "safety_identifier", "prompt_cache_key"}  # who asks, which changes no answer
# A failure that is the request's own fault has an HTTP status, as from the API; any other has none.
_STATUS_OF = {ErrorCode.INVALID_REQUEST: 400, ErrorCode.PROMPT_TOO_LONG: 400, ErrorCode.MODEL_MISMATCH: 404}


def parse_openai_line(body: object, number: int, defaults: Defaults, url: str) -> Line:
    """Check a decoded line of a file for `url`: `custom_id` becomes the request's id, `body` its fields."""
    if not isinstance(body, Mapping):
        return bad_line(number, "not an object with custom_id, method, url and body")
    custom_id = body.get("custom_id")
    line_id = explicit_id({"id": custom_id})
    if line_id is None:
        return bad_line(number, "custom_id is a string of 1 to 512 characters", param="custom_id")
    wrong = _wrong_frame(body, url)
    if wrong is not None:
        return bad_line(number, wrong[1], line_id=line_id, param=wrong[0])
    fields = {name: value for name, value in body["body"].items() if value is not None}
    wrong = _wrong_body(fields, chat=url == CHAT_URL)
    if wrong is not None:
        return bad_line(number, wrong[1], line_id=line_id, param=wrong[0])
    ours = {name: value for name, value in fields.items() if name not in _NEUTRAL and name not in _LABELS}
    if "max_completion_tokens" in ours:
        ours["max_tokens"] = ours.pop("max_completion_tokens")
    return line_from_file({**ours, "id": line_id}, number, defaults)


def _wrong_frame(line: Mapping[str, Any], url: str) -> tuple[str, str] | None:
    """The field at fault around the body and what is allowed; None if all is right."""
    unknown = sorted(set(line) - _LINE_FIELDS)
    if unknown:
        return unknown[0], f"{unknown[0][:80]!r}: unknown field; a line has custom_id, method, url and body"
    if line.get("method") != "POST":
        return "method", f'method is {_short(line.get("method"))}; it must be "POST"'
    if line.get("url") not in (CHAT_URL, COMPLETIONS_URL):
        return "url", f'url is {_short(line.get("url"))}; it must be "{CHAT_URL}" or "{COMPLETIONS_URL}"'
    if line["url"] != url:
        return "url", f'url is "{line["url"]}", and the first line\'s is "{url}"; all lines of a file have one'
    if not isinstance(line.get("body"), Mapping):
        return "body", f"body is {_short(line.get('body'))}; it must be an object"
    return None


def _wrong_body(fields: Mapping[str, Any], *, chat: bool) -> tuple[str, str] | None:
    foreign = ("prompt", "messages") if chat else ("messages", "prompt")
    if foreign[0] in fields:
        return foreign[0], f"{foreign[0]} does not belong to this url; it takes {foreign[1]}"
    for name, allowed in _NEUTRAL.items():
        if name in fields and fields[name] not in allowed:
            hint = f"; leave it out or use {json.dumps(allowed[0])}" if allowed else "; leave it out"
            return name, f"{name}={_short(fields[name])} is not supported{hint}"
    for name in _LABELS & set(fields):
        if not isinstance(fields[name], str):
            return name, f"{name} is {_short(fields[name])}; it must be a string"
    if "id" in fields:
        return "id", "id: unknown field; the id is custom_id"
    both = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if None not in both and both[0] != both[1]:
        return "max_tokens", f"max_tokens is {_short(both[0])} and max_completion_tokens {_short(both[1])}; give one"
    return None


def output_line(result: Result, *, chat: bool, created: int | None = None) -> str:
    """A result as a line of the output or the error file. `created`: seconds since 1970; now, if not given."""
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    info = result.error
    if info is None:
        response = {"status_code": 200, "body": _answer(result, chat, int(time.time()) if created is None else created)}
    elif info.code in _STATUS_OF:
        fault = {"message": info.message, "type": "invalid_request_error", "param": info.param, "code": info.code}
        response = {"status_code": _STATUS_OF[info.code], "body": {"error": fault}}
    else:
        error = {"code": info.code, "message": info.message}
    if response is not None:
        response["request_id"] = f"req_{result.job_id}"
    line = {"id": f"batch_req_{result.job_id}", "custom_id": result.id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"))


def _answer(result: Result, chat: bool, created: int) -> dict[str, Any]:
    usage = result.usage or Usage(prompt_tokens=0, completion_tokens=0)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{result.job_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": result.model,
        "choices": [_choice(output, chat) for output in result.outputs],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _choice(output: Output, chat: bool) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
    finish_reason = "length" if output.finish_reason is FinishReason.LENGTH else "stop"
    return {"index": output.index, **said, "logprobs": output.logprobs, "finish_reason": finish_reason}


def _short(value: object, limit: int = 60) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
