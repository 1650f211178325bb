"""Jobs that do not finish in the time that their requests give them."""

from __future__ import annotations

import time

import pytest
import redis
from worker_harness import MODEL, producer_for, running_worker, wait_until

from headrace.shared import keys
from headrace.shared.schema import ErrorCode, FinishReason, Result
from headrace.worker.checkpoint import encode_checkpoint


def assert_timed_out(result: Result) -> None:
    assert result.error is not None
    assert result.error.code is ErrorCode.TIMEOUT
    assert result.outputs[0].finish_reason is FinishReason.TIMEOUT


@pytest.mark.parametrize("field", ["timeout", "expires_at"])
def test_a_job_that_has_not_finished_in_time_ends_with_its_partial_text(redis_client: redis.Redis, field: str) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.hold_after = 5
        limit = 2.0 + (time.time() if field == "expires_at" else 0)
        job, other = producer.submit("a", max_tokens=60, **{field: limit}), producer.submit("a", max_tokens=20)
        wait_until(lambda: not running.model.gate.is_set(), "five steps")
        end = time.monotonic() + 2.0
        wait_until(lambda: time.monotonic() > end, "the time to run out")
        running.model.gate.set()
        result = job.result(timeout=20)
        assert_timed_out(result)
        assert "bcdefgh".startswith(result.text)
        assert result.text != ""
        assert job.status() == "failed"
        assert len(other.result(timeout=20).text) == 20


def test_a_job_that_expired_while_it_waited_is_not_run(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=60, expires_at=time.time() - 1)
        with running_worker(redis_client) as running:
            result = job.result(timeout=20)
        assert running.model.rows_of_steps == []
    assert_timed_out(result)
    assert result.text == ""


def test_a_job_that_expired_between_two_workers_keeps_what_the_first_had_made(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=60, expires_at=time.time() - 1)
        data = redis_client.hget(keys.rq_job(job.id), "data")
        assert isinstance(data, bytes)
        redis_client.set(keys.checkpoint(job.id), encode_checkpoint([*b"bcd"], model=MODEL, data=data))
        with running_worker(redis_client) as running:
            result = job.result(timeout=20)
        assert running.model.rows_of_steps == []
    assert_timed_out(result)
    assert result.text == "bcd"


def test_a_job_that_finishes_in_time_is_as_without_a_limit(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client):
        job = producer.submit("a", max_tokens=3, timeout=60, expires_at=time.time() + 60)
        assert job.result(timeout=20).text == "bcd"
