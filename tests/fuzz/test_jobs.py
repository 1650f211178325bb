"""Whole jobs: any hash on the queue ends in one result, and a good job beside them in its answer."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import redis
from fuzz import strategies as hostile
from fuzz.settings import many
from hypothesis import given
from worker_harness import QUEUE, producer_for, running_worker, wait_until

from headrace.shared import keys
from headrace.shared.job import TASK
from headrace.shared.schema import Result

NUM_JOBS = 1_000


@many(NUM_JOBS)
@given(fields=hostile.job_hashes)
def _put(connection: redis.Redis, job_ids: list[str], fields: dict[bytes, bytes]) -> None:
    job_ids.append(f"job{len(job_ids)}")
    connection.hset(keys.rq_job(job_ids[-1]), mapping=fields)  # type: ignore[arg-type]
    connection.rpush(keys.rq_queue(QUEUE), job_ids[-1])


@pytest.mark.timeout(240)
def test_any_job_ends_in_one_result(redis_client: redis.Redis) -> None:
    job_ids: list[str] = []
    with running_worker(redis_client, slots=32) as running, producer_for(redis_client) as producer:
        _put(redis_client, job_ids)
        assert producer.submit("a", max_tokens=3).result(timeout=120).text == "bcd"
        wait_until(lambda: not redis_client.llen(keys.rq_queue(QUEUE)), "the queue to be empty", 60)
        wait_until(lambda: all(results(redis_client, job_ids)), "all results", 60)
    found = [Result.model_validate_json(raw) for raw in results(redis_client, job_ids) if raw is not None]
    assert running.error is None
    assert len(found) == len(job_ids) >= NUM_JOBS
    codes = {result.error.code.value for result in found if result.error}
    assert codes <= {"invalid_request", "prompt_too_long", "model_mismatch", "timeout"}, [
        result.error.message for result in found if result.error and result.error.code == "internal_error"
    ]
    assert sum(result.ok for result in found) > 20
    assert not hasattr(sys, "headrace_was_here")
    assert "antigravity" not in sys.modules
    assert redis_client.zcard(f"rq:wip:{QUEUE}") == 0


def results(connection: redis.Redis, job_ids: list[str]) -> list[bytes | None]:
    return connection.mget([keys.result(job_id) for job_id in job_ids])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("result_ttl", str(2**62)),
        ("result_ttl", "-7"),
        ("failure_ttl", "9" * 30),
        ("timeout", "9" * 400),
        ("headrace_crashes", "-5"),
        ("headrace_crashes", str(2**63)),
    ],
)
def test_a_number_beyond_all_use_is_the_jobs_own_fault(redis_client: redis.Redis, field: str, value: str) -> None:
    data = hostile.as_json([TASK, None, [], {"request": {"prompt": "a", "max_tokens": 3}}])
    fields: dict[str, Any] = {"data": data, "status": "queued", field: value}
    redis_client.hset(keys.rq_job("bad"), mapping=fields)
    redis_client.rpush(keys.rq_queue(QUEUE), "bad")
    with running_worker(redis_client), producer_for(redis_client) as producer:
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        result = producer.job("bad").result(timeout=20)
    assert result.error is not None
    assert field in result.error.message


def test_a_count_that_overflows_does_not_stop_the_worker(redis_client: redis.Redis) -> None:
    redis_client.hset(keys.batch("full"), "completed", str(2**63 - 1))
    data = hostile.as_json([TASK, None, [], {"request": {"prompt": "a", "max_tokens": 3}, "batch": "full"}])
    redis_client.hset(keys.rq_job("odd"), mapping={"data": data, "status": "queued"})
    redis_client.rpush(keys.rq_queue(QUEUE), "odd")
    with running_worker(redis_client), producer_for(redis_client) as producer:
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        wait_until(lambda: redis_client.exists(keys.result("odd")), "the result")
        assert producer.submit("b", max_tokens=3).result(timeout=20).text == "cde"
