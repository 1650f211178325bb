"""Opening a connection to Redis (or Valkey, or anything that speaks its protocol)."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis
import redis.asyncio

from headrace.shared.errors import ServerUnavailable, SettingsError
from headrace.shared.outages import is_out_of_memory
from headrace.shared.sentinel import async_primary_client, is_sentinel_url, primary_client

DEFAULT_URL = "redis://localhost:6379/0"
CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 5.0
_SECRET_ARGUMENTS = {"password", "ssl_password", "sentinel_password"}


def connect(url: str) -> redis.Redis:
    """Connect and check that the server answers.

    Raises SettingsError for a URL of the wrong form, ServerUnavailable if the server doesn't answer.
    """
    client = open_client(url)
    try:
        client.ping()
    except redis.RedisError as error:
        client.close()
        raise unavailable(url, error) from None
    return client


def open_client(url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A client that connects at its first command. Raises SettingsError for a URL of the wrong form."""
    opened = primary_client if is_sentinel_url(url) else redis.Redis.from_url
    try:
        client = opened(url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=socket_timeout_s)
        _check_arguments(client.connection_pool)
    except ValueError as error:
        raise _not_a_url(url, error) from None
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """An asyncio client; it connects at its first command. Raises SettingsError for a URL of the wrong form."""
    opened = async_primary_client if is_sentinel_url(url) else redis.asyncio.Redis.from_url
    try:
        client = opened(url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=SOCKET_TIMEOUT_S)
        _check_arguments(client.connection_pool)
    except ValueError as error:
        raise _not_a_url(url, error) from None
    return client


def _check_arguments(pool: Any) -> None:
    """Raise ValueError for an argument that redis-py would stumble over at the first command, with a TypeError."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        if (unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error))) is None:
            raise
        raise ValueError(f"redis-py knows no argument {unknown[1]!r}") from None


def _not_a_url(url: str, error: ValueError) -> SettingsError:
    if _is_readable(url):
        return SettingsError(f"{without_password(url)!r} is not a Redis URL: {error}")
    # What the parser says quotes parts of it, and any part may be one of the password.
    hint = "percent-encode what is not a letter or digit in its user and password (/ is %2F, @ is %40, # is %23)"
    return SettingsError(f"{without_password(url)!r} is not a Redis URL that can be read: {hint}")


def unavailable(url: str, error: Exception) -> ServerUnavailable:
    """The error to show when Redis at `url` doesn't answer."""
    return ServerUnavailable(
        f"no answer from Redis at {without_password(url)}: {error}. "
        "Start a server there, or name another with --redis or HEADRACE_REDIS_URL."
    )


def server_error(url: str, error: Exception) -> ServerUnavailable:
    """The error to show for one of redis-py's."""
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return unavailable(url, error)
    if is_out_of_memory(error):
        return ServerUnavailable(
            f"Redis at {without_password(url)} is out of memory: raise its maxmemory, or let workers and collectors "
            "empty it, then try again"
        )
    return ServerUnavailable(f"Redis at {without_password(url)} refused a command: {error}")


def without_password(url: str) -> str:
    """The URL as it may be shown: a password in it becomes ***; of one that can't be read nothing is shown."""
    if not _is_readable(url):
        return f"{url.partition('://')[0]}://***" if "://" in url else url if "@" not in url else "***"
    parts = urlsplit(url)
    query = parts.query
    arguments = parse_qsl(query, keep_blank_values=True)
    if any(name in _SECRET_ARGUMENTS for name, _ in arguments):
        shown = [(name, "***" if name in _SECRET_ARGUMENTS else value) for name, value in arguments]
        query = urlencode(shown, safe="*/:")
    host = parts.netloc.rpartition("@")[2]
    netloc = parts.netloc if parts.password is None else f"{parts.username or ''}:***@{host}"
    ending = "".join(f"{mark}{text}" for mark, text in (("?", query), ("#", parts.fragment)) if text)
    slashes = "//" if "://" in url else ""  # urlunsplit would drop those of unix:///
    return f"{parts.scheme}:{slashes}{netloc}{parts.path}{ending}"


def _is_readable(url: str) -> bool:
    """True if what stands in the URL is where it should be, so that a password can only be where one is looked for."""
    try:
        parts = urlsplit(url)
        for host in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        return False
    return bool(parts.scheme) and "@" not in parts.path + parts.fragment and "@" not in parts.netloc.rpartition("@")[0]


def as_text(value: bytes | str) -> str:
    """A reply as text, whether or not the client decodes. Raises UnicodeDecodeError if it isn't UTF-8."""
    return value if isinstance(value, str) else value.decode()
