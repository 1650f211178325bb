"""Redis conversations as generators, so that the sync and the asyncio client share one implementation.

A step function yields Calls, is sent their replies, and returns its outcome; it never touches a connection. `drive`
runs it on a sync client, headrace.producer.aio on an asyncio one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from headrace.shared.connection import unavailable, without_password
from headrace.shared.errors import ServerUnavailable, SettingsError

Word = str | bytes | int | float
Command = tuple[Word, ...]
T = TypeVar("T")
# A single blocking read; below the socket timeout of redis-py's clients (5 s).
MAX_BLOCK_S = 1.0


@dataclass(frozen=True)
class Call:
    """Commands to send in one round trip; the reply is the list of theirs. `atomic` makes them one MULTI/EXEC."""

    commands: Sequence[Command]
    atomic: bool = False
    blocking: bool = False


Steps = Generator[Call, list[Any], T]


def drive(client: redis.Redis, where: str, steps: Steps[T]) -> T:
    """Run the steps to their outcome. Raises ServerUnavailable, naming `where`, for anything that Redis refuses."""
    try:
        call = next(steps)
        while True:
            try:
                reply = _send(client, call)
            except redis.RedisError as error:
                raise server_error(where, error) from error
            call = steps.send(reply)
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome


def _send(client: redis.Redis, call: Call) -> list[Any]:
    if len(call.commands) == 1 and not call.atomic:
        execute: Any = client.execute_command
        return [execute(*call.commands[0])]
    with client.pipeline(transaction=call.atomic) as pipeline:
        queue: Any = pipeline.execute_command
        for command in call.commands:
            queue(*command)
        replies: list[Any] = pipeline.execute()
        return replies


def server_error(where: str, error: Exception) -> ServerUnavailable:
    """The error to show for one of redis-py's."""
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return unavailable(where, error)
    return ServerUnavailable(f"Redis at {without_password(where)} refused a command: {error}")


def describe(connection: Any) -> str:
    """The address of a client that the caller made, for error texts.

    Raises SettingsError if it decodes replies: a job's data is compressed and is no text.
    """
    settings = connection.connection_pool.connection_kwargs
    if settings.get("decode_responses"):
        raise SettingsError("the connection has decode_responses=True; headrace needs one that returns bytes")
    if "path" in settings:
        return f"unix://{settings['path']}"
    return f"redis://{settings.get('host', 'localhost')}:{settings.get('port', 6379)}/{settings.get('db', 0)}"


def text(value: Any) -> str:
    """A reply as text; "" for nil. Bytes that are not UTF-8 are shown escaped."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return "" if value is None else str(value)


def fields(reply: Mapping[Any, Any]) -> dict[str, str]:
    """HGETALL's reply as text."""
    return {text(name): text(value) for name, value in reply.items()}


def stream_entries(reply: Any) -> list[tuple[str, dict[str, str]]]:
    """The entries of XREAD's reply for one stream, in either of the shapes that redis-py's protocols give."""
    if not reply:
        return []
    if isinstance(reply, Mapping):
        (entries,) = reply.values()
        entries = entries[0] if len(entries) == 1 and isinstance(entries[0], list) else entries
    else:
        entries = reply[0][1]
    return [(text(entry_id), fields(values)) for entry_id, values in entries]
