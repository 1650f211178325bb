"""Retrying the failed jobs of a batch, on fakeredis and on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from fake_worker import echo, settle_all
from rq.job import Job as RQJob
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from headrace.producer import Batch, BatchNotFound, Producer, SettingsError, retry, steps
from headrace.producer.batches import Collector
from headrace.shared import keys
from headrace.shared.job import BLAME_FIELD, CANCEL_FIELD, CRASHES_FIELD
from headrace.shared.schema import ErrorCode, ErrorInfo

QUEUE = "headrace-m"


@pytest.fixture
def producer(redis_client: redis.Redis) -> Iterator[Producer]:
    with Producer(connection=redis_client, model="m") as producer:
        yield producer


def lose_some(request: dict[str, object]) -> str | ErrorInfo:
    """What is called "lost" dies with its worker, the rest is as ever."""
    if "lost" in str(request["prompt"]):
        return ErrorInfo(code=ErrorCode.WORKER_LOST, message="3 workers died while running this job")
    return echo(request)


def failed_batch(producer: Producer, client: redis.Redis) -> Batch:
    """A good answer, a prompt that was too long, a worker that was lost, and a line that was no request."""
    batch = producer.submit_many(["good", "fail", "lost", {"prompt": 5}], batch="b")
    settle_all(client, QUEUE, lose_some)
    assert (batch.progress().completed, batch.progress().failed) == (1, 3)
    return batch


def codes(batch: Batch) -> dict[str | None, str | None]:
    return {result.id: result.error and result.error.code.value for result in batch.results(timeout=10)}


def test_failed_jobs_go_back_on_the_queue_and_end_in_one_result_each(
    producer: Producer, redis_client: redis.Redis
) -> None:
    batch = failed_batch(producer, redis_client)
    retried = batch.retry()
    assert retried.count == 2
    assert list(retried.skipped) == ["3"]
    assert "never was a job" in retried.skipped["3"]
    progress = batch.progress()
    assert (progress.total, progress.completed, progress.failed, progress.finished) == (4, 1, 1, False)
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 2
    assert settle_all(redis_client, QUEUE, lambda request: "well") == 2
    texts = {result.id: result.text for result in batch.results(timeout=10) if result.ok}
    assert texts == {"0": "<good>", "1": "well", "2": "well"}
    progress = batch.progress()
    assert (progress.completed, progress.failed, progress.finished) == (3, 1, True)
    assert (progress.prompt_tokens, progress.completion_tokens) == (9, 6)
    assert redis_client.xlen(keys.batch_done("b")) == 4


def test_only_the_codes_that_are_asked_for_are_retried(producer: Producer, redis_client: redis.Redis) -> None:
    batch = failed_batch(producer, redis_client)
    assert (batch.retry("timeout").count, batch.retry("worker_lost", "timeout").count) == (0, 1)
    settle_all(redis_client, QUEUE)
    assert codes(batch) == {"0": None, "1": "prompt_too_long", "2": None, "3": "invalid_request"}


def test_cancelled_jobs_are_retried_only_when_asked_for_and_are_not_cancelled_again(
    producer: Producer, redis_client: redis.Redis
) -> None:
    batch = producer.submit_many(["a", "b"], batch="b")
    for job_id in redis_client.lrange(keys.batch_jobs("b"), 0, -1):
        redis_client.hset(keys.rq_job(job_id.decode()), mapping={CANCEL_FIELD: 1, CRASHES_FIELD: 2, BLAME_FIELD: 2})
    batch.cancel()
    assert batch.retry().count == 0
    assert batch.retry("cancelled").count == 2
    for job_id in redis_client.lrange(keys.rq_queue(QUEUE), 0, -1):
        fields = redis_client.hgetall(keys.rq_job(job_id.decode()))
        assert not {CANCEL_FIELD.encode(), CRASHES_FIELD.encode(), BLAME_FIELD.encode()} & set(fields)
        assert redis_client.ttl(keys.rq_job(job_id.decode())) == -1  # it may wait longer than a cancelled job is kept
    assert redis_client.zcard(f"rq:canceled:{QUEUE}") == 0
    settle_all(redis_client, QUEUE)
    assert (batch.progress().completed, batch.progress().cancelled) == (2, 0)


def test_retrying_twice_queues_once(producer: Producer, redis_client: redis.Redis) -> None:
    batch = failed_batch(producer, redis_client)
    assert (batch.retry().count, batch.retry().count) == (2, 0)
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 2


def test_a_job_that_moved_on_between_the_look_and_the_script_is_left_alone(
    producer: Producer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the fence's checks by itself: another result, another state, no entry in the stream any more."""
    batch = producer.submit_many(["fail"] * 3, batch="b")
    settle_all(redis_client, QUEUE)
    result, state, entry = (job_id.decode() for job_id in redis_client.lrange(keys.batch_jobs("b"), 0, -1))
    send = retry._send

    def interfere(name: str, failed: list[retry._Failed], ttl_s: int) -> object:
        redis_client.set(keys.result(result), '{"another": "result"}')
        redis_client.hset(keys.rq_job(state), "status", "started")
        redis_client.xdel(keys.batch_done("b"), *(each.entry_id for each in failed if each.job_id == entry))
        return (yield from send(name, failed, ttl_s))

    monkeypatch.setattr(retry, "_send", interfere)
    assert batch.retry().count == 0
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 0
    assert redis_client.exists(*(keys.result(job_id) for job_id in (result, state, entry))) == 3
    assert batch.progress().failed == 3


