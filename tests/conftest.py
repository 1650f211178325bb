"""Fixtures that all tests share: a real Valkey server, and clients of it and of fakeredis."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest
import redis

from headrace.producer.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of a real server that lives as long as the test session."""
    with EmbeddedServer() as server:
        yield server.url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The real server's URL, the server emptied."""
    client = redis.Redis.from_url(redis_server)
    client.flushall()
    client.close()
    return redis_server


@pytest.fixture(params=["fakeredis", "valkey"])
def redis_client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """An empty server: once fakeredis, once the real one."""
    client: redis.Redis
    if request.param == "fakeredis":
        client = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    else:
        client = redis.Redis.from_url(request.getfixturevalue("redis_url"))
    yield client
    client.close()
