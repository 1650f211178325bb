"""The batching worker on a queue: fakeredis and a real server, an engine without weights."""

from __future__ import annotations

import json
import logging
import zlib

import pytest
import redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.job import Job as RqJob
from rq.suspension import resume, suspend
from rq.worker import Worker
from worker_harness import QUEUE, ByteCodec, WorkerThread, producer_for, running_worker, successors, wait_until

from headrace.shared import keys
from headrace.shared.job import TASK, job_hash
from headrace.shared.schema import ErrorCode, FinishReason, Request
from headrace.worker.fence import FencedWrite, Fences, Verdict


def put_raw(connection: redis.Redis, job_id: str, fields: dict[str, object]) -> None:
    """Queue a job by plain commands, as a client in another language would, or somebody hostile."""
    connection.hset(keys.rq_job(job_id), mapping=fields)  # type: ignore[arg-type]
    connection.rpush(keys.rq_queue(QUEUE), job_id)


def raw_call(*call: object) -> dict[str, object]:
    return {"data": json.dumps(call), "status": "queued", "origin": QUEUE}


def rq_status(connection: redis.Redis, job_id: str) -> str:
    return (connection.hget(keys.rq_job(job_id), "status") or b"").decode()


def rq_queue(connection: redis.Redis) -> Queue:
    return Queue(QUEUE, connection=connection, serializer="json")


def test_a_job_becomes_a_result(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=5, id="mine", metadata={"k": 1}, temperature=0)
        result = job.result(timeout=20)
    assert result.text == "bcdef"
    assert (result.id, result.job_id, result.model, result.metadata) == ("mine", job.id, "fake", {"k": 1})
    assert result.outputs[0].finish_reason is FinishReason.LENGTH
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (1, 5)
    assert result.attempt == 1
    assert result.timing is not None


def test_many_jobs_run_as_one_batch_and_each_keeps_its_own_text(redis_client: redis.Redis) -> None:
    prompts = [chr(ord("A") + i % 20) for i in range(40)]
    with producer_for(redis_client) as producer:
        batch = producer.submit_many(
            ({"prompt": p, "max_tokens": 3 + i % 7, "id": str(i), "temperature": 0} for i, p in enumerate(prompts)),
            batch="many",
        )
        with running_worker(redis_client, slots=8) as running:
            texts = {result.id: result.text for result in batch.results(timeout=20)}
    assert texts == {str(i): successors(p, 3 + i % 7) for i, p in enumerate(prompts)}
    assert max(running.model.rows_of_steps) == 8
    tokens = sum(3 + i % 7 for i in range(40))
    assert sum(running.model.rows_of_steps) == tokens  # each from its row's share of one step; none is wasted


def test_a_result_its_stream_entry_its_counts_and_rq_agree(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 4}, {"prompt": "b" * 99}], batch="b")
        good, bad = sorted(batch.results(timeout=20), key=lambda result: not result.ok)
        progress = batch.progress()
    assert (progress.total, progress.completed, progress.failed) == (2, 1, 1)
    assert (progress.prompt_tokens, progress.completion_tokens) == (1, 4)
    assert bad.error is not None
    assert bad.error.code is ErrorCode.PROMPT_TOO_LONG
    assert "99" in bad.error.message
    assert "64" in bad.error.message
    job = RqJob.fetch(good.job_id, connection=redis_client, serializer="json")
    assert job.get_status() == "finished"
    outcome = job.latest_result()
    assert outcome is not None
    assert outcome.return_value["result"] == keys.result(good.job_id)
    queue = rq_queue(redis_client)
    assert queue.finished_job_registry.get_job_ids() == [good.job_id]
    assert queue.failed_job_registry.get_job_ids() == [bad.job_id]
    assert queue.started_job_registry.get_job_ids(cleanup=False) == []
    failed = RqJob.fetch(bad.job_id, connection=redis_client, serializer="json").latest_result()
    assert failed is not None
    assert failed.exc_string.startswith("prompt_too_long: the prompt has 99 tokens")
    assert redis_client.ttl(keys.result(good.job_id)) > 0


