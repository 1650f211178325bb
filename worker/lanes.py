"""Whose job is next: the choice among a queue's lanes, and what each is charged for.

Between priorities: the highest first, but one with waiting jobs is passed over MAX_PASSES times at most. Within a
priority: start-time fair queueing (Goyal, Vin, Cheng 1996) by tokens. Each lane has a virtual time, which grows by the
tokens of its jobs; the lane with the least is next. A job's tokens are known when it ends: at the claim the lane is
charged the mean of its jobs so far, and the job's receipt says how much, so that the difference can be settled. A lane
that comes, or comes back, starts at the virtual time of the lane last served, so that being idle saves nothing up, or
at its own if that is later: then it has had more than its share.

All of this happens in the server, in the claim's script; a claim costs the logarithm of the number of waiting lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.lanes import PRIORITIES, Lane, lane_of
from headrace.shared.outcome import Command

MAX_PASSES = 7
UNSEEN_JOB_TOKENS = 256  # what the first jobs of a lane are charged
_MEAN_OF_JOBS = 64  # the mean is of about so many of the latest
_MAX_IDLE_LANES = 10_000
_MAX_LOOKS = 1_000  # at entries that turn out to be none, in one claim

# Fill a claim list up to a number of ids, unless all work is suspended or the claimer has lost its lease. It answers
# with the whole list, so that ids whose answer was lost on the way are met again; with their receipts; and with what
# it dropped from tenants' lanes, because it is no id of that tenant's. While there are no lanes beside the queue, and
# none that has had more than its share of it, nothing is charged.
# KEYS: queue, claim list, lease, suspension, arrivals, lanes, receipts, waiting lanes of the three priorities, idle
# lanes of the three. ARGV: number of ids, the queue's name.
CLAIM = """
if redis.call('EXISTS', KEYS[3]) == 0 or redis.call('EXISTS', KEYS[4]) == 1 then return {{}, {}, {}} end
local room, dropped = tonumber(ARGV[1]) - redis.call('LLEN', KEYS[2]), {}

