"""Cancelling jobs and batches, on fakeredis and on a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
import redis
from fake_worker import settle_all, settle_next
from rq.job import Job as RQJob
from rq.registry import CanceledJobRegistry
from rq.serializers import JSONSerializer

from headrace.producer import Producer
from headrace.shared import keys
from headrace.shared.job import CANCEL_FIELD

QUEUE = "headrace-m"


@pytest.fixture
def producer(redis_client: redis.Redis) -> Iterator[Producer]:
    with Producer(connection=redis_client, model="m") as producer:
        yield producer


def test_a_waiting_job_is_settled_as_cancelled_at_once(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello", id="mine", metadata={"a": 1})
    assert job.cancel() is True
    result = job.result(timeout=0)
    assert (result.id, result.error.code, result.metadata) == ("mine", "cancelled", {"a": 1})
    assert job.status() == "canceled"
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 0
    assert 0 < redis_client.ttl(keys.rq_job(job.id))


def test_rq_sees_a_cancelled_job_as_its_own(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello")
    job.cancel()
    found = RQJob.fetch(job.id, connection=redis_client, serializer=JSONSerializer)
    assert found.is_canceled
    assert found.latest_result().type.name == "STOPPED"
    assert CanceledJobRegistry(QUEUE, connection=redis_client).get_job_ids(cleanup=False) == [job.id]


def test_cancelling_wakes_who_waits(producer: Producer) -> None:
    job = producer.submit("hello")
    canceller = threading.Timer(0.05, job.cancel)
    canceller.start()
    assert job.result(timeout=10).error.code == "cancelled"
    canceller.join()


def test_a_running_job_is_stopped_by_its_worker(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello")
    redis_client.hset(keys.rq_job(job.id), mapping={"status": "started", "worker_name": "w1"})
    with redis_client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("rq:pubsub:w1")
        listener.get_message(timeout=5)
        assert job.cancel() is True
        message = listener.get_message(timeout=5)
    assert json.loads(message["data"]) == {"command": "stop-job", "job_id": job.id}
    assert job.status() == "started"
    # The message may get lost; these two do not.
    assert redis_client.smembers(keys.cancels("w1")) == {job.id.encode()}
    assert 0 < redis_client.ttl(keys.cancels("w1")) <= 3600
    assert redis_client.hexists(keys.rq_job(job.id), CANCEL_FIELD)


def test_an_ended_job_stays_as_it_is(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello")
    settle_all(redis_client, QUEUE)
    assert job.cancel() is False
    assert not redis_client.hexists(keys.rq_job(job.id), CANCEL_FIELD)
    redis_client.delete(keys.rq_job(job.id))
    assert job.cancel() is False
    assert job.result().ok


def test_cancelling_twice_counts_once(producer: Producer) -> None:
    batch = producer.submit_many(["a"], batch="b")
    job = producer.job(next(_job_ids(producer, "b")))
    assert (job.cancel(), job.cancel(), batch.cancel()) == (True, False, 0)
    assert batch.progress().cancelled == 1


def test_a_batch_is_cancelled_except_what_has_ended(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many((f"p{i}" for i in range(1_200)), batch="b")
    settle_next(redis_client, QUEUE)
    assert batch.cancel() == 1_199
    progress = batch.progress()
    assert (progress.completed, progress.cancelled, progress.finished) == (1, 1_199, True)
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 0
    codes = [result.error and result.error.code for result in batch.results(timeout=10)]
    assert codes == [None] + ["cancelled"] * 1_199


def test_a_job_in_the_middle_of_a_long_queue_is_left_for_the_workers_fence(
    producer: Producer, redis_client: redis.Redis
) -> None:
    redis_client.rpush(keys.rq_queue(QUEUE), *(f"x{i}" for i in range(1_100)))
    job = producer.submit("hello")
    redis_client.rpush(keys.rq_queue(QUEUE), *(f"y{i}" for i in range(1_100)))
    job.cancel()
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 2_201
    assert job.status() == "canceled"


def test_submitting_stops_when_the_batch_is_cancelled(producer: Producer, redis_client: redis.Redis) -> None:
    def items() -> Iterator[str]:
        for i in range(5_000):
            if i == 600:
                producer.batch("b").cancel()
            yield f"p{i}"

    batch = producer.submit_many(items(), batch="b")
    assert batch.progress().total == 1_000
    assert batch.progress().submitted


def test_a_foreign_job_can_be_cancelled(producer: Producer, redis_client: redis.Redis) -> None:
    redis_client.hset("rq:job:x", mapping={"data": b"\x80\x04pickle", "status": "queued", "origin": QUEUE})
    assert producer.job("x").cancel() is True
    assert producer.job("x").result().error.code == "cancelled"


def _job_ids(producer: Producer, name: str) -> Iterator[str]:
    return (job_id.decode() for job_id in producer._redis.lrange(keys.batch_jobs(name), 0, -1))
