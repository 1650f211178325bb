"""Priorities and tenants, from the producer to the result, on a real server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import redis
from rq import Queue
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer
from worker_harness import MODEL, QUEUE, WorkerThread, producer_for, running_worker, successors, wait_until

from headrace.producer import Job, Producer
from headrace.shared import keys
from headrace.shared.schema import Result
from headrace.worker.settings import QueueSettings

HIGH, LOW = f"{QUEUE}~high", f"{QUEUE}~low"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def started(client: redis.Redis, lane: str) -> list[str]:
    return [member.decode().partition(":")[0] for member in client.zrange(f"rq:wip:{lane}", 0, -1)]


def waiting(client: redis.Redis, lane: str) -> list[str]:
    return [job_id.decode() for job_id in client.lrange(keys.rq_queue(lane), 0, -1)]


def in_order_of_finishing(client: redis.Redis, results: list[Result]) -> list[Result]:
    """RQ's streams have the server's times."""
    return sorted(results, key=lambda result: client.xrange(keys.rq_results(result.job_id))[-1][0].decode())


def test_a_tenant_with_thousands_of_jobs_delays_one_with_ten_by_no_more_than_its_share(client: redis.Redis) -> None:
    """Both have jobs of 41 tokens: of the first thirty jobs at most the ten, and as many of the other's, have ended."""
    with producer_for(client) as producer:
        large = producer.submit_many(
            ({"prompt": "a", "max_tokens": 40} for _ in range(2_000)), batch="big.b", tenant="big"
        )
        small = producer.submit_many([{"prompt": "b", "max_tokens": 40}] * 10, batch="small.b", tenant="small")
        with running_worker(client) as running:
            assert all(result.ok for result in small.results(timeout=60))
            running.model.gate.clear()
            # By the server's clock: this thread may come late.
            ((last, _),) = client.xrevrange(keys.batch_done("small.b"), count=1)
            before = client.xrange(keys.batch_done("big.b"), max=last.split(b"-")[0])
            assert len(before) <= 10 + 2 * 4  # its share, and what was running at either end
            assert large.cancel() > 1_900


def test_tenants_share_by_tokens_and_not_by_jobs(client: redis.Redis) -> None:
    with producer_for(client) as producer:
        jobs = {"short": 200, "long": 50}
        for tenant, max_tokens in (("short", 9), ("long", 49)):
            items = [{"prompt": "a", "max_tokens": max_tokens}] * jobs[tenant]
            producer.submit_many(items, batch=f"{tenant}.b", tenant=tenant)
        with running_worker(client) as running:
            wait_until(lambda: producer.batch("short.b").progress().done >= 100, "half of the short jobs to end")
            running.model.gate.clear()
            tokens = {
                tenant: progress.prompt_tokens + progress.completion_tokens
                for tenant in jobs
                for progress in [producer.batch(f"{tenant}.b").progress()]
            }
            assert 0.7 < tokens["short"] / tokens["long"] < 1.4, tokens
            for tenant in jobs:
                producer.batch(f"{tenant}.b").cancel()


def test_high_goes_before_normal_before_low_and_none_starves(client: redis.Redis) -> None:
    with producer_for(client) as producer:
        jobs: dict[str, list[Job]] = {
            priority: [producer.submit("a", max_tokens=5, priority=priority) for _ in range(24)]
            for priority in ("low", "normal", "high")
        }
        with running_worker(client, slots=1):
            results = [job.result(timeout=20) for of_one in jobs.values() for job in of_one]
    priority_of = {job.id: priority for priority, of_one in jobs.items() for job in of_one}
    order = [priority_of[result.job_id] for result in in_order_of_finishing(client, results)]
    first = Counter(order[:24])
    assert first["high"] >= 18 - 1
    assert first["normal"] >= 2
    assert first["low"] >= 2
    assert Counter(order[:40])["high"] == 24


