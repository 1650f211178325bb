"""Which of a real server's refusals are worth waiting for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from headrace.shared.backoff import FIRST_PAUSE_S, MAX_PAUSE_S, Backoff
from headrace.shared.outages import is_out_of_memory, is_passing, trouble

SCRIPT = "return redis.call('SET', KEYS[1], 1)"


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made
        made.execute_command("REPLICAOF", "NO", "ONE")
        made.config_set("maxmemory", 0)
        made.config_set("min-replicas-to-write", 0)


def refusals(client: redis.Redis) -> list[redis.RedisError]:
    """What the server says to a command, a script and a transaction that write."""

    def in_a_transaction() -> None:
        with client.pipeline() as pipeline:
            pipeline.set("a", 1).execute()

    found = []
    for write in (lambda: client.set("a", 1), lambda: client.eval(SCRIPT, 1, "a"), in_a_transaction):
        with pytest.raises(redis.RedisError) as raised:
            write()
        found.append(raised.value)
    return found


def test_a_full_server_is_waited_for(client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    for error in refusals(client):
        assert is_out_of_memory(error)
        assert is_passing(error)
        assert "raise its maxmemory" in trouble(error)


def test_a_primary_without_replicas_is_waited_for(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 1)
    assert all(is_passing(error) for error in refusals(client))


def test_a_replica_is_waited_for_to_be_a_primary(client: redis.Redis) -> None:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    assert all(is_passing(error) for error in refusals(client))
    client.config_set("replica-serve-stale-data", "no")
    with pytest.raises(redis.RedisError) as raised:
        client.get("a")
    client.config_set("replica-serve-stale-data", "yes")
    assert is_passing(raised.value)


def test_what_will_not_pass_is_not_waited_for(client: redis.Redis) -> None:
    client.set("a", "text")
    for refused in (lambda: client.hget("a", "b"), lambda: client.execute_command("NONSENSE")):
        with pytest.raises(redis.RedisError) as raised:
            refused()
        assert not is_passing(raised.value)
    with client.pipeline() as pipeline, pytest.raises(redis.RedisError) as raised:
        pipeline.hset("a", "NOREPLICAS of pipeline caused error: NOREPLICAS", "-OOM command not allowed").execute()
    assert not is_passing(raised.value)
    assert not is_passing(ValueError("NOREPLICAS "))
    assert not is_passing(redis.AuthenticationError("WRONGPASS"))


def test_a_script_runs_as_a_whole_or_not_at_all_when_memory_ends(client: redis.Redis) -> None:
    """What the fences rely on: the server looks at its memory before a script's first write, and no more after it."""
    first_adds = "redis.call('SET', 'x', 1) redis.call('SET', 'y', 1)"
    first_removes = "redis.call('DEL', 'none') redis.call('SET', 'x', 1) redis.call('SET', 'y', 1)"
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.eval(first_adds, 0)
    assert client.mget("x", "y") == [None, None]
    client.eval(first_removes, 0)
    assert client.mget("x", "y") == [b"1", b"1"]
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 200_000)
    client.eval("for i = 1, 50 do redis.call('SET', 'big' .. i, string.rep('x', 10000)) end", 0)
    assert len(client.keys("big*")) == 50
    assert is_out_of_memory(refusals(client)[0])


def test_pauses_double_to_a_limit_and_differ() -> None:
    backoff = Backoff()
    assert backoff.is_first
    pauses = [backoff.next_s() for _ in range(12)]
    assert not backoff.is_first
    for number, pause_s in enumerate(pauses):
        longest_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**number)
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses[-5:])) > 1
    assert backoff.reset()
    assert not backoff.reset()
    assert backoff.next_s() <= FIRST_PAUSE_S
