"""A job's data and its request: whatever they are, they are read or refused with one clear error."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from fuzz import strategies as hostile
from fuzz.settings import many
from hypothesis import given

from headrace.shared.errors import InvalidRequest
from headrace.shared.job import decode_payload, job_hash
from headrace.shared.schema import ErrorCode, ErrorInfo, Result, parse_request

MAX_MESSAGE = 2_000


def is_readable(error: InvalidRequest) -> None:
    """One line, of a length that a person reads, that JSON and a terminal can take."""
    message = str(error)
    assert 0 < len(message) < MAX_MESSAGE
    assert Result(id=None, job_id="a", error=ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=message)).to_json()


@many(2_000)
@given(data=hostile.encoded)
def test_any_data_is_read_or_refused(data: bytes) -> None:
    try:
        payload = decode_payload(data)
        parse_request(payload.request)
    except InvalidRequest as error:
        is_readable(error)
    assert not hasattr(sys, "headrace_was_here")


@many(1_500)
@given(body=hostile.requests)
def test_any_request_is_refused_or_travels_unchanged(body: Any) -> None:
    try:
        request = parse_request(body)
    except InvalidRequest as error:
        is_readable(error)
        return
    data = job_hash(request, queue="q", batch=None)["data"]
    assert isinstance(data, bytes)
    again = parse_request(decode_payload(data).request)
    assert again == request
    stored = Result(id=request.id, job_id="a", metadata=again.metadata).to_json()
    assert Result.model_validate_json(stored).metadata == request.metadata


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": [-1] * 300_000}, "prompt.0"),
        ({"messages": [{}] * 100_000}, "messages.0"),
        ({f"field{i}": 1 for i in range(300_000)}, "300,000 fields"),
        ({"messages": [{"role": "user", "content": "", **{f"f{i}": 1 for i in range(100_000)}}]}, "100,002 fields"),
        ({"prompt": "a", "stop": [1] * 100_000}, "stop"),
        ({"prompt": "a", "metadata": hostile.nested(65, as_dict=True)}, "nested more than 64 deep"),
    ],
)
@pytest.mark.timeout(20)
def test_the_faults_of_a_long_request_are_few(body: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as raised:
        parse_request(body)
    is_readable(raised.value)


def test_what_is_nested_as_deep_as_allowed_can_be_read_back() -> None:
    metadata = hostile.nested(63, as_dict=True)
    request = parse_request({"prompt": "a", "metadata": metadata})
    stored = Result(id=None, job_id="a", metadata=request.metadata).to_json()
    assert json.loads(stored)["metadata"] == metadata == Result.model_validate_json(stored).metadata