def test_an_urgent_job_does_not_wait_behind_what_was_claimed_before_it(client: redis.Redis) -> None:
    """A worker of 16 slots holds two jobs more, prepared, in its own list."""
    with running_worker(client, slots=16) as running, producer_for(client) as producer:
        running.model.gate.clear()
        early = [producer.submit("a", max_tokens=9 + (number == 0) * -6) for number in range(17)]
        wait_until(lambda: len(started(client, QUEUE)) == 17, "all to start")
        urgent = producer.submit("a", max_tokens=2, priority="high")
        wait_until(lambda: urgent.status() == "started", "the urgent job to be claimed ahead")
        running.model.gate.set()
        results = [job.result(timeout=20) for job in (*early, urgent)]
    order = [result.job_id for result in in_order_of_finishing(client, results)]
    assert order.index(urgent.id) < order.index(early[16].id)


def test_an_idle_worker_notices_a_job_in_a_lane(client: redis.Redis) -> None:
    with running_worker(client) as running, producer_for(client) as producer:
        wait_until(lambda: running.worker._courier.num_looks > 2, "the worker to be idle")
        assert producer.submit("a", max_tokens=3, priority="low").result(timeout=20).text == "bcd"
        assert producer.submit("a", max_tokens=3, tenant="acme").result(timeout=20).text == "bcd"


def test_a_dead_workers_jobs_return_to_the_front_of_their_lanes(client: redis.Redis) -> None:
    with producer_for(client) as producer:
        jobs = [producer.submit("a", max_tokens=20, priority="high", tenant="acme") for _ in range(8)]
        lane = f"{HIGH}~acme"
        with running_worker(client) as dead:
            dead.model.gate.clear()
            wait_until(lambda: len(started(client, lane)) == 4, "four jobs to start")
            with producer_for(client) as other:
                behind = other.submit("a", max_tokens=20)
            dead.pretend_to_die()
            with running_worker(client, slots=1) as successor:
                successor.model.gate.clear()
                wait_until(lambda: len(waiting(client, lane)) == 7, "seven to wait in their lane again")
                assert set(waiting(client, lane)) | set(started(client, lane)) == {job.id for job in jobs}
                assert waiting(client, lane)[-3:] == [job.id for job in jobs[5:]]
                assert waiting(client, QUEUE) == [behind.id]
                wait_until(
                    lambda: client.exists(keys.receipts(dead.worker.name)) == 0, "the dead worker to be forgotten"
                )
                successor.model.gate.set()
                results = [job.result(timeout=30) for job in (*jobs, behind)]
            dead.model.gate.set()
    assert {result.text for result in results} == {successors("a", 20)}


def test_claimed_jobs_of_a_dead_worker_return_to_the_lane_of_their_receipt(client: redis.Redis) -> None:
    with producer_for(client) as producer:
        job = producer.submit("a", max_tokens=3, tenant="acme")
    lane = f"{QUEUE}~normal~acme"
    client.lmove(keys.rq_queue(lane), keys.claims("dead"), "LEFT", "RIGHT")
    client.hset(keys.receipts("dead"), job.id, f"100 {lane}")
    client.hset(keys.rq_job(job.id), "origin", f"{QUEUE}~high~bob")
    client.sadd(keys.WORKERS, "dead")
    with running_worker(client):
        assert job_result(client, job.id).ok
        found = RqJob.fetch(job.id, connection=client, serializer=JSONSerializer)
        assert found.origin == lane
    assert client.exists(keys.receipts("dead")) == 0


def job_result(client: redis.Redis, job_id: str) -> Result:
    with producer_for(client) as producer:
        return producer.job(job_id).result(timeout=20)


def test_a_job_handed_back_on_a_stop_waits_at_the_front_of_its_lane_and_is_charged_for_what_it_took(
    client: redis.Redis,
) -> None:
    with producer_for(client) as producer:
        jobs = [producer.submit("a", max_tokens=50, tenant="acme") for _ in range(3)]
        running = WorkerThread(client, slots=2, drain_timeout_s=0.0)
        running.model.hold_after = 5
        wait_until(lambda: not running.model.gate.is_set(), "five passes")
        running.worker.ask_to_stop()
        running.worker.ask_to_stop()
        running.model.gate.set()
        running.join()
    lane = f"{QUEUE}~normal~acme"
    assert waiting(client, lane) == [job.id for job in jobs]
    places = [keys.waiting_lanes(QUEUE, "normal"), keys.idle_lanes(QUEUE, "normal")]
    (score,) = (score for place in places if (score := client.zscore(place, lane)) is not None)
    assert 2 * 5 <= score <= 2 * 8
    assert client.exists(keys.receipts(running.worker.name), keys.claims(running.worker.name)) == 0


