"""The users of deploy/acl/users.acl on a real server: each can do its part, and nothing else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError
from worker_harness import MODEL, QUEUE, producer_for, running_worker, wait_until

from headrace.producer import Producer
from headrace.producer.embedded import find_server
from headrace.shared import keys
from headrace.shared.errors import ServerUnavailable
from headrace.shared.job import TASK

ACL_FILE = Path(__file__).parents[2] / "deploy" / "acl" / "users.acl"


class Server:
    """A server with the users of the ACL file, and clients for each of them."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def client(self, user: str) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket), username=user, password=f"CHANGE-ME-{user}")

    def denials(self) -> list[tuple[str, str, str]]:
        """What was refused: who, why, what."""
        with self.client("admin") as admin:
            log: Any = admin.acl_log()
            return [(entry["username"], entry["reason"], entry["object"]) for entry in log]

    def answers(self) -> bool:
        try:
            with self.client("admin") as admin:
                return bool(admin.ping())
        except redis.RedisError:
            return False


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("acl")
    options = ("--port", "0", "--unixsocket", "s", "--dir", str(folder), "--save", "", "--aclfile", str(ACL_FILE))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([find_server(), *options], cwd=folder, stdout=log, stderr=log)
    try:
        made = Server(folder / "s")
        wait_until(lambda: made.answers() or process.poll() is not None, "the server to answer")
        assert process.poll() is None, (folder / "log").read_text()
        yield made
    finally:
        process.terminate()
        process.wait()


def test_each_user_can_do_its_part(server: Server) -> None:
    with (
        running_worker(server.client("worker")) as running,
        producer_for(server.client("producer")) as producer,
        producer_for(server.client("submitter")) as submitter,
        producer_for(server.client("collector")) as collector,
    ):
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 3}, {"prompt": ""}], batch="night")
        assert {result.ok for result in collector.batch(batch.name).results(timeout=20)} == {True, False}
        submitter.submit_many([{"prompt": "b", "max_tokens": 3}, {"prompt": ""}], batch="other")
        assert sum(result.ok for result in producer.batch("other").results(timeout=20)) == 1
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        assert collector.job(submitter.submit("a", max_tokens=3).id).result(timeout=20).text == "bcd"
        assert {status.name for status in producer.status().batches} == {"night", "other"}
        assert collector.status().workers[0].name == running.worker.name
        running.model.gate.clear()
        long = [producer.submit("a", max_tokens=60) for _ in range(6)]
        wait_until(lambda: [job.status() for job in long].count("started") == 4, "four jobs to start")
        assert all(job.cancel() for job in long)
        running.model.gate.set()
        codes = {str(result.error and result.error.code) for result in (job.result(timeout=20) for job in long)}
        assert codes == {"cancelled"}
        assert producer.submit_many([{"prompt": "a"}] * 9, batch="gone").cancel() > 0
        assert producer.submit_many([{"prompt": "a" * 99}], batch="long").wait(timeout=20).failed == 1
        assert producer.batch("long").retry().count == 1
        assert [result.ok for result in collector.batch("long").results(timeout=20)] == [False]
        running.worker._rq.last_cleaned_at = None
        running.worker._keeper._sweep_due_s = running.worker._keeper._rq_beat_due_s = 0.0
        running.worker._keeper.beat()
    assert server.denials() == []


def test_a_workers_user_can_take_over_a_dead_workers_jobs(server: Server) -> None:
    with producer_for(server.client("producer")) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 6, batch="b")
        with running_worker(server.client("worker")) as dead, server.client("worker") as connection:
            dead.model.gate.clear()
            wait_until(lambda: connection.zcard(f"rq:wip:{QUEUE}") == 4, "four jobs to start")
            dead.worker._keeper.leave()
            connection.delete(keys.lease(dead.worker.name))
            with running_worker(server.client("worker")):
                assert len(list(batch.results(timeout=20))) == 6
            dead.model.gate.set()
    assert server.denials() == []


def tenants_producer(client: redis.Redis, tenant: str) -> Producer:
    return Producer(connection=client, model=MODEL, tenant=tenant)


@pytest.fixture
def tenants(server: Server) -> dict[str, redis.Redis]:
    """Clients of two tenants, the second's user made from the template as its comment says."""
    template = next(line for line in ACL_FILE.read_text().splitlines() if line.startswith("user tenant-acme"))
    with server.client("admin") as admin:
        admin.execute_command("ACL", "SETUSER", *acl_words(template.removeprefix("user ").replace("acme", "bob")))
    return {name: server.client(f"tenant-{name}") for name in ("acme", "bob")}


