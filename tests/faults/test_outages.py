"""A server that refuses connections, is out of memory, slow or silent, and real workers that live through it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from faults.durable_server import DurableServer
from faults.proxy import Proxy
from faults.real_workers import (
    MODEL,
    PATIENCE_S,
    RealWorkers,
    all_good,
    attempts,
    last,
    submit,
    texts,
    wait_for_progress,
)
from tiny_model import save_tiny_model
from worker_harness import wait_until

from headrace.producer import Producer, ServerUnavailable
from headrace.shared import keys

# How long the server is away: twice the workers' lease. A machine that is busy with other things may keep a
# worker from beating for a second or so, which must not look like a death.
LEASE_S = 4.0
OUTAGE_S = float(os.environ.get("OUTAGE_S", "8"))
Start = Callable[..., RealWorkers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / MODEL, max_positions=2048)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    made = Path(tempfile.mkdtemp(prefix="outage-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(folder: Path) -> Iterator[DurableServer]:
    made = DurableServer(folder)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def proxy(server: DurableServer, folder: Path) -> Iterator[Proxy]:
    made = Proxy(str(folder / "p.sock"), server.url.removeprefix("unix://"))
    yield made
    made.close()


@pytest.fixture
def direct(server: DurableServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def start(model: Path, folder: Path) -> Iterator[Start]:
    """Start a worker at each of some URLs."""
    made: list[RealWorkers] = []

    def start_at(*urls: str, **plan: object) -> RealWorkers:
        made.append(RealWorkers(model, folder, **plan))
        for url in urls:
            made[-1].start(url)
        return made[-1]

    yield start_at
    for each in made:
        each.stop()


def test_workers_live_through_a_server_that_refuses_connections(server: DurableServer, start: Start) -> None:
    with Producer(server.url, model=MODEL, patience_s=OUTAGE_S + 30) as producer:
        workers = start(server.url, server.url, lease_s=LEASE_S)
        expected = texts(all_good(submit(producer, "undisturbed", 60)))
        batch = submit(producer, "disturbed", 60)
        wait_for_progress(batch, 5)
        server.kill()
        last(OUTAGE_S)
        assert workers.all_live()
        server.start()
        results = all_good(batch)
    assert texts(results) == expected
    # Nobody took the other for dead when the server was back.
    assert attempts(results) == {1}, workers.logs()


def test_workers_live_through_a_server_that_is_out_of_memory(
    server: DurableServer, direct: redis.Redis, start: Start
) -> None:
    with Producer(server.url, model=MODEL, patience_s=0.3) as producer:
        workers = start(server.url, server.url, lease_s=LEASE_S)
        expected = texts(all_good(submit(producer, "undisturbed", 60)))
        batch = submit(producer, "disturbed", 60)
        wait_for_progress(batch, 5)
        direct.config_set("maxmemory", 1)
        completed = batch.progress().completed
        with pytest.raises(ServerUnavailable, match="is out of memory: raise its maxmemory"):
            producer.submit("one more")
        last(OUTAGE_S)
        assert batch.progress().completed <= completed + 1
        assert all(direct.exists(keys.lease(workers.name(number, direct) or "")) for number in (0, 1))
        direct.config_set("maxmemory", 0)
        results = all_good(batch)
    assert texts(results) == expected
    assert attempts(results) == {1}, workers.logs()
    assert "Redis is out of memory" in workers.log(0)


def test_a_slow_server_costs_time_and_nothing_else(server: DurableServer, proxy: Proxy, start: Start) -> None:
    with Producer(connection=redis.Redis.from_url(proxy.url), model=MODEL) as producer:
        workers = start(proxy.url, proxy.url, lease_s=6.0)
        expected = texts(all_good(submit(producer, "undisturbed", 40)))
        proxy.delay(0.25)
        results = all_good(submit(producer, "disturbed", 40))
    assert texts(results) == expected
    assert attempts(results) == {1}, workers.logs()


@pytest.mark.parametrize("socket_timeout_s", [1.0, 60.0], ids=["noticed", "unnoticed"])
def test_a_worker_that_the_network_has_lost_is_replaced_and_fenced_and_works_on(
    server: DurableServer, proxy: Proxy, direct: redis.Redis, start: Start, socket_timeout_s: float
) -> None:
    with Producer(server.url, model=MODEL) as producer:
        workers = start(proxy.url, server.url, socket_timeout_s=socket_timeout_s)
        wait_until(lambda: workers.name(0, direct) and workers.name(1, direct), "both workers", PATIENCE_S)
        expected = texts(all_good(submit(producer, "undisturbed", 16, 1200)))
        lost = str(workers.name(0, direct))
        batch = submit(producer, "disturbed", 16, 1200)
        wait_until(
            lambda: direct.scard(f"rq:worker:{lost}:executions") > 1, "the first worker to have jobs", PATIENCE_S
        )
        proxy.stall()
        wait_until(lambda: f"{lost} is gone" in workers.log(1), "the second worker to take them over", PATIENCE_S)
        proxy.flow()
        results = all_good(batch)
        assert texts(results) == expected
        assert 2 in attempts(results)
        assert ("does not answer" in workers.log(0)) == (socket_timeout_s == 1.0)
        workers.kill(1)
        again = all_good(submit(producer, "again", 4))
    assert {result.worker for result in again} == {lost}
