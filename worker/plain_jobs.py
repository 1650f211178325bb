"""How plain jobs start and succeed: RQ's bookkeeping and ours written out as scripts, so that only values are sent.

Nearly every job is plain: it starts, succeeds, and what it leaves expires. What RQ's own methods would write for it
stands here in their order and their form; a test holds the two together. Every other way of ending goes through those
methods and a FencedWrite.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import datetime

from headrace.shared import keys
from headrace.shared.schema import Result
from headrace.worker.fence import ScriptedWrite

# Each is the `one` of a script call as worker/fence.py makes them: it does what is to be done for the job whose words
# begin at ARGV[at]. From ARGV[2] on stand the words that all jobs of a call have in common.

# A claimed job starts if its id is still in this worker's claim list and the job still waits.
START = """
local claims, queue, worker, ttl = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local started, executions = 'rq:wip:' .. queue, 'rq:worker:' .. worker .. ':executions'
local function one(at)
  local id, execution, time, stamp, second = unpack(ARGV, at, at + 4)
  local job = 'rq:job:' .. id
  if redis.call('LREM', claims, 1, id) == 0 then return 0 end
  if redis.call('HGET', job, 'status') ~= 'queued' then return 0 end
  local both = id .. ':' .. execution
  local expires = tonumber(second) + ttl
  redis.call('HSET', 'rq:execution:' .. both, 'id', execution, 'job_id', id, 'created_at', stamp,
    'last_heartbeat', stamp, 'worker_name', worker)
  redis.call('EXPIRE', 'rq:execution:' .. both, ttl)
  redis.call('ZADD', 'rq:executions:' .. id, expires + 60, execution)
  redis.call('EXPIRE', 'rq:executions:' .. id, ttl + 60)
  redis.call('ZADD', started, expires, both)
  redis.call('SADD', executions, both)
  redis.call('EXPIRE', executions, ttl + 60)
  redis.call('HSET', job, 'last_heartbeat', time, 'status', 'started', 'started_at', time, 'worker_name', worker,
    'origin', queue)
  redis.call('PERSIST', job)
  return 1
end
"""

# A running job succeeds if the registry of started jobs names the execution that says so. The answer 3 says that no
# other job waits for this one.
SUCCEED = """
local queue, worker, ttl = ARGV[2], ARGV[3], ARGV[4]
local started, finished = 'rq:wip:' .. queue, 'rq:finished:' .. queue
local about, executions = 'rq:worker:' .. worker, 'rq:worker:' .. worker .. ':executions'
local function one(at)
  local id, execution, began, ended, time, second, seconds, rq_ttl, value, result, batch, prompt, completion =
    unpack(ARGV, at, at + 12)
  local job, both = 'rq:job:' .. id, id .. ':' .. execution
  if not redis.call('ZSCORE', started, both) then return 0 end
  if redis.call('HGET', job, 'status') ~= 'started' then return 0 end
  redis.call('HSET', job, 'status', 'finished', 'ended_at', time)
  redis.call('XADD', 'rq:results:' .. id, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', worker,
    'return_value', value, 'execution_id', execution, 'execution_started_at', began, 'execution_ended_at', ended)
  redis.call('EXPIRE', 'rq:results:' .. id, rq_ttl)
  redis.call('ZADD', finished, tonumber(second) + tonumber(rq_ttl), id)
  redis.call('EXPIRE', job, rq_ttl)
  local awaited = redis.call('EXPIRE', job .. ':dependents', rq_ttl)
  redis.call('EXPIRE', 'rq:job::' .. id .. ':dependencies', rq_ttl)
  redis.call('HINCRBY', about, 'successful_job_count', 1)
  redis.call('HINCRBYFLOAT', about, 'total_working_time', seconds)
  redis.call('DEL', 'rq:execution:' .. both, 'headrace:checkpoint:' .. id)
  redis.call('ZREM', started, both)
  redis.call('ZREM', 'rq:executions:' .. id, execution)
  redis.call('SREM', executions, both)
  redis.call('SET', 'headrace:result:' .. id, result, 'EX', ttl)
  if batch ~= '' then
    local counts = 'headrace:batch:' .. batch
    redis.call('XADD', counts .. ':done', '*', 'job_id', id, 'status', 'completed')
    redis.call('HINCRBY', counts, 'completed', 1)
    redis.call('HINCRBY', counts, 'prompt_tokens', prompt)
    redis.call('HINCRBY', counts, 'completion_tokens', completion)
    redis.call('EXPIRE', counts, ttl)
    redis.call('EXPIRE', counts .. ':done', ttl)
    redis.call('EXPIRE', counts .. ':jobs', ttl)
  end
  return awaited == 0 and 3 or 1
end
"""


def start(
    job_id: str, execution_id: str, started_at: datetime, *, claims_key: str, queue: str, worker: str, ttl_s: int
) -> ScriptedWrite:
    """The write that starts a claimed job. RQ believes in the execution for `ttl_s`."""
    stamp = started_at.timestamp()
    return ScriptedWrite(
        script=START,
        job_key=keys.rq_job(job_id),
        common=(claims_key, queue, worker, ttl_s),
        words=(job_id, execution_id, _text(started_at), stamp, int(stamp)),
    )


def success(
    result: Result,
    execution_id: str,
    started_at: datetime,
    ended_at: datetime,
    *,
    return_value: bytes,
    rq_ttl_s: int,
    queue: str,
    worker: str,
    ttl_s: int,
) -> ScriptedWrite:
    """The write that ends a job well. RQ's part lives `rq_ttl_s`, above 0, the result `ttl_s`."""
    assert result.usage is not None
    stamp = ended_at.timestamp()
    return ScriptedWrite(
        script=SUCCEED,
        job_key=keys.rq_job(result.job_id),
        common=(queue, worker, ttl_s),
        words=(
            result.job_id,
            execution_id,
            started_at.timestamp(),
            stamp,
            _text(ended_at),
            int(stamp),
            (ended_at - started_at).total_seconds(),
            rq_ttl_s,
            b64encode(return_value),
            result.to_json(),
            result.batch or "",
            result.usage.prompt_tokens,
            result.usage.completion_tokens,
        ),
    )


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
