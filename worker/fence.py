"""Fenced writes: a set of Redis commands that run together, or not at all if the job has moved on.

RQ's own methods are called with a pipeline that is never executed; the commands they leave in it are sent to one Lua
script that checks the fence first. A script call is atomic (no other client sees half of it); it carries many jobs,
each with a fence of its own, and many calls share one round trip.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import redis
from redis.client import Pipeline
from redis.commands.core import Script
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.lanes import Lane
from headrace.worker.lanes import CLAIM, FORGET, Claims, Receipt, claim_keys, forget_call, read_claims

logger = logging.getLogger("headrace.worker")

Command = tuple[Any, ...]

# A call carries many jobs: the number of words that they have in common, these words, then for each job the number of
# its words and the words. A script defines `one`, which does what is to be done for one job. A job that raises an error
# answers with its text and ends there; the others do not notice.
_EACH = """
local answers, at = {}, tonumber(ARGV[1]) + 2
while at <= #ARGV do
  local last = at + tonumber(ARGV[at])
  local fine, answer = pcall(one, at + 1, last)
  if not fine then answer = type(answer) == 'table' and answer.err or tostring(answer) end
  answers[#answers + 1] = answer
  at = last + 1
end
return answers
"""
_MOST_JOBS_A_CALL = 32  # so that other clients of the server wait for a few milliseconds at most

# Commands, each as its number of words and the words.
_COMMANDS = """
  while at <= last do
    local words = tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, at + words))
    at = at + words + 1
  end
  return 1
"""

# A job's words are its fence, its member and its key, then the commands.
_RUN = f"""
  at = at + 3
{_COMMANDS}
end
"""

# A claimed job may start once: its id is still in this worker's claim list, and the job still waits.
_START = f"""
local function one(at, last)
  if redis.call('LREM', ARGV[at], 1, ARGV[at + 1]) == 0 then return 0 end
  if redis.call('HGET', ARGV[at + 2], 'status') ~= 'queued' then return 0 end
{_RUN}
"""

# A running job may be written to by the execution that the registry of started jobs names.
_FINISH = f"""
local function one(at, last)
  if not redis.call('ZSCORE', ARGV[at], ARGV[at + 1]) then return 0 end
  if redis.call('HGET', ARGV[at + 2], 'status') ~= 'started' then return 0 end
{_RUN}
"""

# Give a claimed job that has not started back to the front of its lane; drop it if it no longer waits.
_UNCLAIM = f"""
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
if redis.call('HGET', KEYS[2], 'status') == 'queued' then redis.call('LPUSH', KEYS[3], ARGV[1]) end
local at, last = 2, #ARGV
{_COMMANDS}
"""

# Drop a claim of what is no job, or waits no longer. It may have left the claim list, but has its receipt once.
_DROP = f"""
redis.call('LREM', KEYS[1], 0, ARGV[1])
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
local at, last = 2, #ARGV
{_COMMANDS}
"""


class Verdict(IntEnum):
    """What a fence answered."""

    REFUSED = 0
    DONE = 1
    BROKEN = 2  # a key that the job leads to holds something else, so that it can't be written, now or later
    DONE_FOR_NONE = 3  # done, and no other job waits for it


@dataclass(frozen=True, kw_only=True)
class FencedWrite:
    """Commands for one job, with what must hold for them to run."""

    fence: str  # the key that is looked into: a claim list, or the registry of started jobs
    member: str  # the job id in the one, "job:execution" in the other
    job_key: str
    commands: Sequence[Command]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedWrite:
    """Values for one job, for a script that has the fence and the commands in it."""

    script: str
    job_key: str
    common: tuple[Any, ...]  # what all jobs of a call must share
    words: Sequence[Any]


Write = FencedWrite | ScriptedWrite


class Fences:
    """The scripts, on one connection. Every call is one round trip, however many jobs it carries."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._scripts: dict[str, Script] = {}
        self._claim = connection.register_script(CLAIM)
        self._unclaim = connection.register_script(_UNCLAIM)
        self._drop = connection.register_script(_DROP)
        self._forget = connection.register_script(FORGET)

    def record(self) -> Pipeline:
        """A pipeline to call RQ's methods with; it is read with `commands_of` and never executed."""
        return self._connection.pipeline(transaction=False)

    def claim(self, queue: str, worker: str, count: int) -> Claims:
        """Fill a worker's claim list up to `count` job ids from a queue and its lanes, and return all that it holds."""
        return read_claims(self._claim(keys=claim_keys(queue, worker), args=[count, queue]), worker)

    def start(self, writes: Sequence[Write]) -> list[Verdict]:
        """Start claimed jobs; each in its own transaction."""
        return self._run(_START, writes)

    def finish(self, writes: Sequence[Write]) -> list[Verdict]:
        """Write to running jobs; each in its own transaction."""
        return self._run(_FINISH, writes)

    def unclaim(self, claims: Sequence[tuple[FencedWrite, str]]) -> list[Verdict]:
        """Give claimed jobs back, each to the queue beside it. A write's fence is the claim list."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for write, queue_key in claims:
                self._unclaim(
                    keys=[write.fence, write.job_key, queue_key],
                    args=[write.member, *_flatten(write.commands)],
                    client=pipeline,
                )
            answers = execute(pipeline)
        return [_verdict(write.job_key, answer) for (write, _), answer in zip(claims, answers, strict=True)]

    def drop(self, claims_key: str, raw_id: bytes | str, receipt: Receipt | None) -> None:
        """Drop a claim of what can't be started, and take back what its lane was charged for it."""
        if receipt is None:
            self._connection.lrem(claims_key, 0, raw_id)  # type: ignore[arg-type]  # bytes go out as they are
            return
        receipts_key = keys.receipts(receipt.worker)
        self._drop(keys=[claims_key, receipts_key], args=[raw_id, *_flatten(receipt.correct(0))])

    def forget_lanes(self, lanes: Sequence[Lane]) -> None:
        """Have RQ forget those of the lanes of which nothing is left."""
        with self._connection.pipeline(transaction=False) as pipeline:
            for lane in lanes:
                lane_keys, arguments = forget_call(lane)
                self._forget(keys=lane_keys, args=arguments, client=pipeline)
            execute(pipeline)

    def _run(self, script: str, writes: Sequence[Write]) -> list[Verdict]:
        """Send the writes, the FencedWrites among them through `script`."""
        if not writes:
            return []
        with self._connection.pipeline(transaction=False) as pipeline:
            for source, common, jobs in _calls(script, writes):
                args = [len(common), *common]
                for words in jobs:
                    args.append(len(words))
                    args.extend(words)
                self._script(source)(args=args, client=pipeline)
            answers = [answer for call in execute(pipeline) for answer in call]
        return [_verdict(write.job_key, answer) for write, answer in zip(writes, answers, strict=True)]

    def _script(self, each: str) -> Script:
        if each not in self._scripts:
            self._scripts[each] = self._connection.register_script(each + _EACH)
        return self._scripts[each]