local function claim_from_lanes()
  local plain, class_of = ARGV[2], {high = 1, normal = 2, low = 3}
  local clock, passed, size = {}, {}, {}
  local state = redis.call('HMGET', KEYS[6], 'clock1', 'clock2', 'clock3', 'passed1', 'passed2', 'passed3')
  for c = 1, 3 do
    clock[c], passed[c] = tonumber(state[c]) or 0, tonumber(state[3 + c]) or 0
    size[c] = redis.call('ZCARD', KEYS[7 + c])
  end

  local function latest_idle(c)
    return tonumber(redis.call('ZRANGE', KEYS[10 + c], -1, -1, 'WITHSCORES')[2]) or 0
  end

  local function arrive(lane, c)
    local length = redis.pcall('LLEN', 'rq:queue:' .. lane)
    if type(length) ~= 'number' or length == 0 or redis.call('ZSCORE', KEYS[7 + c], lane) then return end
    if size[c] == 0 then clock[c] = math.max(clock[c], latest_idle(c)) end
    local own = tonumber(redis.call('ZSCORE', KEYS[10 + c], lane) or 0)
    redis.call('ZREM', KEYS[10 + c], lane)
    redis.call('ZADD', KEYS[7 + c], math.max(clock[c], own), lane)
    size[c] = size[c] + 1
  end

  local function leave(lane, c, at)
    redis.call('ZREM', KEYS[7 + c], lane)
    redis.call('ZADD', KEYS[10 + c], at, lane)
    size[c] = size[c] - 1
    if redis.call('ZCARD', KEYS[10 + c]) > MAX_IDLE_LANES then
      local first = redis.call('ZRANGE', KEYS[10 + c], 0, 0)[1]
      redis.call('ZREM', KEYS[10 + c], first)
      redis.call('HDEL', KEYS[6], 'jobs:' .. first, 'tokens:' .. first)
    end
  end

  local function charge_of(lane)
    local seen = redis.call('HMGET', KEYS[6], 'jobs:' .. lane, 'tokens:' .. lane)
    local jobs, tokens = tonumber(seen[1]) or 0, tonumber(seen[2]) or 0
    if jobs <= 0 then return UNSEEN_JOB_TOKENS end
    if jobs > MEAN_OF_JOBS then
      redis.call('HSET', KEYS[6], 'jobs:' .. lane, math.floor(jobs / 2), 'tokens:' .. lane, math.floor(tokens / 2))
    end
    return math.max(1, math.floor(tokens / jobs + 0.5))
  end

  local function next_class()
    local first, due
    for c = 1, 3 do
      if size[c] > 0 and not first then
        first = c
      elseif size[c] > 0 and passed[c] >= MAX_PASSES and (not due or passed[c] > passed[due]) then
        due = c
      end
    end
    return due or first
  end

  for _, lane in ipairs(redis.call('SPOP', KEYS[5], 1000)) do
    if string.sub(lane, 1, #plain + 1) == plain .. '~' then
      local rest = string.sub(lane, #plain + 2)
      local class, tenant = string.match(rest, '^(%l+)~([%w_]+)$')
      class = class or string.match(rest, '^%l+$')
      local is_lane = class_of[class] and (tenant and #tenant <= 64 or not tenant and class ~= 'normal')
      if is_lane then arrive(lane, class_of[class]) end
    end
  end
  arrive(plain, 2)

  local beside = size[1] + size[2] + size[3]
  local own = redis.call('ZSCORE', KEYS[9], plain)
  if own and beside == 1 and latest_idle(2) <= math.max(clock[2], tonumber(own)) then
    leave(plain, 2, own)
    return false
  end

  local looks = room + MAX_LOOKS
  while room > 0 and looks > 0 do
    looks = looks - 1
    local c = next_class()
    if not c then break end
    local found = redis.call('ZRANGE', KEYS[7 + c], 0, 0, 'WITHSCORES')
    local lane, at = found[1], tonumber(found[2])
    local list, tenant = 'rq:queue:' .. lane, string.match(lane, '~%l+~([%w_]+)$')
    local id = redis.pcall('LINDEX', list, 0)
    if type(id) ~= 'string' then
      leave(lane, c, at)
    elseif tenant and string.sub(id, 1, #tenant + 1) ~= tenant .. '-' then
      redis.call('LPOP', list)
      dropped[#dropped + 1] = id
    else
      local charge = charge_of(lane)
      redis.call('LMOVE', list, KEYS[2], 'LEFT', 'RIGHT')
      redis.call('HSET', KEYS[7], id, charge .. ' ' .. lane)
      redis.call('ZADD', KEYS[7 + c], at + charge, lane)
      clock[c], room = math.max(clock[c], at), room - 1
      for k = 1, 3 do passed[k] = (k == c or size[k] == 0) and 0 or passed[k] + 1 end
      if redis.call('LLEN', list) == 0 then leave(lane, c, at + charge) end
    end
  end
  for c = 1, 3 do redis.call('HSET', KEYS[6], 'clock' .. c, clock[c], 'passed' .. c, passed[c]) end
  return true
end

if room > 0 then
  local beside = redis.call('EXISTS', KEYS[5], KEYS[8], KEYS[9], KEYS[10])
  if beside == 0 or not claim_from_lanes() then
    for _ = 1, room do
      if not redis.call('LMOVE', KEYS[1], KEYS[2], 'LEFT', 'RIGHT') then break end
    end
  end
end
local ids, receipts = redis.call('LRANGE', KEYS[2], 0, -1), {}
if #ids > 0 and redis.call('EXISTS', KEYS[7]) == 1 then receipts = redis.call('HMGET', KEYS[7], unpack(ids)) end
return {ids, receipts, dropped}
"""
for _name, _value in {
    "MAX_PASSES": MAX_PASSES,
    "UNSEEN_JOB_TOKENS": UNSEEN_JOB_TOKENS,
    "MEAN_OF_JOBS": _MEAN_OF_JOBS,
    "MAX_IDLE_LANES": _MAX_IDLE_LANES,
    "MAX_LOOKS": _MAX_LOOKS,
}.items():
    CLAIM = CLAIM.replace(_name, str(_value))


# Have RQ forget a lane of which nothing is left: no job waits, runs or is kept in a registry, and none was claimed
# lately. KEYS: RQ's queues, the lane's virtual times, what it may have. ARGV: the lane, how many of the keys are times.
FORGET = """
local times = 1 + tonumber(ARGV[2])
for i = 2, times do
  if redis.call('ZSCORE', KEYS[i], ARGV[1]) then return 0 end
end
if redis.call('EXISTS', unpack(KEYS, times + 1)) > 0 then return 0 end
return redis.call('SREM', KEYS[1], KEYS[times + 1])
"""
_REGISTRIES = ("wip", "finished", "failed", "canceled", "deferred", "scheduled")


def forget_call(lane: Lane) -> tuple[list[str], list[str | int]]:
    """The keys and arguments of the script FORGET."""
    times = [keys.waiting_lanes(lane.queue, lane.priority), keys.idle_lanes(lane.queue, lane.priority)]
    holders = [keys.rq_queue(lane.name), *(f"rq:{registry}:{lane.name}" for registry in _REGISTRIES)]
    return [keys.RQ_QUEUES, *times, *holders], [lane.name, len(times)]


def claim_keys(queue: str, worker: str) -> list[str]:
    """The script's keys for a worker and its queue."""
    return [
        keys.rq_queue(queue),
        keys.claims(worker),
        keys.lease(worker),
        keys.RQ_SUSPENDED,
        keys.arrivals(queue),
        keys.lanes(queue),
        keys.receipts(worker),
        *(keys.waiting_lanes(queue, priority) for priority in PRIORITIES),
        *(keys.idle_lanes(queue, priority) for priority in PRIORITIES),
    ]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """From which lane a worker claimed a job, and what the lane was charged: tokens, as expected then."""

    lane: Lane
    charge: int
    worker: str

    def settle(self, job_id: str, tokens: int) -> list[Command]:
        """The commands that charge for a job that has ended, which took so many tokens to compute."""
        queue, name = self.lane.queue, self.lane.name
        commands = [*self.forget(job_id), *self.correct(tokens)]
        if tokens:  # else it was over before it began, and says nothing about the lane's others
            commands.append(("HINCRBY", keys.lanes(queue), f"tokens:{name}", tokens))
            commands.append(("HINCRBY", keys.lanes(queue), f"jobs:{name}", 1))
        return commands

    def give_back(self, job_id: str, tokens: int) -> list[Command]:
        """As `settle`, for a job that goes back, and will be charged for the rest when it comes again."""
        return [*self.forget(job_id), *self.correct(tokens)]

    def forget(self, job_id: str) -> list[Command]:
        """The commands that let the charge stand."""
        return [("HDEL", keys.receipts(self.worker), job_id)]

    def correct(self, tokens: int) -> list[Command]:
        """The commands that make of the charge what it should have been."""
        difference = tokens - self.charge
        if not difference:
            return []
        queue, priority, name = self.lane.queue, self.lane.priority, self.lane.name
        places = (keys.waiting_lanes(queue, priority), keys.idle_lanes(queue, priority))
        commands: list[Command] = [("ZADD", key, "XX", "INCR", difference, name) for key in places]  # it is in one
        if difference > 0:  # it has had more than its share, which counts should the queue seem to be alone now
            commands.append(("SADD", keys.arrivals(queue), name))
        return commands


def read_receipt(raw: object, worker: str) -> Receipt | None:
    """A receipt as stored; None if there is none."""
    if not isinstance(raw, bytes | str):
        return None
    charge, _, name = as_text(raw).partition(" ")
    lane = lane_of(name)
    assert lane is not None, f"{name!r} is no lane, and only the claim's script writes receipts"
    return Receipt(lane=lane, charge=int(charge), worker=worker)


@dataclass(frozen=True)
class Claims:
    """What a worker has claimed: ids as they stood in the queue, the receipts of those that have one, and what was
    dropped from tenants' lanes."""

    raw_ids: Sequence[bytes | str]
    receipts: dict[bytes | str, Receipt]
    dropped: Sequence[bytes | str] = ()


def read_claims(reply: Sequence[Any], worker: str) -> Claims:
    """The script's answer."""
    raw_ids, raw_receipts, dropped = reply
    receipts = {}
    for raw_id, raw in zip(raw_ids, raw_receipts, strict=False):
        if (receipt := read_receipt(raw, worker)) is not None:
            receipts[raw_id] = receipt
    return Claims(raw_ids, receipts, dropped)


def arrival(lane: Lane) -> list[Command]:
    """The command that tells claims to look at a lane; the queue itself is always looked at."""
    return [] if lane.name == lane.queue else [("SADD", keys.arrivals(lane.queue), lane.name)]
