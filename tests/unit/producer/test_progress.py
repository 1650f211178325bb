"""The counts, the summary and the lines that stand in for a bar."""

from __future__ import annotations

import pytest

from headrace.producer import ErrorInfo, Result, Timing, Usage, progress
from headrace.producer.progress import ProgressBar, Tally
from headrace.shared.schema import ErrorCode


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def answer(tokens: int) -> Result:
    timing = Timing(queued_s=9.0, prefill_s=1.0, decode_s=3.0)
    return Result(id="a", job_id="j", usage=Usage(prompt_tokens=5, completion_tokens=tokens), timing=timing)


def failure(number: int) -> Result:
    return Result(id=f"f{number}", job_id="j", error=ErrorInfo(code=ErrorCode.TIMEOUT, message="ran out of its time"))


def test_the_rate_counts_from_the_start_of_the_first_job(clock: FakeTime) -> None:
    tally = Tally(live=True)
    clock.now_s += 10
    tally.add([answer(40)])
    assert tally.tokens_per_s == 10.0
    clock.now_s += 4
    tally.add([answer(40)])
    assert tally.tokens_per_s == 10.0
    text = tally.summary("out.jsonl")
    assert "tokens per second  10.0" in text
    assert "seconds            14.0, of which 6.0 until the first job started" in text


def test_what_was_made_before_has_no_rate(clock: FakeTime) -> None:
    tally = Tally(live=False)
    tally.add([answer(40)])
    assert "tokens per second" not in tally.summary("-")
    assert "answers            standard output" in tally.summary("-")


def test_failures_are_counted_by_code_and_the_first_are_shown() -> None:
    tally = Tally(live=True)
    tally.add(failure(number) for number in range(5))
    text = tally.summary("out", "out.errors.jsonl")
    assert "failed             5 (timeout 5)" in text
    assert "errors             out.errors.jsonl\n  f0: ran out of its time\n" in text
    assert text.endswith("  f2: ran out of its time\n  and 2 more")


def test_without_a_terminal_a_line_is_shown_now_and_then(clock: FakeTime, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(live=True)
    with ProgressBar(4, tally) as bar:
        tally.add([answer(40)])
        bar.show()
        clock.now_s += 11
        bar.show()
        bar.show()
    assert capsys.readouterr().err == "1 of 4 jobs, 0 failed, 4 tokens/s, about 33 s left\n"
