"""The scripts for plain jobs against RQ's own methods: on equal servers both must leave the same keys behind."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
import redis
import rq.executions
import rq.job
import rq.utils
from rq.executions import Execution
from rq.job import Job as RqJob

from headrace.shared import keys
from headrace.shared.job import job_hash
from headrace.shared.outcome import outcome_commands
from headrace.shared.schema import FinishReason, Output, Request, Result, Usage
from headrace.worker import plain_jobs
from headrace.worker.fence import FencedWrite, Fences, ScriptedWrite, Verdict, commands_of
from headrace.worker.rq_adapter import writes as rq_writes
from headrace.worker.rq_adapter.jobs import Running
from headrace.worker.rq_adapter.worker import RqWorker
from headrace.worker.rq_adapter.writes import EXECUTION_TTL_S

QUEUE, WORKER, JOB, BATCH = "headrace-fake", "w", "job1", "b"
CLAIMS = keys.claims(WORKER)
TTL_S = 1000
STARTED = datetime(2026, 5, 4, 3, 2, 1, 987654, tzinfo=UTC)
ENDED = datetime(2026, 5, 4, 3, 2, 7, 123456, tzinfo=UTC)
RETURNED = {"result": keys.result(JOB), "finish_reasons": ["length"], "completion_tokens": 2}


class FixedId(NamedTuple):
    hex: str


class Side:
    """A worker on the server whose execution ids and clock are fixed, so that two runs can be compared."""

    def __init__(self, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = client
        self.fences = Fences(client)
        self.rq = RqWorker(QUEUE, WORKER, client, self.fences, on_stop=print, on_shutdown=print)
        self._monkeypatch = monkeypatch
        for module in (rq.executions, rq_writes):
            monkeypatch.setattr(module, "uuid4", lambda: FixedId("e" * 32))
        self.set_clock(STARTED)

    def set_clock(self, moment: datetime) -> None:
        for module in (rq.utils, rq.executions, rq.job, rq_writes):
            self._monkeypatch.setattr(module, "now", lambda: moment)

    def put(self, fields: dict[str, Any], job_id: str = JOB) -> None:
        """A claimed job, with the keys around it that the writes may touch."""
        self.client.hset(keys.rq_job(job_id), mapping=fields)
        self.client.expire(keys.rq_job(job_id), 77)
        self.client.rpush(CLAIMS, "before", job_id, job_id)
        self.client.set(keys.checkpoint(job_id), "tokens")
        self.client.hset(keys.batch(BATCH), mapping={"total": 3, "completed": 1, "prompt_tokens": 5})
        self.client.rpush(keys.batch_jobs(BATCH), job_id)
        self.client.hset(f"rq:worker:{WORKER}", mapping={"successful_job_count": 4, "total_working_time": 1.5})

    def start(self, job_id: str = JOB) -> tuple[Running, ScriptedWrite]:
        return self.rq.writes.start(self.rq.jobs.read(job_id, self.client.hgetall(keys.rq_job(job_id))), CLAIMS)

    def started(self, job_id: str = JOB) -> Running:
        running, write = self.start(job_id)
        assert self.fences.start([write]) == [Verdict.DONE]
        return running

    def succeed(self, running: Running, *, batch: str | None = BATCH) -> Verdict:
        write = self.rq.writes.succeed(running, RETURNED, a_result(running.job_id, batch), TTL_S)
        assert isinstance(write, ScriptedWrite)
        (verdict,) = self.fences.finish([write])
        return verdict

    def all_keys(self) -> dict[str, Any]:
        return {key.decode(): (self.value(key), self.client.ttl(key)) for key in self.client.keys()}

    def value(self, key: bytes) -> Any:
        kind = self.client.type(key)
        if kind == b"stream":
            return [fields for _, fields in self.client.xrange(key)]  # the server's clock makes the ids
        read: dict[bytes, Callable[[], Any]] = {
            b"string": lambda: self.client.get(key),
            b"hash": lambda: self.client.hgetall(key),
            b"list": lambda: self.client.lrange(key, 0, -1),
            b"set": lambda: self.client.smembers(key),
            b"zset": lambda: self.client.zrange(key, 0, -1, withscores=True),
        }
        return read[kind]()


@pytest.fixture
def side(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Side:
    return Side(redis_client, monkeypatch)


def a_result(job_id: str, batch: str | None) -> Result:
    output = Output(text="bc", token_ids=[98, 99], finish_reason=FinishReason.LENGTH)
    usage = Usage(prompt_tokens=7, completion_tokens=2)
    return Result(id="mine", job_id=job_id, batch=batch, model="fake", outputs=[output], usage=usage, worker=WORKER)


def fields_of(**changes: Any) -> dict[str, Any]:
    return {**job_hash(Request(prompt="a"), queue=QUEUE, batch=BATCH, created_at=STARTED), **changes}


FIELDS = [
    pytest.param(fields_of(), id="ours"),
    pytest.param({"data": "x", "status": "queued"}, id="another language's"),
    pytest.param(fields_of(result_ttl=7, timeout=60, started_at="2026-01-01T00:00:00.5Z"), id="started before"),
]


def assert_same(ours: dict[str, Any], rqs: dict[str, Any]) -> None:
    assert {key: value for key, (value, _) in ours.items()} == {key: value for key, (value, _) in rqs.items()}
    ttls = {key: ttl for key, (_, ttl) in rqs.items()}
    assert {key: ttl for key, (_, ttl) in ours.items()} == {
        key: -1 if ttl < 0 else pytest.approx(ttl, abs=2) for key, ttl in ttls.items()
    }


@pytest.mark.parametrize("fields", FIELDS)
def test_a_start_writes_what_rqs_own_methods_write(side: Side, fields: dict[str, Any]) -> None:
    side.put(fields)
    side.started()
    ours = side.all_keys()
    side.client.flushall()

    side.put(fields)
    side.client.lrem(CLAIMS, 1, JOB)
    job = RqJob(JOB, connection=side.client, serializer="json")
    job.origin = QUEUE
    with side.client.pipeline() as pipeline:
        Execution.create(job, EXECUTION_TTL_S, pipeline=pipeline, worker_name=WORKER)
        job.prepare_for_execution(WORKER, pipeline=pipeline)
        pipeline.persist(job.key)
        pipeline.hset(job.key, "origin", QUEUE)  # the lane that it came through, whatever its hash says
        pipeline.execute()
    assert_same(ours, side.all_keys())
    assert ours[keys.rq_job(JOB)][1] == -1  # it expired in 77 s
    assert ours[CLAIMS][0] == [b"before", JOB.encode()]


@pytest.mark.parametrize("batch", [BATCH, None])
@pytest.mark.parametrize("fields", FIELDS)
def test_a_success_writes_what_rqs_own_methods_and_the_outcome_write(
    side: Side, fields: dict[str, Any], batch: str | None
) -> None:
    side.put(fields)
    running = side.started()
    side.set_clock(ENDED)
    assert side.succeed(running, batch=batch) is Verdict.DONE_FOR_NONE
    ours = side.all_keys()
    side.client.flushall()

    side.set_clock(STARTED)
    side.put(fields)
    running = side.started()
    running.job.ended_at = ENDED
    side.set_clock(ENDED)
    write = side.rq.writes._succeed_as_rq_does(running, RETURNED, outcome_commands(a_result(JOB, batch), TTL_S))
    assert side.fences.finish([write]) == [Verdict.DONE]
    assert_same(ours, side.all_keys())
    worker = ours[f"rq:worker:{WORKER}"][0]
    assert worker[b"successful_job_count"] == b"5"
    assert float(worker[b"total_working_time"]) == pytest.approx(1.5 + (ENDED - STARTED).total_seconds())
    outcome = RqJob.fetch(JOB, connection=side.client, serializer="json").latest_result()
    assert outcome is not None
    assert (outcome.return_value, outcome.execution_started_at, outcome.execution_ended_at) == (
        RETURNED,
        STARTED,
        ENDED,
    )


def test_a_job_that_others_wait_for_says_so_and_their_list_expires_with_it(side: Side) -> None:
    side.put(fields_of())
    dependents = f"rq:job:{JOB}:dependents"
    assert RqJob(JOB, connection=side.client).dependents_key == dependents
    side.client.sadd(dependents, "later")
    assert side.succeed(side.started()) is Verdict.DONE
    assert side.client.ttl(dependents) == 600


@pytest.mark.parametrize("changes", [{"result_ttl": 0}, {"result_ttl": -1}, {"rate_limit_key": "k"}])
def test_a_job_that_is_not_plain_ends_through_rqs_methods(side: Side, changes: dict[str, Any]) -> None:
    side.put(fields_of(**changes, rate_limit_concurrency=2))
    write = side.rq.writes.succeed(side.started(), RETURNED, a_result(JOB, BATCH), TTL_S)
    assert isinstance(write, FencedWrite)
    assert side.fences.finish([write]) == [Verdict.DONE]
    assert side.client.exists(keys.rq_job(JOB)) == (changes.get("result_ttl") != 0)


def test_each_job_of_a_call_has_its_own_verdict(side: Side) -> None:
    """More jobs than one call takes, of every kind, with a fence of both scripts between them."""
    job_ids = [f"job{number}" for number in range(100)]
    for job_id in job_ids:
        side.put(fields_of(), job_id)
    side.client.hset(keys.rq_job("job10"), "status", "canceled")
    side.client.set("rq:executions:job20", "not a sorted set")
    expected = {"job10": Verdict.REFUSED, "job20": Verdict.BROKEN}
    prepared = [side.start(job_id) for job_id in job_ids]
    verdicts = side.fences.start([write for _, write in prepared])
    assert verdicts == [expected.get(job_id, Verdict.DONE) for job_id in job_ids]

    side.client.hset(keys.rq_job("job30"), "status", "canceled")
    side.client.set("rq:results:job40", "not a stream")
    writes = [
        side.rq.writes.succeed(running, RETURNED, a_result(running.job_id, BATCH), TTL_S) for running, _ in prepared
    ]
    writes[50] = side.rq.writes.add(prepared[50][0], [("SET", "beside", 1)])
    expected |= {"job20": Verdict.REFUSED, "job30": Verdict.REFUSED, "job40": Verdict.BROKEN, "job50": Verdict.DONE}
    assert side.fences.finish(writes) == [expected.get(job_id, Verdict.DONE_FOR_NONE) for job_id in job_ids]
    assert side.client.hget(keys.batch(BATCH), "completed") == str(1 + 100 - 5).encode()
    assert side.client.get("beside") == b"1"
    assert side.fences.finish(writes[:2]) == [Verdict.REFUSED] * 2  # sent again they do nothing


def test_an_error_that_is_not_a_jobs_own_is_raised(side: Side) -> None:
    side.put(fields_of())
    running = side.started()
    broken_server = side.rq.writes.add(running, [("NO-SUCH-COMMAND",)])
    with pytest.raises(redis.ResponseError, match=r"(?i)unknown"):
        side.fences.finish([broken_server])


def test_nothing_that_rq_records_for_a_start_is_missing() -> None:
    """The number of RQ's commands, so that a new one is noticed even if it would write nothing here."""
    client = redis.Redis()  # never connects
    record = client.pipeline(transaction=False)
    job = RqJob(JOB, connection=client, serializer="json")
    Execution.create(job, EXECUTION_TTL_S, pipeline=record, worker_name=WORKER)
    job.prepare_for_execution(WORKER, pipeline=record)
    record.persist(job.key)
    fence_commands = 2  # LREM, HGET
    assert plain_jobs.START.count("redis.call(") - fence_commands == len(commands_of(record))
