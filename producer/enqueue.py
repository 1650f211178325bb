"""From checked requests to Redis commands. Pure: nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headrace.producer.steps import Command, Word
from headrace.shared import keys
from headrace.shared.errors import InvalidRequest, SettingsError
from headrace.shared.job import job_hash, new_job_id
from headrace.shared.lanes import batch_prefix, lane_name, lane_of
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import ErrorCode, ErrorInfo, Request, Result

# Runs the commands only if a hash's field still has the value that the sender expects, so that sending a chunk again
# after a broken connection can't apply it twice. ARGV: field, value, then each command as its length and its words.
# A length below 0 starts the hashes of many jobs: what they have in common, how many there are, each one's key and
# data. Said for each job, the common fields would be most of what is packed, sent and parsed.
_FENCED = """
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found ~= ARGV[2] then return found end
local at = 3
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  if words >= 0 then
    redis.call(unpack(ARGV, at + 1, at + words))
    at = at + words + 1
  else
    local first, last = at + 1, at - words
    local jobs = tonumber(ARGV[last + 1])
    at = last + 2
    for _ = 1, jobs do
      redis.call('HSET', ARGV[at], 'data', ARGV[at + 1], unpack(ARGV, first, last))
      at = at + 2
    end
  end
end
return 'applied'
"""
APPLIED = b"applied"
MAX_BATCHES_LISTED = 10_000


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job to send: the hash to queue, or, for a request that was refused, its result."""

    job_id: str
    queue: str  # the RQ queue: a lane's name
    fields: dict[str, str | bytes | int] | None = None
    rejected: Result | None = None

    @property
    def num_bytes(self) -> int:
        """About how much is sent for it."""
        data = self.fields["data"] if self.fields else b""
        return len(data) if isinstance(data, bytes) else 0


def entry_for(request: Request, *, queue: str, batch: str | None) -> Entry:
    """A request as a job in its lane of `queue`."""
    job_id = new_job_id(batch, request.id, request.tenant)
    lane = lane_name(queue, request.priority, request.tenant)
    return Entry(job_id=job_id, queue=lane, fields=job_hash(request, queue=lane, batch=batch))


def entry_rejected(
    error: InvalidRequest, *, request_id: str, queue: str, batch: str, tenant: str | None = None
) -> Entry:
    """A refused item of a batch: it has its result at once and is never queued."""
    job_id = new_job_id(batch, request_id, tenant)
    info = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message=str(error), param=error.param)
    return Entry(job_id=job_id, queue=queue, rejected=Result(id=request_id, job_id=job_id, batch=batch, error=info))


def check_batch_name(name: str, tenant: str | None = None) -> str:
    """The name, if it is fit for a key, and for its tenant. Raises SettingsError."""
    if not keys.is_batch_name(name):
        raise SettingsError(f"batch name {name[:140]!r}: {keys.BATCH_NAME_RULE}")
    prefix = batch_prefix(tenant)
    if not name.startswith(prefix):
        raise SettingsError(
            f"batch name {name!r}: with the tenant {tenant!r} it must begin with {prefix!r}, "
            f"so that the server can tell whose it is; use {prefix + name!r}"
        )
    return name


def create_batch(
    name: str,
    *,
    created_at: datetime,
    queue: str,
    model: str,
    source: str,
    ttl_s: int,
    tenant: str | None = None,
    fingerprint: str | None = None,
) -> Command:
    """The command that makes a batch. It replies APPLIED, or with the created_at of the batch that is there."""
    counts = ("total", 0, "completed", 0, "failed", 0, "cancelled", 0, "prompt_tokens", 0, "completion_tokens", 0)
    about = ("queue", queue, "model", model, "source", source, "submitted", 0, "created_at", created_at.isoformat())
    mark = () if fingerprint is None else ("fingerprint", fingerprint)
    key = keys.batch(name)
    commands: list[Command] = [
        ("HSET", key, *counts, *about, *mark),
        ("EXPIRE", key, ttl_s),
        ("ZADD", keys.batches(tenant), created_at.timestamp(), name),
        ("ZREMRANGEBYRANK", keys.batches(tenant), 0, -MAX_BATCHES_LISTED - 1),
    ]
    return fenced(key, "created_at", "", commands)


def send_one(entry: Entry) -> Command:
    """The command that queues a job without a batch."""
    return fenced(keys.rq_job(entry.job_id), "status", "", _queue_commands([entry]), _job_hashes([entry]))


def send_chunk(entries: Sequence[Entry], *, batch: str, total_before: int, ttl_s: int, listed: bool) -> Command:
    """The command that adds a chunk to a batch which has `total_before` jobs; it replies as `fenced` does.

    `listed` writes the ids to the batch's list, which cancelling the batch needs.
    """
    key = keys.batch(batch)
    jobs = [entry for entry in entries if entry.fields]
    commands = _queue_commands(jobs)
    for entry in entries:
        if entry.rejected is not None:
            commands += outcome_commands(entry.rejected, ttl_s)
    if listed:
        commands.append(("RPUSH", keys.batch_jobs(batch), *(entry.job_id for entry in entries)))
        commands.append(("EXPIRE", keys.batch_jobs(batch), ttl_s))
    commands.append(("EXPIRE", key, ttl_s))
    commands.append(("HINCRBY", key, "total", len(entries)))
    return fenced(key, "total", str(total_before), commands, _job_hashes(jobs))


def fenced(key: str, field: str, expected: str, commands: Sequence[Command], before: Sequence[Word] = ()) -> Command:
    """The commands as one atomic script that acts only while the hash's field has the expected value ("": none).

    It replies APPLIED, or else with the value that it found. `before` comes from _job_hashes.
    """
    words = [word for command in commands for word in (len(command), *command)]
    return ("EVAL", _FENCED, 1, key, field, expected, *before, *words)


def _queue_commands(entries: Sequence[Entry]) -> list[Command]:
    """Put jobs on their queues."""
    by_queue: dict[str, list[str]] = {}
    for entry in entries:
        by_queue.setdefault(entry.queue, []).append(entry.job_id)
    commands: list[Command] = []
    for queue, job_ids in by_queue.items():
        commands.append(("SADD", keys.RQ_QUEUES, keys.rq_queue(queue)))
        commands.append(("RPUSH", keys.rq_queue(queue), *job_ids))
        lane = lane_of(queue)
        if lane is not None and lane.queue != queue:
            commands.append(("SADD", keys.arrivals(lane.queue), queue))
    return commands


def _job_hashes(entries: Sequence[Entry]) -> list[Word]:
    """Words for the script: the jobs' hashes, grouped by what they have in common. They are stamped as of now."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    groups: dict[tuple[tuple[str, Word], ...], list[Word]] = {}
    for entry in entries:
        assert entry.fields is not None
        rest = {**entry.fields, "created_at": now, "enqueued_at": now}
        data = rest.pop("data")
        groups.setdefault(tuple(rest.items()), []).extend((keys.rq_job(entry.job_id), data))
    words: list[Word] = []
    for common, jobs in groups.items():
        fields = [word for pair in common for word in pair]
        words += [-len(fields), *fields, len(jobs) // 2, *jobs]
    return words
