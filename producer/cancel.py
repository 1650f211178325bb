"""Cancelling: a waiting job gets its result at once; a running one is stopped by its worker, which keeps its text.

The worker is told by RQ's pub/sub, which is fast and may get lost, and by a set that it looks at every second. A mark
in the job's hash tells whichever worker comes next, should this one die before it has acted. A tenant, which must not
write to workers' keys, sets the mark alone: workers look at those of tenants' jobs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.producer.jobs import not_found_text
from headrace.producer.settings import ProducerSettings
from headrace.producer.steps import Call, Command, Steps, text
from headrace.shared import keys
from headrace.shared.errors import BatchNotFound, InvalidRequest, JobNotFound
from headrace.shared.job import CANCEL_FIELD, RQ_RESULT_TTL_S, Payload, decode_payload
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import ErrorCode, ErrorInfo, Result

BATCH_CHUNK = 500
_RQ_STOPPED = 3  # rq.results.Result.Type.STOPPED

# Replies {status before, worker}. A queued job is settled here and now; its id may stay in the middle of a long queue,
# because looking for it there would hold the server up. Workers drop an id whose status is not `queued`. A running job
# is marked for its worker.
# KEYS: job, RQ's results. ARGV: id, TTL, RQ's TTL, now, type of RQ's entry, 1 to set the mark alone, then
# headrace.shared.outcome's commands, each as its length and its words.
_CANCEL = """
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return {'missing', ''} end
if status == 'started' then
  local worker = redis.call('HGET', KEYS[1], 'worker_name') or ''
  redis.call('HSET', KEYS[1], 'MARK', 1)
  if ARGV[6] ~= '1' then
    redis.call('SADD', 'CANCELS' .. worker, ARGV[1])
    redis.call('EXPIRE', 'CANCELS' .. worker, 3600)
  end
  return {status, worker}
end
if status ~= 'queued' then return {status, ''} end
local id, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[4])
local name = redis.call('HGET', KEYS[1], 'origin') or ''
local queue, cancelled = 'rq:queue:' .. name, 'rq:canceled:' .. name
if redis.call('LPOS', queue, id, 'MAXLEN', 1000) then
  redis.call('LREM', queue, 1, id)
elseif redis.call('LPOS', queue, id, 'RANK', -1, 'MAXLEN', 1000) then
  redis.call('LREM', queue, -1, id)
end
redis.call('HSET', KEYS[1], 'status', 'canceled')
redis.call('EXPIRE', KEYS[1], ttl)
redis.call('ZADD', cancelled, now, id)
redis.call('ZREMRANGEBYSCORE', cancelled, '-inf', now - tonumber(ttl))
redis.call('XADD', KEYS[2], '*', 'type', ARGV[5], 'worker_name', '')
redis.call('EXPIRE', KEYS[2], ARGV[3])
local at = 7
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
return {'queued', ''}
""".replace("MARK", CANCEL_FIELD).replace("CANCELS", keys.cancels(""))
_CANCEL_SHA = hashlib.sha1(_CANCEL.encode(), usedforsecurity=False).hexdigest()


def cancel_job(job_id: str, settings: ProducerSettings) -> Steps[bool]:
    """Cancel a job. True if it was waiting or running, False if it had ended. Raises JobNotFound.

    For a producer with a tenant, only keys that are the job's own are written to.
    """
    data, result = yield Call([("HGET", keys.rq_job(job_id), "data"), ("GET", keys.result(job_id))])
    if data is None:
        if result is None:
            raise JobNotFound(not_found_text(job_id))
        return False
    return (yield from _cancel_all({job_id: data}, settings)) == 1


def cancel_batch(name: str, settings: ProducerSettings) -> Steps[int]:
    """Cancel what of the batch has not ended; returns how many jobs that were. Raises BatchNotFound.

    For a producer with a tenant, only keys that are the jobs' and the batch's own are written to.
    A batch that is still being submitted ends there.
    """
    key = keys.batch(name)
    (created_at,) = yield Call([("HGET", key, "created_at")])
    if created_at is None:
        raise BatchNotFound(f"no batch {name!r} on the server: it was never submitted, or has expired")
    yield Call([("HSET", key, "cancelled_at", datetime.now(UTC).isoformat())])
    cancelled, start = 0, 0
    while True:
        (reply,) = yield Call([("LRANGE", keys.batch_jobs(name), start, start + BATCH_CHUNK - 1)])
        job_ids = [text(job_id) for job_id in reply]
        if not job_ids:
            return cancelled
        found = yield Call([("HMGET", keys.rq_job(job_id), "status", "data") for job_id in job_ids])
        live = {
            job_id: data
            for job_id, (status, data) in zip(job_ids, found, strict=True)
            if text(status) in {"queued", "started"}
        }
        cancelled += yield from _cancel_all(live, settings)
        start += len(job_ids)


def _cancel_all(jobs: Mapping[str, bytes], settings: ProducerSettings) -> Steps[int]:
    """Cancel jobs given as their data; returns how many were waiting or running."""
    if not jobs:
        return 0
    scripts = [_script_call(job_id, data, settings) for job_id, data in jobs.items()]
    _, *replies = yield Call([("SCRIPT LOAD", _CANCEL), *scripts])
    before = {job_id: [text(word) for word in reply] for job_id, reply in zip(jobs, replies, strict=True)}
    running = [(worker, job_id) for job_id, (status, worker) in before.items() if status == "started" and worker]
    if running and settings.route.tenant is None:
        yield Call([_stop(worker, job_id) for worker, job_id in running])
    return len(running) + sum(status == "queued" for status, _ in before.values())


def _script_call(job_id: str, data: bytes, settings: ProducerSettings) -> Command:
    ttl_s, mark_alone = settings.result_ttl_s, int(settings.route.tenant is not None)
    outcome = outcome_commands(_cancelled_result(job_id, _payload(data)), ttl_s)
    words = [word for command in outcome for word in (len(command), *command)]
    values = (job_id, ttl_s, RQ_RESULT_TTL_S, int(time.time()), _RQ_STOPPED, mark_alone)
    return ("EVALSHA", _CANCEL_SHA, 2, keys.rq_job(job_id), keys.rq_results(job_id), *values, *words)


def _payload(data: bytes) -> Payload:
    try:
        return decode_payload(data)
    except InvalidRequest:  # written by something else; it can be cancelled all the same
        return Payload(request=None, batch=None)


def _cancelled_result(job_id: str, payload: Payload) -> Result:
    request: Mapping[str, Any] = payload.request if isinstance(payload.request, dict) else {}
    own_id, metadata = request.get("id"), request.get("metadata")
    return Result(
        id=own_id if isinstance(own_id, str) else None,
        job_id=job_id,
        batch=payload.batch,
        metadata=metadata if isinstance(metadata, dict) else None,
        error=ErrorInfo(code=ErrorCode.CANCELLED, message="cancelled before it started"),
    )


def _stop(worker: str, job_id: str) -> Command:
    return ("PUBLISH", f"rq:pubsub:{worker}", json.dumps({"command": "stop-job", "job_id": job_id}))
