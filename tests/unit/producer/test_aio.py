"""AsyncProducer, AsyncJob and AsyncBatch on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis
import redis.asyncio
from fake_worker import settle_all

from headrace.producer import AsyncProducer, BatchExists, DuplicateIds, JobNotFound, ResultTimeout, ServerUnavailable
from headrace.shared import keys

QUEUE = "headrace-m"


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(redis_url, model="m") as producer:
        yield producer


async def settle_soon(url: str) -> None:
    def settle() -> int:
        with redis.Redis.from_url(url) as client:
            return settle_all(client, QUEUE)

    await asyncio.to_thread(settle)


async def test_many_waits_at_once_all_end(producer: AsyncProducer, redis_url: str) -> None:
    jobs = [await producer.submit(f"p{i}") for i in range(150)]
    waits = [asyncio.create_task(job.result(timeout=60)) for job in jobs]
    while not producer._reads.locked():
        await asyncio.sleep(0)
    assert await jobs[0].status() == "queued"  # a command gets through while all reads are taken
    await settle_soon(redis_url)
    assert [result.text for result in await asyncio.gather(*waits)] == [f"<p{i}>" for i in range(150)]


async def test_a_batch_from_an_async_generator_is_collected(producer: AsyncProducer, redis_url: str) -> None:
    async def prompts() -> AsyncIterator[str]:
        for i in range(700):
            yield f"p{i}"

    batch = await producer.submit_many(prompts(), batch="b", max_tokens=4)
    await settle_soon(redis_url)
    texts = [result.text async for result in batch.results(timeout=30)]
    assert texts == [f"<p{i}>" for i in range(700)]
    assert (await batch.progress()).finished
    assert (await batch.wait(timeout=5)).completed == 700


async def test_cancelling_a_batch_ends_it(producer: AsyncProducer) -> None:
    batch = await producer.submit_many(["a", "b"], batch="b")
    assert await batch.cancel() == 2
    assert (await batch.wait(timeout=5)).cancelled == 2


async def test_failed_jobs_are_retried(producer: AsyncProducer, redis_url: str) -> None:
    batch = await producer.submit_many(["a", "fail"], batch="b")
    await settle_soon(redis_url)
    assert (await batch.wait(timeout=5)).failed == 1
    assert (await batch.retry("timeout")).count == 0
    assert (await batch.retry()).count == 1
    assert not (await batch.progress()).finished


async def test_cancelling_a_job_wakes_who_waits(producer: AsyncProducer) -> None:
    job = await producer.submit("a")
    wait = asyncio.create_task(job.result(timeout=30))
    assert await job.cancel() is True
    assert (await wait).error.code == "cancelled"


async def test_errors_are_those_of_the_sync_client(producer: AsyncProducer) -> None:
    await producer.submit_many(["a"], batch="b")
    with pytest.raises(BatchExists):
        await producer.submit_many(["a"], batch="b")
    with pytest.raises(DuplicateIds):
        await producer.submit_many([{"id": "a", "prompt": "1"}] * 2)
    with pytest.raises(JobNotFound):
        await producer.job("nope").result()
    with pytest.raises(ResultTimeout):
        await producer.batch("b").wait(timeout=0.05)
    assert [queue.waiting for queue in (await producer.status()).queues] == [1]


async def test_a_server_that_does_not_answer_is_named() -> None:
    async with AsyncProducer("redis://localhost:1/0") as producer:
        with pytest.raises(ServerUnavailable, match="no answer from Redis at redis://localhost:1/0"):
            await producer.submit("a")


async def test_a_connection_of_the_callers_stays_open(redis_url: str) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    async with AsyncProducer(connection=client, model="m") as producer:
        job = await producer.submit("a")
    assert await client.exists(keys.rq_job(job.id))
    await client.aclose()
