"""Errors that pass: the server is away, fails over to another or has no memory, and will answer later."""

from __future__ import annotations

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
)

# What a server answers while it can't take a command that it will take later.
_PASSING_ANSWERS = ("UNBLOCKED ", "NOREPLICAS ", "MISCONF ", "TRYAGAIN ", "BUSY ")
_PASSING_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, MasterDownError, NoScriptError)


def is_out_of_memory(error: Exception) -> bool:
    """True if the server refused a write for its `maxmemory`; servers before 7 say so in the middle of another text."""
    return isinstance(error, OutOfMemoryError) or (
        isinstance(error, redis.ResponseError) and "-OOM command not allowed" in _answer(error)
    )


def is_passing(error: Exception) -> bool:
    """True for an error of redis-py's after which the same command may well be answered later."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    if isinstance(error, _PASSING_ERRORS) or is_out_of_memory(error):
        return True
    return isinstance(error, redis.ResponseError) and _answer(error).startswith(_PASSING_ANSWERS)


def _answer(error: redis.ResponseError) -> str:
    """What the server said. Before that redis-py may quote the command, in which anything may stand."""
    return str(error).rpartition(" of pipeline caused error: ")[2]


def trouble(error: Exception) -> str:
    """What a log says of an error that is waited out."""
    if is_out_of_memory(error):
        return "Redis is out of memory (raise its maxmemory)"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"Redis does not answer ({error})"
    return f"Redis refused a command ({error})"