def test_rqs_own_tools_see_lanes_and_can_put_jobs_into_them(client: redis.Redis) -> None:
    with producer_for(client) as producer:
        producer.submit("a", max_tokens=3, priority="high")
        bad = producer.submit([300], max_tokens=3, tenant="acme")  # beyond the fake model's vocabulary
        lane = f"{QUEUE}~normal~acme"
        with running_worker(client) as running:
            assert bad.result(timeout=20).error is not None
            names = {queue.name for queue in Queue.all(connection=client, serializer=JSONSerializer)}
            assert names == {HIGH, lane}
            queue = Queue(lane, connection=client, serializer=JSONSerializer)
            wait_until(lambda: queue.failed_job_registry.count == 1, "RQ to know of the failure")
            client.delete(keys.result(bad.id))
            running.worker._keeper.leave()
            queue.failed_job_registry.requeue(bad.id)
            assert queue.count == 1
            running.worker._rq.announce_lanes()
            wait_until(lambda: client.exists(keys.result(bad.id)), "the requeued job to be found")
            status = {found.name: found for found in producer.status().queues}
            assert (status[lane].failed, status[HIGH].finished) == (1, 1)


def test_cancelling_reaches_jobs_in_lanes(client: redis.Redis) -> None:
    with running_worker(client) as running, producer_for(client) as producer:
        running.model.gate.clear()
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 50}] * 6, batch="acme.b", tenant="acme")
        lane = f"{QUEUE}~normal~acme"
        wait_until(lambda: len(started(client, lane)) == 4, "four jobs to start")
        assert [found.waiting for found in producer.status().queues] == [2]
        assert batch.cancel() == 6
        running.model.gate.set()
        assert batch.wait(timeout=20).cancelled == 6
        assert waiting(client, lane) == []


def test_an_expired_execution_in_a_lane_goes_back_there(client: redis.Redis) -> None:
    """All workers gone at once, and their leases too: RQ's registry is all that is left."""
    with producer_for(client) as producer:
        job = producer.submit("a", max_tokens=3, priority="low")
    client.ltrim(keys.rq_queue(LOW), 1, 0)
    client.hset(keys.rq_job(job.id), mapping={"status": "started", "worker_name": "gone", "origin": QUEUE})
    client.zadd(f"rq:wip:{LOW}", {f"{job.id}:execution": 1})
    with running_worker(client):
        assert job_result(client, job.id).text == "bcd"
    assert client.zscore(f"rq:finished:{LOW}", job.id) is not None


def test_a_producers_tenant_and_priority_are_those_of_what_names_none(client: redis.Redis) -> None:
    with Producer(connection=client, model=MODEL, tenant="acme", priority="low") as producer:
        job = producer.submit("a")
        urgent = producer.submit("a", priority="high")
        batch = producer.submit_many([{"prompt": "a"}, {"prompt": "a", "tenant": "bob"}])
    assert job.id.startswith("acme-")
    assert batch.name.startswith("acme.")
    assert waiting(client, f"{LOW}~acme")[0] == job.id
    assert waiting(client, f"{HIGH}~acme") == [urgent.id]
    (refused,) = (entry[b"job_id"].decode() for _, entry in client.xrange(keys.batch_done(batch.name)))
    error = job_result(client, refused).error
    assert error is not None
    assert "tenant is 'bob'" in error.message


def test_a_queues_name_can_not_be_a_lanes() -> None:
    with pytest.raises(Exception, match="--priority and --tenant choose the lane"):
        QueueSettings(queue=HIGH)