def test_what_has_expired_is_named_and_stays_as_it_is(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many([{"prompt": "fail", "id": "job"}, {"prompt": "fail", "id": "result"}], batch="b")
    settle_all(redis_client, QUEUE)
    job, result = (job_id.decode() for job_id in redis_client.lrange(keys.batch_jobs("b"), 0, -1))
    redis_client.delete(keys.rq_job(job))
    redis_client.delete(keys.result(result))
    retried = batch.retry()
    assert retried.count == 0
    assert "RQ's job has expired" in retried.skipped["job"]
    assert "its result has expired" in retried.skipped[result]
    assert batch.progress().failed == 2
    assert redis_client.exists(keys.result(job))


def test_rq_sees_a_retried_job_as_queued_anew(producer: Producer, redis_client: redis.Redis) -> None:
    batch = failed_batch(producer, redis_client)
    job_ids = [job_id.decode() for job_id in redis_client.lrange(keys.batch_jobs("b"), 1, 2)]
    registry = FailedJobRegistry(QUEUE, connection=redis_client)
    redis_client.zadd(registry.key, dict.fromkeys(job_ids, 4e9))
    batch.retry()
    assert registry.get_job_ids(cleanup=False) == []
    for job_id in job_ids:
        job = RQJob.fetch(job_id, connection=redis_client, serializer=JSONSerializer)
        assert job.is_queued
        assert job.ended_at is None
        assert job.latest_result() is None


def test_who_waits_for_a_retried_job_gets_its_new_result(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many(["fail"], batch="b")
    settle_all(redis_client, QUEUE)
    job = producer.job(redis_client.lindex(keys.batch_jobs("b"), 0).decode())
    batch.retry()
    worker = threading.Timer(0.05, settle_all, (redis_client, QUEUE, lambda request: "well"))
    worker.start()
    assert job.result(timeout=10).text == "well"
    worker.join()


def test_a_collector_that_has_seen_the_failure_goes_on_to_the_new_result(
    producer: Producer, redis_client: redis.Redis
) -> None:
    batch = producer.submit_many(["fail", "slow"], batch="b")
    last = redis_client.rpop(keys.rq_queue(QUEUE))
    settle_all(redis_client, QUEUE)
    results = batch.results(timeout=10)
    assert next(results).error is not None
    batch.retry()
    redis_client.rpush(keys.rq_queue(QUEUE), last)
    settle_all(redis_client, QUEUE, lambda request: "well")
    # Two more of a batch of two: counting what has come would have ended after the first of them.
    assert [result.text for result in results] == ["well", "well"]


def test_a_result_that_is_taken_back_while_it_is_read_is_not_taken_for_an_expired_one(
    producer: Producer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = producer.submit_many(["fail"], batch="b")
    settle_all(redis_client, QUEUE)
    send = steps._send

    def retry_after_reading(client: redis.Redis, call: steps.Call) -> list[object]:
        replies = send(client, call)
        if call.commands[0][0] == "XREAD":
            monkeypatch.undo()
            assert batch.retry().count == 1
        return replies

    monkeypatch.setattr(steps, "_send", retry_after_reading)
    assert producer._run(Collector("b").take(0.0)) == []


def test_what_fails_while_it_is_retried_waits_for_the_next_retry(
    producer: Producer, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = producer.submit_many(["fail"] * 5, batch="b")
    settle_all(redis_client, QUEUE)
    monkeypatch.setattr(retry, "RETRY_CHUNK", 2)
    failures = retry._failures

    def fail_again(entries: list[tuple[str, dict[str, str]]]) -> object:
        settle_all(redis_client, QUEUE)
        return (yield from failures(entries))

    monkeypatch.setattr(retry, "_failures", fail_again)
    assert batch.retry().count == 5


def test_an_unknown_code_and_an_unknown_batch_are_refused(producer: Producer) -> None:
    with pytest.raises(SettingsError, match=r"'lost'.*worker_lost"):
        producer.batch("b").retry("lost")
    with pytest.raises(BatchNotFound):
        producer.batch("b").retry()