def test_rq_shows_running_jobs_and_the_worker_truthfully(redis_client: redis.Redis) -> None:
    with running_worker(redis_client, slots=4) as running, producer_for(redis_client) as producer:
        running.model.gate.clear()
        producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 6, batch="b")
        registry = rq_queue(redis_client).started_job_registry
        wait_until(lambda: len(registry.get_job_ids(cleanup=False)) == 4, "four jobs to start")
        (worker,) = Worker.all(connection=redis_client, serializer="json")
        assert worker.name == running.worker.name
        wait_until(lambda: redis_client.hget(worker.key, "state") == b"busy", "the worker to be shown as busy")
        assert worker.current_execution_count == 4
        assert rq_queue(redis_client).count == 2
        running.model.gate.set()
        wait_until(lambda: redis_client.hget(worker.key, "state") == b"idle", "the worker to be shown as idle")
        assert int(redis_client.hget(worker.key, "successful_job_count") or 0) == 6
    assert Worker.all(connection=redis_client, serializer="json") == []


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        (raw_call(TASK, None, [], {"request": {"prompt": "a", "foo": 1}}), "invalid_request", "foo: unknown field"),
        (raw_call("os.system", None, ["id"], {}), "invalid_request", "'os.system'"),
        (raw_call(TASK, None, ["x"], {"request": {}}), "invalid_request", "keyword arguments only"),
        (raw_call(TASK, None, [], {"request": {"prompt": "a", "model": "b"}}), "model_mismatch", "'b'"),
        (raw_call(TASK, None, [], {"request": {"prompt": [1, 999]}}), "invalid_request", "999"),
        (raw_call(TASK, None, [], [1]), "invalid_request", "keyword arguments only"),
        (raw_call(1), "invalid_request", "form"),
        (raw_call(TASK, None, [], {"request": {"id": "\ud800", "foo": 1}}), "invalid_request", "surrogate"),
        (raw_call(TASK, None, [], {"\ud800": 1}), "invalid_request", "surrogate"),
        (raw_call(TASK, None, [], {"request": {"prompt": "a"}, "batch": "\ud800"}), "invalid_request", "surrogate"),
        (
            raw_call(TASK, None, [], {"request": {"prompt": "a", "metadata": {"x": float("nan")}}}),
            "invalid_request",
            "JSON",
        ),
        (
            raw_call(TASK, None, [], {"request": {"prompt": "a"}, "batch": "night:done"}),
            "invalid_request",
            "night:done",
        ),
        (raw_call(TASK, None, [], {"request": {"prompt": "a"}, "batch": ""}), "invalid_request", "batch name"),
        ({"data": "\x80\x04\x95", "status": "queued"}, "invalid_request", "not JSON"),
        ({"data": zlib.compress(b"[" * 100_000), "status": "queued"}, "invalid_request", "not JSON"),
        ({"data": zlib.compress(b"0" * (65 * 2**20)), "status": "queued"}, "invalid_request", "16,777,216"),
        ({"data": "x", "status": "queued", "timeout": "soon"}, "invalid_request", "hash can't be read"),
        ({"status": "queued"}, "invalid_request", "not JSON"),
    ],
)
def test_a_bad_job_gets_its_own_error_and_its_neighbour_an_answer(
    redis_client: redis.Redis, fields: dict[str, object], code: str, says: str
) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        put_raw(redis_client, "bad", fields)
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        result = producer.job("bad").result(timeout=20)
    assert result.error is not None
    assert result.error.code == code
    assert says in result.error.message
    assert rq_status(redis_client, "bad") == "failed"


class Poison(RuntimeError):
    """What no part of the worker foresees."""


