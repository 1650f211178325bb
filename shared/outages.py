"""Errors that pass: the server is away, fails over to another or has no memory, and will answer later."""

from __future__ import annotations

import redis
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, OutOfMemoryError

# What a server answers while it can't take a command that it will take later.
_PASSING_ANSWERS = ("UNBLOCKED", "NOREPLICAS", "MISCONF", "MASTERDOWN", "TRYAGAIN", "BUSY ")
_PASSING_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, NoScriptError)


def is_out_of_memory(error: Exception) -> bool:
    """True if the server refused a write for its `maxmemory`; servers before 7 say so in the middle of another text."""
    return isinstance(error, OutOfMemoryError) or "-OOM command not allowed" in str(error)


def is_passing(error: Exception) -> bool:
    """True if the same command may well be answered later."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    return isinstance(error, _PASSING_ERRORS) or is_out_of_memory(error) or str(error).startswith(_PASSING_ANSWERS)


def trouble(error: Exception) -> str:
    """What a log says of an error that is waited out."""
    if is_out_of_memory(error):
        return "Redis is out of memory (raise its maxmemory)"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return f"Redis does not answer ({error})"
    return f"Redis refused a command ({error})"
