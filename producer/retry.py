"""Retrying: a failed job's result is taken back and the job is queued once more, so that it has one result again.

The batch's stream says which jobs have failed. Whoever removes a job's entry, in the script that does all the rest, has
retried it; for anyone else there is nothing left to retry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.producer.batches import batch_progress
from headrace.producer.jobs import parse_result
from headrace.producer.steps import Call, Command, Steps, stream_entries, text
from headrace.shared import keys
from headrace.shared.errors import SettingsError
from headrace.shared.job import BLAME_FIELD, CANCEL_FIELD, CRASHES_FIELD
from headrace.shared.outcome import Outcome
from headrace.shared.schema import ErrorCode, Result

RETRY_CHUNK = 500
_NEVER_A_JOB = "the request was refused when it was submitted and never was a job; correct it and submit it anew"
_RESULT_EXPIRED = "its result has expired, so that nobody knows why it failed; submit it anew"
_JOB_EXPIRED = "RQ's job has expired or was deleted, and its request with it; submit it anew"
_DEFAULT_CODES = frozenset(ErrorCode) - {ErrorCode.CANCELLED}

# Replies `retried`; `expired` if the job's hash is gone; `moved` if the result, its entry or the job's state is no
# longer what the sender saw. What another user's rights could refuse comes first, so that it leaves nothing half done.
# KEYS: job, result, RQ's results, batch, its stream, its list. ARGV: id, entry, the result that was seen, name of its
# count, its prompt and completion tokens, below zero, TTL, now.
_RETRY = """
if redis.call('GET', KEYS[2]) ~= ARGV[3] then return 'moved' end
local job = redis.call('HMGET', KEYS[1], 'status', 'origin')
if not job[1] or not job[2] then return 'expired' end
if job[1] == 'queued' or job[1] == 'started' then return 'moved' end
if #redis.call('XRANGE', KEYS[5], ARGV[2], ARGV[2]) == 0 then return 'moved' end
local queue = 'rq:queue:' .. job[2]
redis.call('RPUSH', queue, ARGV[1])
redis.call('SADD', 'rq:queues', queue)
local served_by = string.match(job[2], '^(.-)~')  -- a lane
if served_by then redis.call('SADD', 'headrace:arrivals:' .. served_by, job[2]) end
redis.call('ZREM', 'rq:failed:' .. job[2], ARGV[1])
redis.call('ZREM', 'rq:canceled:' .. job[2], ARGV[1])
redis.call('XDEL', KEYS[5], ARGV[2])
redis.call('HINCRBY', KEYS[4], ARGV[4], -1)
redis.call('HINCRBY', KEYS[4], 'prompt_tokens', ARGV[5])
redis.call('HINCRBY', KEYS[4], 'completion_tokens', ARGV[6])
for i = 4, 6 do redis.call('EXPIRE', KEYS[i], ARGV[7]) end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'status', 'queued', 'enqueued_at', ARGV[8],
           'started_at', '', 'ended_at', '', 'last_heartbeat', '', 'worker_name', '')
redis.call('HDEL', KEYS[1], FIELDS)
redis.call('PERSIST', KEYS[1])
return 'retried'
""".replace("FIELDS", ", ".join(f"'{name}'" for name in (CANCEL_FIELD, CRASHES_FIELD, BLAME_FIELD)))
_RETRY_SHA = hashlib.sha1(_RETRY.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Retried:
    """How many jobs are back in the queue, and why each of the others is not, by the id of its request."""

    count: int
    skipped: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """A failure as the batch's stream has it. `raw` is its result as stored."""

    entry_id: str
    job_id: str
    outcome: str
    raw: bytes | None
    result: Result | None

    @property
    def name(self) -> str:
        return (self.result.id if self.result else None) or self.job_id