@pytest.mark.parametrize("part", ["encode_prompt", "decode"])
def test_an_unforeseen_failure_of_one_job_is_its_own(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    original = getattr(ByteCodec, part)

    def fail_for_x(codec: ByteCodec, what: str | list[int]) -> object:
        if (what if isinstance(what, str) else bytes(what).decode()).startswith(("x", "y")):
            raise Poison("\ud800")
        return original(codec, what)

    monkeypatch.setattr(ByteCodec, part, fail_for_x)
    with running_worker(redis_client), producer_for(redis_client) as producer:
        bad, good = producer.submit("x", id="mine", max_tokens=3), producer.submit("a", max_tokens=3)
        assert good.result(timeout=20).text == "bcd"
        result = bad.result(timeout=20)
        assert producer.submit("a", max_tokens=2).result(timeout=20).text == "bc"
    assert result.error is not None
    assert result.error.code is ErrorCode.INTERNAL_ERROR
    assert "Poison" in result.error.message
    assert rq_status(redis_client, bad.id) == "failed"


@pytest.mark.parametrize("part", ["encode_prompt", "decode"])
def test_no_log_has_a_jobs_text(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    def quote(codec: ByteCodec, what: str | list[int]) -> object:
        raise Poison(f"can't do {what!r}")

    monkeypatch.setattr(ByteCodec, part, quote)
    caplog.set_level("DEBUG")
    with running_worker(redis_client), producer_for(redis_client) as producer:
        put_raw(redis_client, "bad", raw_call(TASK, None, [], {"request": {"prompt": "s3cret", "x": "s3cret"}}))
        job = producer.submit("s3cret", max_tokens=6, stop=["s3cret"])
        assert job.result(timeout=20).error is not None
        assert producer.job("bad").result(timeout=20).error is not None
    logged = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert f"job {job.id}" in logged
    assert "Poison at test_batch_worker.py" in logged
    assert "s3cret" not in logged
    assert str(list(b"uvwxyz")) not in logged  # what the fake model says after "t"


def test_ids_that_no_job_can_have_and_jobs_that_are_gone_are_dropped(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        redis_client.rpush(keys.rq_queue(QUEUE), b"\xff\xfe:", "a b", "deleted-meanwhile")
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        wait_until(lambda: not redis_client.exists(keys.claims(_only_worker(redis_client))), "the claims to be empty")


def test_keys_that_hold_something_else_hurt_only_the_jobs_that_lead_to_them(redis_client: redis.Redis) -> None:
    redis_client.set(keys.rq_job("text"), "not a hash")
    redis_client.set(keys.batch("taken"), "not a hash")
    redis_client.hset(keys.batch("odd"), "completed", "many")
    redis_client.zadd(f"rq:wip:{QUEUE}", {"text:execution": 1})
    with producer_for(redis_client) as producer:
        for batch in ("taken", "odd"):
            redis_client.hset(
                keys.rq_job(batch), mapping=job_hash(Request(prompt="x", max_tokens=3), queue=QUEUE, batch=batch)
            )
        redis_client.rpush(keys.rq_queue(QUEUE), "text", "taken", "odd")
        with running_worker(redis_client):
            assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
            wait_until(lambda: not redis_client.exists(keys.claims(_only_worker(redis_client))), "empty claims")
            # A second answer shows that the first round of writes did not end the worker or go on forever.
            assert producer.submit("b", max_tokens=3).result(timeout=20).text == "cde"


def _only_worker(connection: redis.Redis) -> str:
    (name,) = connection.smembers(keys.WORKERS)
    return name.decode()  # type: ignore[union-attr]


def test_an_id_that_stands_twice_in_the_queue_runs_once(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 3}], batch="b")
        (job_id,) = redis_client.lrange(keys.rq_queue(QUEUE), 0, -1)
        redis_client.rpush(keys.rq_queue(QUEUE), job_id)
        with running_worker(redis_client, burst=True) as running:
            running.join()
        assert running.worker.num_settled == 1
        assert redis_client.xlen(keys.batch_done("b")) == 1
        assert batch.progress().completed == 1


def test_jobs_queued_by_plain_commands_run(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        put_raw(redis_client, "plain", raw_call(TASK, None, [], {"request": {"prompt": "a", "max_tokens": 2}}))
        assert producer.job("plain").result(timeout=20).text == "bc"


def test_jobs_queued_by_rq_itself_run(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        job = rq_queue(redis_client).enqueue(TASK, request={"prompt": "a", "max_tokens": 2})
        assert producer.job(job.id).result(timeout=20).text == "bc"


def test_dependents_of_a_job_run_after_it(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        queue = rq_queue(redis_client)
        first = queue.enqueue(TASK, request={"prompt": "a", "max_tokens": 2})
        second = queue.enqueue(TASK, request={"prompt": "b", "max_tokens": 2}, depends_on=first)
        assert producer.job(second.id).result(timeout=20).text == "cd"


def test_callbacks_that_a_job_names_are_never_imported(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        fields: dict[str, object] = dict(job_hash(Request(prompt="a", max_tokens=2), queue=QUEUE, batch=None))
        put_raw(redis_client, "evil", fields | {"success_callback_name": "antigravity.geohash"})
        assert producer.job("evil").result(timeout=20).text == "bc"
    import sys

    assert "antigravity" not in sys.modules


def test_stop_job_ends_one_row_and_keeps_its_text(redis_client: redis.Redis) -> None:
    with running_worker(redis_client) as running, producer_for(redis_client) as producer:
        running.model.gate.clear()
        stopped = producer.submit("a", max_tokens=60)
        other = producer.submit("a", max_tokens=20)
        wait_until(lambda: {stopped.status(), other.status()} == {"started"}, "both jobs to start")
        wait_until(lambda: running.model.num_begun, "the first pass to begin")  # in which it gets a token
        send_stop_job_command(redis_client, stopped.id, serializer="json")
        running.model.gate.set()
        result = stopped.result(timeout=20)
        assert len(other.result(timeout=20).text) == 20
    assert result.error is not None
    assert result.error.code is ErrorCode.CANCELLED
    assert result.outputs[0].finish_reason is FinishReason.CANCELLED
    assert successors("a", 60).startswith(result.text)
    assert 0 < len(result.text) < 60
    assert rq_status(redis_client, stopped.id) == "stopped"


def test_a_job_past_its_timeout_ends_with_its_partial_text(redis_client: redis.Redis) -> None:
    with running_worker(redis_client) as running, producer_for(redis_client) as producer:
        running.model.gate.clear()
        call = raw_call(TASK, None, [], {"request": {"prompt": "a", "max_tokens": 60}})
        put_raw(redis_client, "slow", call | {"timeout": 1})
        wait_until(lambda: rq_status(redis_client, "slow") == "started", "the job to start")
        row = wait_until(lambda: running.worker._engine._live.rows, "the row to be live")[0]
        row.deadline_s = 0.0
        running.model.gate.set()
        result = producer.job("slow").result(timeout=20)
    assert result.error is not None
    assert result.error.code is ErrorCode.TIMEOUT
    assert successors("a", 60).startswith(result.text)


def test_a_cancelled_batch_ends_in_one_result_a_job(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 60}] * 10, batch="b")
        with running_worker(redis_client, slots=4) as running:
            running.model.gate.clear()
            registry = rq_queue(redis_client).started_job_registry
            wait_until(lambda: len(registry.get_job_ids(cleanup=False)) == 4, "four jobs to start")
            batch.cancel()
            running.model.gate.set()
            results = list(batch.results(timeout=20))
    assert len({result.job_id for result in results}) == len(results) == 10
    assert {result.error.code for result in results if result.error} == {ErrorCode.CANCELLED}
    assert batch.progress().cancelled == 10


def test_suspended_workers_take_no_jobs(redis_client: redis.Redis) -> None:
    with running_worker(redis_client) as running, producer_for(redis_client) as producer:
        suspend(redis_client)
        job = producer.submit("a", max_tokens=3)
        before = running.worker._courier.num_looks
        wait_until(lambda: running.worker._courier.num_looks > before + 2, "the worker to have looked again")
        assert job.status() == "queued"
        resume(redis_client)
        assert job.result(timeout=20).text == "bcd"


def test_a_stopped_worker_finishes_its_rows_and_puts_back_what_has_not_begun(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 20, batch="b")
        with running_worker(redis_client, slots=8) as running:
            running.model.gate.clear()
            registry = rq_queue(redis_client).started_job_registry
            wait_until(lambda: len(registry.get_job_ids(cleanup=False)) == 9, "the slots and one ahead to fill")
            running.worker.ask_to_stop()
            running.model.gate.set()
            running.join()
        done = batch.progress().completed
        assert done >= 8
        assert rq_queue(redis_client).count == 20 - done
        _assert_nothing_in_hand(redis_client)


def test_a_second_stop_puts_running_jobs_back_and_another_worker_runs_them(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 60}] * 6, batch="b")
        with running_worker(redis_client) as running:
            running.model.gate.clear()
            registry = rq_queue(redis_client).started_job_registry
            wait_until(lambda: len(registry.get_job_ids(cleanup=False)) == 4, "four jobs to start")
            running.worker.ask_to_stop()
            running.worker.ask_to_stop()
            running.model.gate.set()
            running.join()
        order = redis_client.lrange(keys.rq_queue(QUEUE), 0, -1)
        assert order == redis_client.lrange(keys.batch_jobs("b"), 0, -1)
        _assert_nothing_in_hand(redis_client)
        with running_worker(redis_client):
            results = list(batch.results(timeout=20))
        assert [result.attempt for result in results] == [1] * 6  # an orderly stop is nobody's fault


def _assert_nothing_in_hand(connection: redis.Redis) -> None:
    left = [key.decode() for key in connection.scan_iter("*")]  # type: ignore[union-attr]
    held = ("rq:wip:", "rq:execution", keys.PREFIX + "claims", keys.PREFIX + "lease")
    assert [key for key in left if key.startswith(held)] == []
    assert connection.smembers(keys.WORKERS) == set()


def test_burst_ends_when_the_queue_is_empty(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 3}] * 9, batch="b")
        running = WorkerThread(redis_client, slots=2, max_context=64, burst=True)
        running.join()
        assert batch.progress().completed == 9


