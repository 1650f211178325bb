"""The commands that queue jobs, compared with RQ's own."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime

import pytest
import redis
from rq import Queue, Retry
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from headrace.producer import enqueue
from headrace.producer.steps import Call, drive
from headrace.shared import keys
from headrace.shared.errors import InvalidRequest
from headrace.shared.job import RETRIES, RQ_RESULT_TTL_S, TASK, job_hash
from headrace.shared.schema import Request

CREATED = {"queue": "q", "model": "m", "source": "requests", "ttl_s": 60}


def send(client: redis.Redis, command: enqueue.Command) -> object:
    def steps():
        (reply,) = yield Call([command])
        return reply

    return drive(client, "redis://test", steps())


def create(client: redis.Redis, name: str, now: datetime) -> object:
    return send(client, enqueue.create_batch(name, created_at=now, **CREATED))


def test_a_jobs_hash_has_the_fields_that_rq_writes(redis_client: redis.Redis) -> None:
    request = Request(prompt="grüße", max_tokens=5)
    kwargs = {"request": {"prompt": "grüße", "max_tokens": 5}, "batch": "b"}
    queue = Queue("q", connection=redis_client, serializer=JSONSerializer)
    data = Queue.prepare_data(
        TASK,
        kwargs=kwargs,
        job_id="theirs",
        timeout=-1,
        result_ttl=RQ_RESULT_TTL_S,
        retry=Retry(max=RETRIES),
        description="headrace generate",
    )
    queue.enqueue_many([data])
    ours = job_hash(request, queue="q", batch="b")
    redis_client.hset("rq:job:ours", mapping=ours)
    theirs = redis_client.hgetall("rq:job:theirs")
    # RQ also writes the intervals between retries; without them there is no pause, which is the same as its [0].
    assert {name.encode() for name in ours} == set(theirs) - {b"retry_intervals"}
    stamps = {"created_at", "enqueued_at"}
    for name, value in ours.items():
        if name == "data":
            assert JSONSerializer.loads(zlib.decompress(value)) == JSONSerializer.loads(
                zlib.decompress(theirs[b"data"])
            )
        elif name not in stamps:
            assert str(value).encode() == theirs[name.encode()], name
        else:
            assert len(value) == len(theirs[name.encode()])


def test_rq_reads_a_queued_job(redis_client: redis.Redis) -> None:
    entry = enqueue.entry_for(Request(prompt="x", id="a"), queue="q", batch="b")
    assert send(redis_client, enqueue.send_one(entry)) == enqueue.APPLIED
    queue = Queue("q", connection=redis_client, serializer=JSONSerializer)
    assert queue.job_ids == [entry.job_id]
    job = RQJob.fetch(entry.job_id, connection=redis_client, serializer=JSONSerializer)
    assert job.kwargs == {"request": {"id": "a", "prompt": "x"}, "batch": "b"}
    assert (job.func_name, job.origin, job.get_status(), job.retries_left) == (TASK, "q", "queued", RETRIES)
    assert [queue.name for queue in Queue.all(connection=redis_client)] == ["q"]


@pytest.fixture
def batch(redis_client: redis.Redis) -> str:
    assert create(redis_client, "b", datetime.now(UTC)) == enqueue.APPLIED
    return "b"


def test_a_chunk_sent_twice_is_applied_once(redis_client: redis.Redis, batch: str) -> None:
    good = enqueue.entry_for(Request(prompt="x", id="a"), queue="q", batch=batch)
    bad = enqueue.entry_rejected(InvalidRequest("no", "prompt"), request_id="z", queue="q", batch=batch)
    command = enqueue.send_chunk([good, bad], batch=batch, total_before=0, ttl_s=60, listed=True)
    assert send(redis_client, command) == enqueue.APPLIED
    assert send(redis_client, command) == b"2"
    assert redis_client.hmget(keys.batch(batch), "total", "failed") == [b"2", b"1"]
    assert redis_client.lrange("rq:queue:q", 0, -1) == [good.job_id.encode()]
    assert redis_client.xlen(keys.batch_done(batch)) == 1
    assert redis_client.lrange(keys.batch_jobs(batch), 0, -1) == [good.job_id.encode(), bad.job_id.encode()]


def test_a_job_sent_twice_is_queued_once(redis_client: redis.Redis) -> None:
    command = enqueue.send_one(enqueue.entry_for(Request(prompt="x"), queue="q", batch=None))
    send(redis_client, command)
    send(redis_client, command)
    assert redis_client.llen("rq:queue:q") == 1


def test_the_same_request_of_a_batch_has_the_same_job_id() -> None:
    first, again = (enqueue.entry_for(Request(prompt="x", id="a"), queue="q", batch="b") for _ in range(2))
    other = enqueue.entry_for(Request(prompt="x", id="a"), queue="q", batch="c")
    assert first.job_id == again.job_id != other.job_id


def test_a_sent_job_has_the_whole_hash_whatever_stands_beside_it(redis_client: redis.Redis, batch: str) -> None:
    requests = [(Request(prompt="x", id="a"), "q"), (Request(prompt="y", id="b"), "p"), (Request(prompt="z"), "q")]
    entries = [enqueue.entry_for(request, queue=queue, batch=batch) for request, queue in requests]
    send(redis_client, enqueue.send_chunk(entries, batch=batch, total_before=0, ttl_s=60, listed=False))
    for (request, queue), entry in zip(requests, entries, strict=True):
        found = redis_client.hgetall(keys.rq_job(entry.job_id))
        expected = job_hash(request, queue=queue, batch=batch)
        assert {name.decode() for name in found} == set(expected)
        for name in set(expected) - {"created_at", "enqueued_at", "data"}:
            assert found[name.encode()] == str(expected[name]).encode()
        assert found[b"data"] == expected["data"]
    assert redis_client.lrange("rq:queue:q", 0, -1) == [entries[0].job_id.encode(), entries[2].job_id.encode()]