def _calls(script: str, writes: Sequence[Write]) -> Iterator[tuple[str, tuple[Any, ...], list[Sequence[Any]]]]:
    """The script calls that carry the writes in their order: each one's script, common words, and words of each job."""
    jobs: list[Sequence[Any]] = []
    now: tuple[str, tuple[Any, ...]] = (script, ())
    for write in writes:
        if isinstance(write, ScriptedWrite):
            kind, words = (write.script, write.common), write.words
        else:
            kind, words = (script, ()), [write.fence, write.member, write.job_key, *_flatten(write.commands)]
        if jobs and (kind != now or len(jobs) == _MOST_JOBS_A_CALL):
            yield *now, jobs
            jobs = []
        now = kind
        jobs.append(words)
    yield *now, jobs


def execute(pipeline: Pipeline) -> list[Any]:
    """A pipeline's answers. A key that holds something else than it should answers with its ResponseError, for it is
    one job's own fault, and trying again can't help; any other error is raised.
    """
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    for answer in answers:
        wrong_key = type(answer) is ResponseError and _is_wrong_key(str(answer))
        if isinstance(answer, Exception) and not wrong_key:
            raise answer
    return answers


def _is_wrong_key(error: str) -> bool:
    return any(words in error for words in _WRONG_KEY)


_WRONG_KEY = ("WRONGTYPE", "not an integer", "would overflow", "invalid expire time")


# As redis-py has them where the server refuses the whole script and not a command in it.
_PASSING_KINDS = {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}


def _verdict(job_key: str, answer: int | bytes | str | ResponseError) -> Verdict:
    """What a script answered for a job. Raises ResponseError for an error that is not the job's own fault."""
    if isinstance(answer, int):
        return Verdict(answer)
    error = as_text(answer) if isinstance(answer, bytes | str) else str(answer)
    if not _is_wrong_key(error):
        raise _PASSING_KINDS.get(error.partition(" ")[0], ResponseError)(error)
    logger.error("a write for %s failed: %s", job_key, error)
    return Verdict.BROKEN


def commands_of(pipeline: Pipeline) -> list[Command]:
    """The commands that were recorded in a pipeline."""
    return [tuple(arguments) for arguments, _ in pipeline.command_stack]


def _flatten(commands: Sequence[Command]) -> list[Any]:
    words: list[Any] = []
    for command in commands:
        words.append(len(command))
        words.extend(command)
    return words