def acl_words(text: str) -> list[str]:
    """A line of an ACL file as the command's arguments: a selector, in parentheses, is one."""
    rules, _, selector = text.partition(" (")
    return [*rules.split(), f"({selector}"]


def test_a_tenant_can_do_its_part_with_its_own_keys_alone(server: Server, tenants: dict[str, redis.Redis]) -> None:
    with running_worker(server.client("worker")) as running, tenants_producer(tenants["acme"], "acme") as producer:
        items = [{"prompt": "a", "max_tokens": 3}, {"prompt": ""}, {"prompt": "b", "max_tokens": 3, "priority": "high"}]
        batch = producer.submit_many(items, batch="acme.night")
        assert [result.ok for result in batch.results(timeout=20)].count(True) == 2
        assert producer.submit("a", max_tokens=3, priority="low").result(timeout=20).text == "bcd"
        status = producer.status()
        assert [(found.name, found.progress.completed) for found in status.batches] == [("acme.night", 2)]
        assert {found.name: found.finished for found in status.queues} == {
            f"{QUEUE}~{priority}~acme": 1 for priority in ("high", "normal", "low")
        }
        running.model.gate.clear()
        long = [producer.submit("a", max_tokens=60) for _ in range(6)]
        wait_until(lambda: [job.status() for job in long].count("started") == 4, "four jobs to start")
        assert all(job.cancel() for job in long)
        running.worker._keeper.look()
        running.model.gate.set()
        codes = {str(result.error and result.error.code) for result in (job.result(timeout=20) for job in long)}
        assert codes == {"cancelled"}
        assert producer.submit_many([{"prompt": "a"}] * 9, batch="acme.gone").cancel() > 0
    assert server.denials() == []


def test_a_tenant_reads_nothing_of_anothers_and_sends_nothing_in_its_name(
    server: Server, tenants: dict[str, redis.Redis]
) -> None:
    with (
        running_worker(server.client("worker")),
        tenants_producer(tenants["bob"], "bob") as bob,
        tenants_producer(tenants["acme"], "acme") as acme,
    ):
        batch = bob.submit_many([{"prompt": "a", "max_tokens": 3}], batch="bob.secret")
        (result,) = batch.results(timeout=20)
        waiting = bob.submit("a", max_tokens=60)
        for attempt in (
            lambda: acme.job(result.job_id).result(timeout=1),
            lambda: acme.job(result.job_id).status(),
            lambda: acme.job(waiting.id).cancel(),
            lambda: acme.batch(batch.name).progress(),
            lambda: list(acme.batch(batch.name).results(timeout=1)),
            lambda: acme.batch(batch.name).cancel(),
        ):
            with pytest.raises(ServerUnavailable, match="permissions"):
                attempt()
        with pytest.raises(ServerUnavailable, match="permissions"):
            Producer(connection=tenants["acme"], model=MODEL, tenant="bob").submit("a")
        with pytest.raises(ServerUnavailable, match="permissions"):
            Producer(connection=tenants["acme"], model=MODEL).submit("a")
        assert waiting.result(timeout=20).ok


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "headrace:result:bob-1"),
        ("GET", "headrace:checkpoint:bob-1"),
        ("GET", "headrace:result:0123"),
        ("HGETALL", "rq:job:bob-1"),
        ("HSET", "rq:job:bob-1", "status", "canceled"),
        ("XREAD", "STREAMS", "headrace:batch:bob.b:done", "0"),
        ("LRANGE", f"rq:queue:{QUEUE}~high~bob", "0", "-1"),
        ("RPUSH", f"rq:queue:{QUEUE}~high~bob", "acme-1"),
        ("RPUSH", f"rq:queue:{QUEUE}", "acme-1"),
        ("RPUSH", f"rq:queue:{QUEUE}~high", "acme-1"),
        ("ZADD", f"headrace:waiting:{QUEUE}~high", "-1", f"{QUEUE}~high~acme"),
        ("HSET", f"headrace:lanes:{QUEUE}", "clock1", "0"),
        ("HSET", "headrace:receipts:w", "acme-1", f"0 {QUEUE}~high~acme"),
        ("DEL", f"headrace:arrivals:{QUEUE}"),
        ("DEL", "rq:queues"),
        ("SADD", "headrace:cancels:w", "bob-1"),
        ("SADD", "rq:job:bob-1:dependents", "acme-1"),
        ("PUBLISH", "rq:pubsub:w", "{}"),
        ("SMEMBERS", "rq:queues"),
        ("ZREVRANGE", "headrace:batches", "0", "-1"),
    ],
)
def test_a_tenants_user_is_refused_what_is_not_its_own(
    tenants: dict[str, redis.Redis], command: tuple[str, ...]
) -> None:
    with pytest.raises(NoPermissionError):
        tenants["acme"].execute_command(*command)
    script = "return redis.call(unpack(ARGV))"
    with pytest.raises(redis.ResponseError, match=r"permission|can't access|ACL"):
        tenants["acme"].eval(script, 0, *command)


