from __future__ import annotations

import time

import pytest

from headrace.shared.errors import InvalidRequest
from headrace.shared.schema import parse_request
from headrace.worker import runner


@pytest.mark.parametrize(
    ("fields", "rq_timeout_s", "left_s"),
    [
        ({}, None, None),
        ({}, -1, None),
        ({}, 7, 7),
        ({"timeout": 5}, -1, 5),
        ({"timeout": 0.5}, 7, 0.5),
        ({"timeout": 9}, 7, 7),
        ({"expires_at": 1_003.5}, None, 3.5),
        ({"expires_at": 990}, None, -10),
        ({"expires_at": 1_003, "timeout": 2}, 7, 2),
        ({"expires_at": 1_001, "timeout": 2}, 7, 1),
    ],
)
def test_the_earliest_of_a_jobs_limits_counts(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, float], rq_timeout_s: int | None, left_s: float | None
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    monkeypatch.setattr(runner, "now_s", lambda: 50.0)
    found = runner.deadline(parse_request({"prompt": "a"} | fields), rq_timeout_s)
    assert found == (None if left_s is None else 50.0 + left_s)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", "5"),
        ("timeout", True),
        ("expires_at", 0),
        ("expires_at", 1_796_000_000_000),  # milliseconds
        ("expires_at", "2027-01-01T00:00:00Z"),
    ],
)
def test_limits_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field):
        parse_request({"prompt": "a", field: value})
