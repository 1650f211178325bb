"""Priorities and tenants as producers send them."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest
import redis

from headrace.producer import Producer
from headrace.producer.enqueue import check_batch_name
from headrace.producer.settings import resolve
from headrace.shared import keys
from headrace.shared.errors import InvalidRequest, SettingsError

QUEUE = "headrace-m"


@pytest.fixture
def client() -> redis.Redis:
    return fakeredis.FakeRedis(server=fakeredis.FakeServer())


def producer_on(client: redis.Redis, **options: Any) -> Producer:
    return Producer(connection=client, model="m", **options)


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({}, QUEUE),
        ({"priority": "normal"}, QUEUE),
        ({"priority": "high"}, f"{QUEUE}~high"),
        ({"tenant": "acme"}, f"{QUEUE}~normal~acme"),
        ({"tenant": "acme", "priority": "low"}, f"{QUEUE}~low~acme"),
    ],
)
def test_a_job_waits_in_the_lane_of_its_priority_and_tenant(
    client: redis.Redis, fields: dict[str, str], lane: str
) -> None:
    job = producer_on(client).submit("x", **fields)
    assert client.lrange(keys.rq_queue(lane), 0, -1) == [job.id.encode()]
    assert client.hget(keys.rq_job(job.id), "origin") == lane.encode()
    assert client.smembers(keys.RQ_QUEUES) == {keys.rq_queue(lane).encode()}
    assert client.smembers(keys.arrivals(QUEUE)) == ({lane.encode()} if lane != QUEUE else set())


def test_a_batch_is_one_tenants(client: redis.Redis) -> None:
    producer = producer_on(client)
    batch = producer.submit_many([{"prompt": "x"}, {"prompt": "x", "tenant": "bob"}], batch="acme.b", tenant="acme")
    assert client.llen(keys.rq_queue(f"{QUEUE}~normal~acme")) == 1
    refused = next(batch.results(timeout=5.0))
    assert refused.error is not None
    assert refused.job_id.startswith("acme-")
    assert refused.error.param == "tenant"
    assert client.zrange(keys.batches("acme"), 0, -1) == [b"acme.b"]
    assert client.exists(keys.BATCHES) == 0


def test_a_batchs_name_says_whose_it_is(client: redis.Redis) -> None:
    with pytest.raises(SettingsError, match=r"must begin with 'acme\.', .* use 'acme\.night'"):
        producer_on(client, tenant="acme").submit_many(["x"], batch="night")
    assert check_batch_name("acme.night", "acme") == "acme.night"
    assert producer_on(client, tenant="acme").submit_many(["x"]).name.startswith("acme.")


def test_a_producer_with_a_tenant_sends_for_no_other(client: redis.Redis) -> None:
    producer = producer_on(client, tenant="acme")
    with pytest.raises(InvalidRequest, match="'bob', but this producer's is 'acme'"):
        producer.submit("x", tenant="bob")
    with pytest.raises(InvalidRequest, match="'bob', but this producer's is 'acme'"):
        producer.submit_many(["x"], tenant="bob")
    assert client.keys() == []


def test_the_tenant_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TENANT", "acme")
    assert resolve(None, None, None, None).route.tenant == "acme"
    assert resolve(None, None, None, None, "bob").route.tenant == "bob"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tenant": "a-b"}, "tenant is 'a-b'"),
        ({"priority": "urgent"}, "one of high, normal, low"),
        ({"queue": "q~high"}, "--priority and --tenant choose the lane"),
    ],
)
def test_what_can_not_be_a_lane_is_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        Producer(connection=fakeredis.FakeRedis(), **options)


def test_status_shows_lanes_as_queues_and_a_tenant_its_own(client: redis.Redis) -> None:
    operator = producer_on(client)
    operator.submit("x")
    operator.submit("x", priority="high")
    producer_on(client, tenant="acme").submit_many(["x"] * 3, batch="acme.b")
    producer_on(client, tenant="bob").submit("x")
    assert {queue.name: queue.waiting for queue in operator.status().queues} == {
        QUEUE: 1,
        f"{QUEUE}~high": 1,
        f"{QUEUE}~normal~acme": 3,
        f"{QUEUE}~normal~bob": 1,
    }
    own = producer_on(client, tenant="acme").status()
    assert [(queue.name, queue.waiting) for queue in own.queues] == [
        (f"{QUEUE}~high~acme", 0),
        (f"{QUEUE}~normal~acme", 3),
        (f"{QUEUE}~low~acme", 0),
    ]
    assert [batch.name for batch in own.batches] == ["acme.b"]


def test_a_tenants_cancel_marks_its_job_and_writes_to_no_workers_keys(client: redis.Redis) -> None:
    producer = producer_on(client, tenant="acme")
    running, waits = producer.submit("x"), producer.submit("x")
    client.hset(keys.rq_job(running.id), mapping={"status": "started", "worker_name": "w"})
    assert running.cancel() is True
    assert waits.cancel() is True
    assert waits.result(timeout=0).error.code == "cancelled"
    assert client.hget(keys.rq_job(running.id), "headrace_cancel") == b"1"
    assert client.exists(keys.cancels("w")) == 0
