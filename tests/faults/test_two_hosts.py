"""A worker whose host loses its network: no connection is closed, and no packet arrives."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from faults.namespaces import NotAllowed, TwoHosts
from faults.real_workers import MODEL, PATIENCE_S, RealWorkers, all_good, attempts, submit, texts
from tiny_model import save_tiny_model
from worker_harness import wait_until

from headrace.producer import Producer
from headrace.producer.embedded import find_server

PORT = 6379


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        made = TwoHosts()
    except NotAllowed as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


@pytest.fixture
def server(hosts: TwoHosts) -> Iterator[str]:
    """The URL, on this host, of a server that the other host reaches by its address."""
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # a path short enough for a socket's
    listen = ("--bind", hosts.server_ip, "--port", str(PORT), "--protected-mode", "no", "--unixsocket", "s")
    command = ["ip", "netns", "exec", hosts.server, find_server(), *listen, "--dir", str(folder), "--save", ""]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_until((folder / "s").exists, "the server to listen")
        yield f"unix://{folder / 's'}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def test_a_worker_that_lost_its_network_is_replaced_and_fenced_and_works_on(
    hosts: TwoHosts, server: str, tmp_path: Path
) -> None:
    workers = RealWorkers(save_tiny_model(tmp_path / MODEL, max_positions=2048), tmp_path)
    try:
        with Producer(server, model=MODEL) as producer, redis.Redis.from_url(server) as direct:
            workers.start(f"redis://{hosts.server_ip}:{PORT}/0", namespace=hosts.worker)
            workers.start(server)
            wait_until(lambda: workers.name(0, direct) and workers.name(1, direct), "both workers", PATIENCE_S)
            expected = texts(all_good(submit(producer, "undisturbed", 16, 1200)))
            lost = str(workers.name(0, direct))
            batch = submit(producer, "disturbed", 16, 1200)
            in_hand = f"rq:worker:{lost}:executions"
            wait_until(lambda: direct.scard(in_hand) > 1, "the distant worker to have jobs", PATIENCE_S)
            hosts.cut()
            wait_until(lambda: f"{lost} is gone" in workers.log(1), "the other worker to take them over", PATIENCE_S)
            hosts.mend()
            results = all_good(batch)
            assert texts(results) == expected
            assert 2 in attempts(results)
            workers.kill(1)
            again = all_good(submit(producer, "again", 4))
            assert {result.worker for result in again} == {lost}
    finally:
        workers.stop()