def retry_batch(name: str, codes: Collection[str], ttl_s: int) -> Steps[Retried]:
    """Queue the failed jobs of a batch once more: those with one of `codes`, or all but the cancelled ones.

    It looks at the failures that are there when it begins. Raises BatchNotFound; SettingsError for an unknown code.
    """
    wanted = _checked(codes) or _DEFAULT_CODES
    count, last_id = 0, "0-0"
    skipped: dict[str, str] = {}
    left = (yield from batch_progress(name)).done
    while left > 0:
        read = ("XREAD", "COUNT", min(left, RETRY_CHUNK), "STREAMS", keys.batch_done(name), last_id)
        entries = stream_entries((yield Call([read]))[0])
        if not entries:
            break
        last_id, left = entries[-1][0], left - len(entries)
        failed = [each for each in (yield from _failures(entries)) if _is_wanted(each, wanted)]
        found = {each.name: why for each in failed if (why := _why_not(each)) is not None}
        replies = yield from _send(name, [each for each in failed if each.name not in found], ttl_s)
        count += sum(reply == "retried" for reply in replies.values())
        skipped |= found | {job: _JOB_EXPIRED for job, reply in replies.items() if reply == "expired"}
    return Retried(count=count, skipped=skipped)


def _checked(codes: Collection[str]) -> frozenset[ErrorCode]:
    try:
        return frozenset(ErrorCode(code) for code in codes)
    except ValueError as error:
        raise SettingsError(f"{error}; error codes are {', '.join(ErrorCode)}") from None


def _failures(entries: list[tuple[str, dict[str, str]]]) -> Steps[list[_Failed]]:
    """The failures among a stream's entries, with their results."""
    ended_badly = {Outcome.FAILED.value, Outcome.CANCELLED.value}
    found = [(entry_id, values) for entry_id, values in entries if values.get("status") in ended_badly]
    if not found:
        return []
    (raws,) = yield Call([("MGET", *(keys.result(values.get("job_id", "")) for _, values in found))])
    failed: list[_Failed] = []
    for (entry_id, values), raw in zip(found, raws, strict=True):
        job_id = values.get("job_id", "")
        result = None if raw is None else parse_result(job_id, raw)
        failed.append(_Failed(entry_id=entry_id, job_id=job_id, outcome=values["status"], raw=raw, result=result))
    return failed


def _is_wanted(failed: _Failed, wanted: frozenset[ErrorCode]) -> bool:
    if failed.result is None:  # of those whose code nobody knows any more, the cancelled can still be told
        return (failed.outcome == Outcome.CANCELLED) == (wanted == {ErrorCode.CANCELLED})
    return failed.result.error is not None and failed.result.error.code in wanted


def _why_not(failed: _Failed) -> str | None:
    """Why a failure can't be retried, as far as that can be told without asking."""
    if failed.result is None:
        return _RESULT_EXPIRED
    error, by_producer = failed.result.error, failed.result.worker is None
    return _NEVER_A_JOB if by_producer and error and error.code is ErrorCode.INVALID_REQUEST else None


def _send(name: str, failed: list[_Failed], ttl_s: int) -> Steps[dict[str, str]]:
    """Retry what can be; what became of each."""
    if not failed:
        return {}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    scripts = [_script_call(name, each, ttl_s, now) for each in failed]
    _, *replies = yield Call([("SCRIPT LOAD", _RETRY), *scripts])
    return {each.name: text(reply) for each, reply in zip(failed, replies, strict=True)}


def _script_call(name: str, failed: _Failed, ttl_s: int, now: str) -> Command:
    assert failed.raw is not None
    usage = failed.result.usage if failed.result else None
    tokens = (-usage.prompt_tokens, -usage.completion_tokens) if usage else (0, 0)
    job_id = failed.job_id
    job = (keys.rq_job(job_id), keys.result(job_id), keys.rq_results(job_id))
    batch = (keys.batch(name), keys.batch_done(name), keys.batch_jobs(name))
    seen = (failed.entry_id, failed.raw, failed.outcome)
    return ("EVALSHA", _RETRY_SHA, 6, *job, *batch, job_id, *seen, *tokens, ttl_s, now)
