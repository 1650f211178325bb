"""Steps that raise: the job that makes them raise, memory that does not suffice, an engine that is broken."""

from __future__ import annotations

import pytest
import redis
import torch
from rq import Queue
from worker_harness import QUEUE, WorkerThread, producer_for, running_worker, successors

from headrace.shared import keys
from headrace.shared.errors import EngineFailure
from headrace.shared.schema import ErrorCode


def raise_at_m(error: type[Exception], text: str) -> object:
    def before_pass(last_ids: list[int]) -> None:
        if ord("m") in last_ids:
            raise error(text)

    return before_pass


def test_a_job_that_makes_steps_raise_fails_after_its_attempts_and_its_neighbours_finish(
    redis_client: redis.Redis,
) -> None:
    with producer_for(redis_client) as producer:
        good = [{"prompt": "n", "max_tokens": 40}] * 5
        batch = producer.submit_many([*good, {"prompt": "a", "id": "bad", "max_tokens": 40}, *good], batch="b")
        with running_worker(redis_client, slots=16) as running:
            running.model.before_pass = raise_at_m(RuntimeError, "the device is on fire")  # type: ignore[assignment]
            results = list(batch.results(timeout=20))
            assert producer.submit("n", max_tokens=3).result(timeout=20).text == "opq"
    (bad,) = (result for result in results if result.id == "bad")
    neighbours = [result for result in results if result is not bad]
    assert [result.text for result in neighbours] == [successors("n", 40)] * 10
    assert {result.attempt for result in neighbours} == {1}
    assert bad.error is not None
    assert bad.error.code is ErrorCode.INTERNAL_ERROR
    assert bad.error.message == "failed 3 times, the last with: RuntimeError: the device is on fire"
    assert bad.attempt == 3
    assert Queue(QUEUE, connection=redis_client).failed_job_registry.get_job_ids() == [bad.job_id]
    left = redis_client.hgetall(keys.rq_job(bad.job_id))
    assert [field for field in left if field.startswith(b"headrace")] == []  # requeued, it has all its attempts


def test_an_engine_that_fails_whatever_it_runs_ends_the_worker_and_no_job_is_blamed(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 6, batch="b")
        broken = WorkerThread(redis_client)
        broken.model.fail_with = RuntimeError("the device is gone")
        with pytest.raises(EngineFailure, match="the device is gone"):
            broken.join()
        assert redis_client.lrange(keys.rq_queue(QUEUE), 0, -1) == redis_client.lrange(keys.batch_jobs("b"), 0, -1)
        assert redis_client.smembers(keys.WORKERS) == set()
        with running_worker(redis_client):
            results = list(batch.results(timeout=20))
    assert [(result.attempt, result.text) for result in results] == [(1, successors("a", 9))] * 6


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
    ids=["host", "cuda", "torch on the host"],
)
def test_a_batch_that_is_too_large_for_the_memory_becomes_smaller(redis_client: redis.Redis, error: Exception) -> None:
    too_large: list[int] = []

    def before_pass(last_ids: list[int]) -> None:
        if len(last_ids) > 2:
            too_large.append(len(last_ids))
            raise error

    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 20, batch="b")
        with running_worker(redis_client, slots=8) as running:
            running.model.before_pass = before_pass
            results = list(batch.results(timeout=20))
    assert [(result.attempt, result.text) for result in results] == [(1, successors("a", 9))] * 20
    assert len(too_large) <= 3  # 8, 4, and fewer if the first came before all slots were taken


def test_a_job_that_does_not_fit_even_alone_says_so(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.before_pass = raise_at_m(torch.OutOfMemoryError, "too much")  # type: ignore[assignment]
        result = producer.submit("a", max_tokens=40).result(timeout=20)
        assert producer.submit("n", max_tokens=3).result(timeout=20).text == "opq"
    assert result.error is not None
    assert result.error.code is ErrorCode.OUT_OF_MEMORY
    assert result.attempt == 3
