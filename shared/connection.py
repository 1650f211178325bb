"""Opening a connection to Redis (or Valkey, or anything that speaks its protocol)."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio

from headrace.shared.errors import ServerUnavailable, SettingsError

DEFAULT_URL = "redis://localhost:6379/0"
CONNECT_TIMEOUT_S = 5.0


def connect(url: str) -> redis.Redis:
    """Connect and check that the server answers.

    Raises SettingsError for a URL of the wrong form, ServerUnavailable if the server doesn't answer.
    """
    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
    except ValueError as error:
        raise SettingsError(f"{without_password(url)!r} is not a Redis URL: {error}") from None
    try:
        client.ping()
    except redis.RedisError as error:
        raise unavailable(url, error) from None
    return client


def connect_async(url: str) -> redis.asyncio.Redis:
    """An asyncio client; it connects at its first command. Raises SettingsError for a URL of the wrong form."""
    try:
        return redis.asyncio.Redis.from_url(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
    except ValueError as error:
        raise SettingsError(f"{without_password(url)!r} is not a Redis URL: {error}") from None


def unavailable(url: str, error: Exception) -> ServerUnavailable:
    """The error to show when Redis at `url` doesn't answer."""
    return ServerUnavailable(
        f"no answer from Redis at {without_password(url)}: {error}. "
        "Start a server there, or name another with --redis or HEADRACE_REDIS_URL."
    )


def without_password(url: str) -> str:
    """The URL as it may be shown: a password in it becomes ***."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = parts.username or ""
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def as_text(value: bytes | str) -> str:
    """A reply as text, whether or not the client decodes. Raises UnicodeDecodeError if it isn't UTF-8."""
    return value if isinstance(value, str) else value.decode()
