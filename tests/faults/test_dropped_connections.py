"""The connection breaks at each command that a worker and a producer send, before it and after it."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from fake_worker import settle_all
from faults.proxy import Cut, Proxy
from rq import Queue
from worker_harness import MODEL, QUEUE, WorkerThread, producer_for, running_worker, successors, wait_until

from headrace.producer import AsyncProducer, Producer
from headrace.shared import keys
from headrace.shared.job import TASK
from headrace.shared.schema import Result
from headrace.worker import keeper

# Every STRIDE-th command; 1 is all of them, and takes minutes.
STRIDE = int(os.environ.get("CUT_STRIDE", "7"))
BATCH = "b"
PROMPTS = {str(number): chr(ord("a") + number) for number in range(6)}
BAD = "bad"  # an item that is refused when it is submitted


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    folder = Path(tempfile.mkdtemp(prefix="proxy-", dir="/tmp"))  # a path short enough for a socket's
    made = Proxy(str(folder / "s"), redis_url.removeprefix("unix://"))
    yield made
    made.close()
    shutil.rmtree(folder)


@pytest.fixture
def direct(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the server that nothing disturbs."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def items() -> list[dict[str, object]]:
    good = [{"id": name, "prompt": prompt, "max_tokens": 3 + int(name)} for name, prompt in PROMPTS.items()]
    return [*good, {"id": BAD, "prompt": ""}]


def assert_the_books_are_right(direct: redis.Redis, answers: Callable[[str], str]) -> None:
    """One result and one entry in the stream a job, the batch's counts right, nothing in hand and nothing waiting."""
    entries = [fields[b"job_id"].decode() for _, fields in direct.xrange(keys.batch_done(BATCH))]
    assert Counter(Counter(entries).values()) == {1: len(PROMPTS) + 1}
    results = [Result.model_validate_json(direct.get(keys.result(job_id)) or "") for job_id in entries]
    assert {str(result.id): result.text for result in results if result.ok} == {name: answers(name) for name in PROMPTS}
    counts = {name: int(direct.hget(keys.batch(BATCH), name) or 0) for name in ("total", "completed", "failed")}
    assert counts == {"total": len(PROMPTS) + 1, "completed": len(PROMPTS), "failed": 1}
    assert sorted(job_id.decode() for job_id in direct.lrange(keys.batch_jobs(BATCH), 0, -1)) == sorted(entries)
    assert direct.llen(keys.rq_queue(QUEUE)) == 0
    assert direct.zcard(f"rq:wip:{QUEUE}") == 0
    assert list(direct.scan_iter(keys.claims("*"))) == []
    assert list(direct.scan_iter(keys.checkpoint("*"))) == []


def cuts(num_commands: int) -> Iterator[tuple[int, Cut]]:
    """Where to cut, of a life with so many commands and a few more, since each cut makes it longer."""
    for number in range(1, num_commands + 1, STRIDE):
        for at, where in enumerate(Cut):
            yield number + at * STRIDE // 2, where


def everywhere(proxy: Proxy, live: Callable[[], None]) -> None:
    """Live undisturbed, and then once for each cut."""
    proxy.cut_at(10**9, Cut.BEFORE)
    live()
    tried = 0
    for number, where in cuts(proxy.num_commands):
        proxy.cut_at(number, where)
        live()
        tried += 1
    assert proxy.num_cuts > tried / 2  # a life may be shorter than another


def settled_as_expected(direct: redis.Redis) -> bool:
    return int(direct.xlen(keys.batch_done(BATCH))) == len(PROMPTS) + 1


def expected_text(name: str) -> str:
    return successors(PROMPTS[name], 3 + int(name))


def test_a_worker_loses_and_doubles_nothing_wherever_its_connection_breaks(proxy: Proxy, direct: redis.Redis) -> None:
    def live() -> None:
        direct.flushall()
        producer_for(direct).submit_many(items(), batch=BATCH)
        with redis.Redis.from_url(proxy.url, socket_timeout=10) as connection:
            WorkerThread(connection, slots=2, burst=True, checkpoint_interval_s=0.01).join()
        assert_the_books_are_right(direct, expected_text)

    everywhere(proxy, live)


def test_a_worker_that_waits_for_jobs_gets_them_wherever_its_connection_breaks(
    proxy: Proxy, direct: redis.Redis
) -> None:
    def live() -> None:
        direct.flushall()
        with (
            redis.Redis.from_url(proxy.url, socket_timeout=10) as connection,
            running_worker(connection, slots=2) as running,
        ):
            wait_until(lambda: running.worker._courier.num_looks, "the worker to have looked")
            producer_for(direct).submit_many(items(), batch=BATCH)
            wait_until(lambda: settled_as_expected(direct), "all results")
        assert_the_books_are_right(direct, expected_text)

    everywhere(proxy, live)


def test_dependents_run_wherever_the_connection_breaks(
    proxy: Proxy, direct: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_EXPIRED_SWEEP_S", 1.0)  # what RQ has left half done is found then

    def live() -> None:
        direct.flushall()
        first = producer_for(direct).submit("a", max_tokens=3)
        queue = Queue(QUEUE, connection=direct, serializer="json")
        second = queue.enqueue(TASK, kwargs={"request": {"prompt": "m", "max_tokens": 2}}, depends_on=[first.id])
        with (
            redis.Redis.from_url(proxy.url, socket_timeout=10) as connection,
            running_worker(connection, slots=2),
        ):
            assert producer_for(direct).job(second.id).result(timeout=20).text == "no"

    everywhere(proxy, live)


def echoed(name: str) -> str:
    return f"<{PROMPTS[name]}>"


def test_a_producer_loses_and_doubles_nothing_wherever_its_connection_breaks(proxy: Proxy, direct: redis.Redis) -> None:
    def live() -> None:
        direct.flushall()
        with Producer(model=MODEL, connection=redis.Redis.from_url(proxy.url)) as producer:
            batch = producer.submit_many(items(), batch=BATCH)
            alone = producer.submit("alone")
            assert direct.llen(keys.rq_queue(QUEUE)) == len(PROMPTS) + 1
            settle_all(direct, QUEUE)
            assert sorted(str(result.id) for result in batch.results(timeout=20)) == sorted([*PROMPTS, BAD])
            assert alone.result(timeout=20).text == "<alone>"
            assert batch.progress().finished
        assert_the_books_are_right(direct, echoed)

    everywhere(proxy, live)


def test_an_asyncio_producer_does_so_too(proxy: Proxy, direct: redis.Redis) -> None:
    async def act() -> None:
        client = redis.asyncio.Redis.from_url(proxy.url)
        async with client, AsyncProducer(model=MODEL, connection=client) as producer:
            batch = await producer.submit_many(items(), batch=BATCH)
            alone = await producer.submit("alone")
            await asyncio.to_thread(settle_all, direct, QUEUE)
            assert len([result async for result in batch.results(timeout=20)]) == len(PROMPTS) + 1
            assert (await alone.result(timeout=20)).text == "<alone>"

    def live() -> None:
        direct.flushall()
        asyncio.run(act())
        assert_the_books_are_right(direct, echoed)

    everywhere(proxy, live)