def test_a_dead_workers_jobs_run_elsewhere_within_the_lease(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 9}] * 6, batch="b")
        with running_worker(redis_client) as dead:
            dead.model.gate.clear()
            registry = rq_queue(redis_client).started_job_registry
            wait_until(lambda: len(registry.get_job_ids(cleanup=False)) == 4, "four jobs to start")
            # As good as dead: it renews nothing, and its rows stand still.
            dead.worker._keeper.leave()
            redis_client.delete(keys.lease(dead.worker.name))
            redis_client.lmove(keys.rq_queue(QUEUE), keys.claims(dead.worker.name), "LEFT", "RIGHT")
            with running_worker(redis_client):
                results = list(batch.results(timeout=20))
            assert sorted(result.attempt for result in results) == [1, 1, 2, 2, 2, 2]
            assert {result.text for result in results} == {successors("a", 9)}
            dead.model.gate.set()  # the zombie comes back and wants to write
            wait_until(lambda: dead.worker._engine.num_rows == 0, "the zombie to finish its rows")
            dead.worker.ask_to_stop()
            dead.join()
        assert dead.worker.num_settled == 0
        assert redis_client.xlen(keys.batch_done("b")) == 6
        assert batch.progress().completed == 6


def test_a_job_that_workers_die_of_is_given_up(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=60)
        redis_client.hset(keys.rq_job(job.id), mapping={"headrace_crashes": 2, "headrace_blame": 2})
        with running_worker(redis_client) as dead:
            dead.model.gate.clear()
            wait_until(lambda: job.status() == "started", "the job to start")
            dead.worker._keeper.leave()
            redis_client.delete(keys.lease(dead.worker.name))
            with running_worker(redis_client):
                result = job.result(timeout=20)
        assert result.error is not None
        assert result.error.code is ErrorCode.WORKER_LOST
        assert result.attempt == 3


