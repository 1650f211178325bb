"""Each check of each fence by itself: what it lets through, and that nothing is written where it refuses."""

from __future__ import annotations

import pytest
import redis

from headrace.shared import keys
from headrace.shared.outages import is_passing
from headrace.worker.fence import FencedWrite, Fences, ScriptedWrite, Verdict

QUEUE, CLAIMS, LEASE, WIP, JOB = "rq:queue:q", keys.claims("w"), keys.lease("w"), "rq:wip:q", keys.rq_job("job")


@pytest.fixture
def fences(redis_client: redis.Redis) -> Fences:
    return Fences(redis_client)


def claim(fences: Fences, count: int) -> list[bytes | str]:
    return list(fences.claim("q", "w", count).raw_ids)


def write(fence: str, member: str) -> FencedWrite:
    return FencedWrite(fence=fence, member=member, job_key=JOB, commands=[("SET", "written", 1)])


def test_a_claim_list_is_filled_up_to_its_count_and_told_whole(redis_client: redis.Redis, fences: Fences) -> None:
    redis_client.set(LEASE, 1)
    redis_client.rpush(CLAIMS, "from before")
    redis_client.rpush(QUEUE, "a", "b", "c")
    assert claim(fences, 3) == [b"from before", b"a", b"b"]
    assert claim(fences, 3) == [b"from before", b"a", b"b"]
    assert redis_client.lrange(QUEUE, 0, -1) == [b"c"]


@pytest.mark.parametrize(("has_lease", "suspended"), [(False, False), (True, True)])
def test_nothing_is_claimed_without_the_lease_or_while_work_is_suspended(
    redis_client: redis.Redis, fences: Fences, has_lease: bool, suspended: bool
) -> None:
    redis_client.rpush(QUEUE, "a")
    if has_lease:
        redis_client.set(LEASE, 1)
    if suspended:
        redis_client.set(keys.RQ_SUSPENDED, 1)
    assert claim(fences, 3) == []
    assert redis_client.lrange(QUEUE, 0, -1) == [b"a"]


@pytest.mark.parametrize(
    ("claimed", "status", "verdict"),
    [
        (True, "queued", Verdict.DONE),
        (False, "queued", Verdict.REFUSED),  # another worker has taken the claim over
        (True, "canceled", Verdict.REFUSED),
        (True, "started", Verdict.REFUSED),  # its id stood in the queue twice
        (True, None, Verdict.REFUSED),  # deleted
    ],
)
def test_a_job_starts_from_a_claim_list_while_it_waits(
    redis_client: redis.Redis, fences: Fences, claimed: bool, status: str | None, verdict: Verdict
) -> None:
    if claimed:
        redis_client.rpush(CLAIMS, "job")
    if status is not None:
        redis_client.hset(JOB, "status", status)
    assert fences.start([write(CLAIMS, "job")]) == [verdict]
    assert redis_client.exists("written") == (verdict is Verdict.DONE)
    assert redis_client.llen(CLAIMS) == 0


@pytest.mark.parametrize(
    ("registered", "status", "verdict"),
    [
        ("job:this", "started", Verdict.DONE),
        ("job:another", "started", Verdict.REFUSED),  # another worker runs it now
        ("job:this", "queued", Verdict.REFUSED),  # it was put back by someone who left the registry as it was
        ("job:this", None, Verdict.REFUSED),
    ],
)
def test_a_running_job_is_written_to_by_its_execution_alone(
    redis_client: redis.Redis, fences: Fences, registered: str, status: str | None, verdict: Verdict
) -> None:
    redis_client.zadd(WIP, {registered: 1})
    if status is not None:
        redis_client.hset(JOB, "status", status)
    assert fences.finish([write(WIP, "job:this")]) == [verdict]
    assert redis_client.exists("written") == (verdict is Verdict.DONE)


@pytest.mark.parametrize(
    ("claimed", "status", "queue"),
    [
        (True, "queued", [b"job", b"next"]),
        (True, "canceled", [b"next"]),
        (False, "queued", [b"next"]),  # who has taken it over has put it back already
    ],
)
def test_a_claim_is_given_back_once_and_while_the_job_waits(
    redis_client: redis.Redis, fences: Fences, claimed: bool, status: str, queue: list[bytes]
) -> None:
    redis_client.rpush(QUEUE, "next")
    redis_client.hset(JOB, "status", status)
    if claimed:
        redis_client.rpush(CLAIMS, "job")
    fences.unclaim([(write(CLAIMS, "job"), QUEUE)])
    assert redis_client.lrange(QUEUE, 0, -1) == queue
    assert redis_client.exists("written") == claimed
    assert redis_client.llen(CLAIMS) == 0


@pytest.mark.parametrize(
    "answer", ["OOM command not allowed when used memory > 'maxmemory'.", "READONLY You can't write against a replica."]
)
def test_what_the_server_refuses_for_now_in_the_middle_of_a_script_is_an_error_that_passes(
    fences: Fences, answer: str
) -> None:
    script = f"""local function one(at) error({{err = "{answer}"}}) end"""
    with pytest.raises(redis.RedisError) as found:
        fences.finish([ScriptedWrite(script=script, job_key=JOB, common=(), words=("job",))])
    assert is_passing(found.value)
