"""What the operator of a worker allows a job."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from fakes import ByteCodec

from headrace.shared.errors import InvalidRequest, SettingsError
from headrace.shared.job import decode_payload, job_hash
from headrace.shared.schema import DEFAULT_MAX_TOKENS, Request
from headrace.worker.cli import worker
from headrace.worker.runner import Rejected, Runner
from headrace.worker.settings import Limits


def runner(**limits: Any) -> Runner:
    return Runner(ByteCodec(), model_name="m", max_context=4096, limits=Limits(**limits))


@pytest.mark.parametrize(
    ("limits", "fields", "says"),
    [
        ({"max_tokens": 10}, {"max_tokens": 11}, r"max_tokens is 11; this worker allows 10 \(--limit-max-tokens\)"),
        ({"stops": 1}, {"stop": ["a", "b"]}, r"stop has 2 entries; this worker allows 1 \(--limit-stops\)"),
        ({"stops": 1}, {"stop_token_ids": [1, 2]}, r"stop_token_ids has 2 entries"),
    ],
)
def test_what_is_over_a_limit_is_refused_with_its_name(limits: Any, fields: Any, says: str) -> None:
    with pytest.raises(Rejected, match=says):
        runner(**limits).row(Request(prompt="a", **fields), "job")
    assert runner().row(Request(prompt="a", **fields), "job")


def test_a_request_that_does_not_say_gets_as_much_as_is_allowed() -> None:
    assert runner(max_tokens=10).row(Request(prompt="a"), "job").stopping.max_tokens == 10
    assert runner(max_tokens=900).row(Request(prompt="a"), "job").stopping.max_tokens == DEFAULT_MAX_TOKENS


def test_data_counts_as_it_is_unpacked() -> None:
    data = job_hash(Request(prompt="a" * 5000), queue="q", batch=None)["data"]
    assert isinstance(data, bytes)
    assert len(data) < 1000
    with pytest.raises(InvalidRequest, match="over the limit of 4,000 bytes"):
        decode_payload(data, 4000)
    assert decode_payload(data, 6000)


@pytest.mark.parametrize("limits", [{"payload_bytes": 10}, {"max_tokens": 0}, {"stops": 65}, {"stops": -1}])
def test_a_limit_that_makes_no_sense_is_refused(limits: Any) -> None:
    with pytest.raises(SettingsError, match="--limit-"):
        Limits(**limits)


def test_the_command_line_and_the_variables_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Limits] = []
    monkeypatch.setattr("headrace.worker.serve.serve", lambda engine, *rest: seen.append(engine.limits))
    monkeypatch.setenv("HEADRACE_LIMIT_STOPS", "3")
    outcome = CliRunner().invoke(worker, ["--limit-max-tokens", "5", "--limit-payload-bytes", "4096"])
    assert outcome.exit_code == 0, outcome.output
    assert seen == [Limits(payload_bytes=4096, max_tokens=5, stops=3)]
