"""The built-in workload: the same for the same seed, spread as real work is, and within the context."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from headrace.producer.bench.workload import OUTPUTS, PROMPTS, synthetic_requests, write_requests
from headrace.producer.formats import preflight
from headrace.shared.schema import parse_request


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    first, again, other = (list(synthetic_requests(50, seed, None)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_longer_workload_begins_as_a_shorter_one() -> None:
    assert list(synthetic_requests(60, 0, None))[:20] == list(synthetic_requests(20, 0, None))


def test_lengths_are_log_normal_about_their_medians() -> None:
    requests = list(synthetic_requests(4000, 3, None))
    prompts = [len(request["prompt"]) for request in requests]
    outputs = [request["max_tokens"] for request in requests]
    for lengths, spread in ((prompts, PROMPTS), (outputs, OUTPUTS)):
        assert statistics.median(lengths) == pytest.approx(spread.median, rel=0.08)
        within = sum(abs(math.log(length / spread.median)) <= spread.sigma for length in lengths) / len(lengths)
        assert within == pytest.approx(0.683, abs=0.04)  # one standard deviation of a normal distribution
        assert min(lengths) >= spread.least
        assert max(lengths) <= spread.most


def test_prompt_and_answer_fit_into_a_small_context() -> None:
    for request in synthetic_requests(300, 0, 64):
        assert len(request["prompt"]) + request["max_tokens"] <= 64


def test_every_request_is_one_and_its_length_is_exact(tmp_path: Path) -> None:
    write_requests(tmp_path / "w.jsonl", synthetic_requests(40, 0, None))
    found = preflight(str(tmp_path / "w.jsonl"))
    assert (found.count, found.bad) == (40, 0)
    assert all(parse_request(request).ignore_eos for request in synthetic_requests(40, 0, None))