def test_a_tenant_can_not_have_a_worker_write_for_it_what_it_may_not(
    server: Server, tenants: dict[str, redis.Redis]
) -> None:
    """Ids in its lane, batches, tenants and lanes in its jobs: what they say of others is not believed."""
    client = tenants["acme"]
    with running_worker(server.client("worker")) as running, tenants_producer(tenants["bob"], "bob") as bob:
        running.model.gate.clear()
        theirs = [bob.submit("a", max_tokens=60) for _ in range(6)]
        wait_until(lambda: [job.status() for job in theirs].count("started") == 4, "bob's jobs to start")
        bob.submit_many([], batch="bob.night")
        forged = {
            "acme-batch": ({"prompt": "a", "max_tokens": 2}, "bob.night"),
            "acme-tenant": ({"prompt": "a", "max_tokens": 2, "tenant": "bob"}, None),
            "acme-lane": ({"prompt": "a", "max_tokens": 2}, None),
        }
        for job_id, (request, batch) in forged.items():
            data = json.dumps([TASK, None, [], {"request": request, "batch": batch}])
            fields = {"status": "queued", "origin": f"{QUEUE}~high~bob", "created_at": "2026-01-01T00:00:00.000000Z"}
            client.hset(keys.rq_job(job_id), mapping=fields | {"data": data, "group_id": "bob", "timeout": -1})
            client.rpush(keys.rq_queue(f"{QUEUE}~high~acme"), job_id, *(job.id for job in theirs))
        client.sadd(keys.arrivals(QUEUE), f"{QUEUE}~high~acme")
        running.model.gate.set()
        with tenants_producer(client, "acme") as acme:
            results = {job_id: acme.job(job_id).result(timeout=20) for job_id in forged}
        assert {job_id: result.error and result.error.code.value for job_id, result in results.items()} == {
            "acme-batch": "invalid_request",
            "acme-tenant": "invalid_request",
            "acme-lane": None,
        }
        assert all(job.result(timeout=20).ok for job in theirs)
        assert bob.batch("bob.night").progress().done == 0
        with server.client("admin") as admin:
            assert admin.zrange(f"rq:failed:{QUEUE}~high~acme", 0, -1) == [b"acme-batch", b"acme-tenant"]
            assert admin.exists(f"rq:finished:{QUEUE}~high~bob", f"rq:failed:{QUEUE}~high~bob") == 0


@pytest.mark.parametrize("user", ["worker", "producer", "submitter", "collector", "tenant-acme"])
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "dir", "/tmp"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("ACL", "LIST"),
        ("MONITOR",),
        ("SHUTDOWN",),
        ("FUNCTION", "LIST"),
        ("SCRIPT", "FLUSH"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("MODULE", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("GET", "somebody-elses"),
        ("SET", "somebody-elses", "1"),
    ],
)
def test_no_user_has_more_than_its_part(server: Server, user: str, command: tuple[str, ...]) -> None:
    with server.client(user) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


@pytest.mark.parametrize(
    ("user", "script"),
    [
        ("worker", "return redis.call('FLUSHALL')"),
        ("worker", "return redis.call('GET', 'somebody-elses')"),
        ("producer", "return redis.call('DEL', 'headrace:workers')"),
        ("producer", "return redis.call('LRANGE', 'rq:queue:another', 0, -1)"),
        ("submitter", "return redis.call('GET', 'headrace:result:x')"),
        ("collector", "return 1"),
    ],
)
def test_a_script_can_do_no_more_than_its_user(server: Server, user: str, script: str) -> None:
    with server.client(user) as client, pytest.raises(redis.ResponseError, match=r"permission|can't access|ACL"):
        client.eval(script, 0)


def test_a_submitter_reads_no_results_and_a_collector_sends_no_jobs(server: Server) -> None:
    with (
        server.client("producer") as own,
        producer_for(server.client("submitter")) as submitter,
        producer_for(server.client("collector")) as collector,
    ):
        with Producer(connection=own, model=MODEL) as producer, running_worker(server.client("worker")):
            job = producer.submit("a", max_tokens=3)
            assert job.result(timeout=20).text == "bcd"
        with pytest.raises(ServerUnavailable, match="permissions"):
            submitter.job(job.id).result(timeout=1)
        with server.client("submitter") as client, pytest.raises(NoPermissionError):
            client.lrange(keys.rq_queue(QUEUE), 0, -1)
        with pytest.raises(ServerUnavailable, match="permissions"):
            collector.submit("a")
