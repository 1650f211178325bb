"""Fenced writes: a set of Redis commands that run together, or not at all if the job has moved on.

RQ's own methods are called with a pipeline that is never executed; the commands they leave in it are sent to one Lua
script that checks the fence first. One script call a job is atomic (no other client sees half of it), and many jobs'
calls share one round trip.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import ResponseError

logger = logging.getLogger("headrace.worker")

Command = tuple[Any, ...]

# ARGV of both fences ends in the commands, each as its number of words and then the words.
_RUN = """
local at = first
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
return 1
"""

# A claimed job may start once: its id is still in this worker's claim list, and the job still waits.
_START = f"""
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
if redis.call('HGET', KEYS[2], 'status') ~= 'queued' then return 0 end
local first = 2
{_RUN}
"""

# A running job may be written to by the execution that the registry of started jobs names.
_FINISH = f"""
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
if redis.call('HGET', KEYS[2], 'status') ~= 'started' then return 0 end
local first = 2
{_RUN}
"""

# Fill a claim list from a queue up to n ids, unless all work is suspended or the claimer has lost its lease. It
# answers with the whole list, so that ids whose answer was lost on the way are met again.
_CLAIM = """
if redis.call('EXISTS', KEYS[3]) == 0 or redis.call('EXISTS', KEYS[4]) == 1 then return {} end
for i = redis.call('LLEN', KEYS[2]) + 1, tonumber(ARGV[1]) do
  if not redis.call('LMOVE', KEYS[1], KEYS[2], 'LEFT', 'RIGHT') then break end
end
return redis.call('LRANGE', KEYS[2], 0, -1)
"""

# Give a claimed job that has not started back to the front of its queue; drop it if it no longer waits.
_UNCLAIM = """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
if redis.call('HGET', KEYS[2], 'status') == 'queued' then redis.call('LPUSH', KEYS[3], ARGV[1]) end
return 1
"""


class Verdict(IntEnum):
    """What a fence answered."""

    REFUSED = 0
    DONE = 1
    BROKEN = 2  # a key that the job leads to holds something else, so that it can't be written, now or later


@dataclass(frozen=True, kw_only=True)
class FencedWrite:
    """Commands for one job, with what must hold for them to run."""

    fence: str  # the key that is looked into: a claim list, or the registry of started jobs
    member: str  # the job id in the one, "job:execution" in the other
    job_key: str
    commands: Sequence[Command]


class Fences:
    """The scripts, on one connection. Every call is one round trip, however many jobs it carries."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._start = connection.register_script(_START)
        self._finish = connection.register_script(_FINISH)
        self._claim = connection.register_script(_CLAIM)
        self._unclaim = connection.register_script(_UNCLAIM)

    def record(self) -> Pipeline:
        """A pipeline to call RQ's methods with; it is read with `commands_of` and never executed."""
        return self._connection.pipeline(transaction=False)

    def claim(
        self, *, queue_key: str, claims_key: str, lease_key: str, suspended_key: str, count: int
    ) -> list[bytes | str]:
        """Fill a claim list up to `count` job ids from a queue, and return all that it holds."""
        return list(self._claim(keys=[queue_key, claims_key, lease_key, suspended_key], args=[count]))

    def start(self, writes: Sequence[FencedWrite]) -> list[Verdict]:
        """Start claimed jobs; each in its own transaction."""
        return self._run(self._start, writes)

    def finish(self, writes: Sequence[FencedWrite]) -> list[Verdict]:
        """Write to running jobs; each in its own transaction."""
        return self._run(self._finish, writes)

    def unclaim(self, claims: Sequence[tuple[str, str, str, str]]) -> list[Verdict]:
        """Give claimed jobs back: (claim list, job id, job's key, queue's key) each."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for claims_key, job_id, job_key, queue_key in claims:
                self._unclaim(keys=[claims_key, job_key, queue_key], args=[job_id], client=pipeline)
            answers = execute(pipeline)
        return [_verdict(job_key, answer) for (_, _, job_key, _), answer in zip(claims, answers, strict=True)]

    def _run(self, script: Any, writes: Sequence[FencedWrite]) -> list[Verdict]:
        if not writes:
            return []
        with self._connection.pipeline(transaction=False) as pipeline:
            for write in writes:
                script(
                    keys=[write.fence, write.job_key],
                    args=[write.member, *_flatten(write.commands)],
                    client=pipeline,
                )
            answers = execute(pipeline)
        return [_verdict(write.job_key, answer) for write, answer in zip(writes, answers, strict=True)]


def execute(pipeline: Pipeline) -> list[Any]:
    """A pipeline's answers. A key that holds something else than it should answers with its ResponseError, for it is
    one job's own fault, and trying again can't help; any other error is raised.
    """
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        wrong_key = type(answer) is ResponseError and any(words in str(answer) for words in _WRONG_KEY)
        if isinstance(answer, Exception) and not wrong_key:
            raise answer
    return answers


_WRONG_KEY = ("WRONGTYPE", "not an integer", "would overflow", "invalid expire time")


def _verdict(job_key: str, answer: Any) -> Verdict:
    if isinstance(answer, ResponseError):
        logger.error("a write for %s failed: %s", job_key, answer)
        return Verdict.BROKEN
    return Verdict(answer)


def commands_of(pipeline: Pipeline) -> list[Command]:
    """The commands that were recorded in a pipeline."""
    return [tuple(arguments) for arguments, _ in pipeline.command_stack]


def _flatten(commands: Sequence[Command]) -> list[Any]:
    words: list[Any] = []
    for command in commands:
        words.append(len(command))
        words.extend(command)
    return words