def test_a_job_on_its_last_attempt_runs_alone(redis_client: redis.Redis) -> None:
    rows_beside: list[int] = []

    def before_pass(last_ids: list[int]) -> None:
        if any(ord("A") <= token_id < ord("N") for token_id in last_ids):
            rows_beside.append(len(last_ids) - 1)

    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.before_pass = before_pass
        running.model.hold_after = 3
        before = producer.submit_many([{"prompt": "n", "max_tokens": 10}] * 3, batch="before")
        wait_until(lambda: not running.model.gate.is_set(), "three steps")
        fields: dict[str, object] = dict(job_hash(Request(prompt="A", max_tokens=10), queue=QUEUE, batch=None))
        put_raw(redis_client, "suspect", fields | {"headrace_blame": 2, "headrace_crashes": 2})
        after = producer.submit_many([{"prompt": "n", "max_tokens": 10}] * 6, batch="after")
        wait_until(lambda: running.worker._courier._one_alone, "the suspect to be claimed")
        assert rq_status(redis_client, "suspect") == "queued"  # in the claim list it takes no blame if the worker dies
        running.model.gate.set()
        result = producer.job("suspect").result(timeout=20)
        assert (result.text, result.attempt) == (successors("A", 10), 3)
        assert [len(list(batch.results(timeout=20))) for batch in (before, after)] == [3, 6]
    assert set(rows_beside) == {0}


def test_a_worker_that_has_lost_its_lease_drops_the_rows_and_goes_on(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.gate.clear()
        lost = producer.submit("a", max_tokens=60)
        wait_until(lambda: lost.status() == "started", "the job to start")
        (member,) = redis_client.zrange(f"rq:wip:{QUEUE}", 0, -1)
        redis_client.zrem(f"rq:wip:{QUEUE}", member)  # as another worker would have done
        running.worker._keeper.beat()
        running.model.gate.set()
        assert producer.submit("a", max_tokens=3).result(timeout=20).text == "bcd"
        wait_until(lambda: running.worker._engine.num_rows == 0, "the lost row to be dropped")
        assert not redis_client.exists(keys.result(lost.id))


@pytest.mark.parametrize("sent_again", [True, False])
def test_a_job_whose_start_went_unanswered_runs_at_once(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, sent_again: bool
) -> None:
    original, sent = Fences.start, []

    def start(fences: Fences, writes: list[FencedWrite]) -> list[Verdict]:
        verdicts = original(fences, writes)
        sent.append(writes)
        if len(sent) > 1:
            return verdicts
        if not sent_again:
            raise redis.ConnectionError("cut off before the answer")
        return original(fences, writes)  # as the client does of itself

    monkeypatch.setattr(Fences, "start", start)
    with running_worker(redis_client), producer_for(redis_client) as producer:
        result = producer.submit("a", max_tokens=3).result(timeout=20)
    assert (result.text, result.attempt) == ("bcd", 1)
