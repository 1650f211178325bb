"""Redis conversations as generators, so that the sync and the asyncio client share one implementation.

A step function yields Calls, is sent their replies, and returns its outcome; it never touches a connection. `drive`
runs it on a sync client, headrace.producer.aio on an asyncio one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from headrace.shared.backoff import Backoff
from headrace.shared.connection import server_error
from headrace.shared.errors import SettingsError
from headrace.shared.outages import is_passing, trouble

Word = str | bytes | int | float
Command = tuple[Word, ...]
T = TypeVar("T")
# A single blocking read; below the socket timeout of redis-py's clients (5 s).
MAX_BLOCK_S = 1.0
DEFAULT_PATIENCE_S = 30.0

logger = logging.getLogger("headrace.producer")


@dataclass(frozen=True)
class Call:
    """Commands to send in one round trip; the reply is the list of theirs. `atomic` makes them one MULTI/EXEC."""

    commands: Sequence[Command]
    atomic: bool = False
    blocking: bool = False


Steps = Generator[Call, list[Any], T]


class Patience:
    """One call's attempts: every call may be sent again after its answer was lost, for what it does it does once."""

    def __init__(self, where: str, seconds: float) -> None:
        self._where = where
        self._give_up = time.monotonic() + seconds
        self._backoff = Backoff()

    def pause_s(self, error: redis.RedisError) -> float:
        """How long to wait before the call is sent again. Raises ServerUnavailable if it isn't to be."""
        first, pause_s = self._backoff.is_first, self._backoff.next_s()
        left_s = self._give_up - time.monotonic()
        if not is_passing(error) or pause_s > left_s:
            raise server_error(self._where, error) from error
        if first:
            logger.warning("%s; trying again for %.0f s", trouble(error), left_s)
        return pause_s


def drive(client: redis.Redis, where: str, steps: Steps[T], patience_s: float = 0.0) -> T:
    """Run the steps to their outcome. While the server is away, failing over or out of memory, each call is sent again
    for `patience_s`. Raises ServerUnavailable, naming `where`, for anything else that Redis refuses, and after that.
    """
    try:
        call = next(steps)
        while True:
            call = steps.send(_answer(client, where, call, patience_s))
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome


def _answer(client: redis.Redis, where: str, call: Call, patience_s: float) -> list[Any]:
    patience = Patience(where, patience_s)
    while True:
        try:
            return _send(client, call)
        except redis.RedisError as error:
            pause_s = patience.pause_s(error)
        time.sleep(pause_s)


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


def describe(connection: Any) -> str:
    """The address of a client that the caller made, for error texts.

    Raises SettingsError if it decodes replies: a job's data is compressed and is no text.
    """
    pool = connection.connection_pool
    settings = pool.connection_kwargs
    if settings.get("decode_responses"):
        raise SettingsError("the connection has decode_responses=True; headrace needs one that returns bytes")
    if (service := getattr(pool, "service_name", None)) is not None:
        return f"redis+sentinel://…/{service}"
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
