"""URLs of a server behind Redis Sentinel, and clients of it that follow a failover."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry

SCHEMES = ("redis+sentinel", "rediss+sentinel")
FORM = "redis+sentinel://[user:password@]host:26379,host:26379/SERVICE[/DB]"
DEFAULT_PORT = 26379
# A sentinel answers at once or not at all; the next is asked then.
_SENTINEL_TIMEOUT_S = 2.0
_SENTINEL_ARGUMENTS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, kw_only=True)
class SentinelUrl:
    """What such a URL says: the sentinels, the service that they watch, and arguments for connections to either."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    server_arguments: dict[str, Any]
    sentinel_arguments: dict[str, Any]


def is_sentinel_url(url: str) -> bool:
    """True if the URL's scheme is one of ours."""
    return url.partition("://")[0].lower() in SCHEMES


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Read a URL of the form FORM.

    User, password, DB and the query's arguments are for the server, as in redis://; `sentinel_username` and
    `sentinel_password` are for the sentinels. With rediss+sentinel:// both are reached through TLS. Raises ValueError.
    """
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not service:
        raise ValueError(f"it names no service; the form is {FORM}")
    if database and not database.isdecimal():
        raise ValueError(f"its database is {database!r} and must be a number; the form is {FORM}")
    arguments = dict(parse_qsl(parts.query, keep_blank_values=True))
    own: dict[str, Any] = {word: arguments.pop(name) for name, word in _SENTINEL_ARGUMENTS.items() if name in arguments}
    plain = ("redis", f"{login}{at}localhost", f"/{database}" if database else "", urlencode(arguments), "")
    server: dict[str, Any] = parse_url(urlunsplit(plain))  # type: ignore[no-untyped-call]
    server.pop("host")
    if parts.scheme.lower().startswith("rediss"):
        tls = {"ssl": True, **{name: value for name, value in server.items() if name.startswith("ssl_")}}
        server |= tls
        own |= tls
    own |= {"socket_timeout": _SENTINEL_TIMEOUT_S, "socket_connect_timeout": _SENTINEL_TIMEOUT_S}
    return SentinelUrl(
        addresses=tuple(_address(host) for host in hosts.split(",")),
        service=service,
        server_arguments=server,
        sentinel_arguments=own,
    )


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError(f"it has an empty host; the form is {FORM}")
    return parts.hostname, parts.port or DEFAULT_PORT


class _Sentinel(redis.sentinel.Sentinel):
    """Asks the sentinels for one thread at a time: redis-py reorders its list of them, and two threads that do so at
    once drop one from it for good."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]
        self._one_asks = threading.Lock()

    def discover_master(self, service_name: str) -> Any:
        with self._one_asks:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]


class _Pool(redis.sentinel.SentinelConnectionPool):
    """Connections to the primary; closing them closes those to the sentinels too."""

    def close(self) -> None:
        super().close()
        for sentinel in self.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncSentinel(redis.asyncio.sentinel.Sentinel):
    """As _Sentinel, for tasks."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]
        self._one_asks = asyncio.Lock()

    async def discover_master(self, service_name: str) -> Any:
        async with self._one_asks:
            return await super().discover_master(service_name)


class _AsyncPool(redis.asyncio.sentinel.SentinelConnectionPool):
    """As _Pool."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def primary_client(url: str, **arguments: Any) -> redis.Redis:
    """A client of the service's primary. Each new connection asks the sentinels who that is. Raises ValueError."""
    found = parse_sentinel_url(url)
    own = {**found.sentinel_arguments, "retry": Retry(NoBackoff(), 0)}
    sentinel = _Sentinel(found.addresses, sentinel_kwargs=own, **{**arguments, **found.server_arguments})
    client: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]
        found.service, connection_pool_class=_Pool
    )
    return client


def async_primary_client(url: str, **arguments: Any) -> redis.asyncio.Redis:
    """As primary_client, for asyncio."""
    found = parse_sentinel_url(url)
    own = {**found.sentinel_arguments, "retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
    sentinel = _AsyncSentinel(found.addresses, sentinel_kwargs=own, **{**arguments, **found.server_arguments})
    client: redis.asyncio.Redis = sentinel.master_for(found.service, connection_pool_class=_AsyncPool)
    return client
