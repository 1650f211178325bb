"""Running jobs note how far they are, and whoever takes them over goes on from there."""

from __future__ import annotations

import logging
import threading

import pytest
import redis
from worker_harness import MODEL, WorkerThread, producer_for, running_worker, successors, wait_until

from headrace.producer import Job
from headrace.shared import keys
from headrace.worker.checkpoint import decode_checkpoint, encode_checkpoint
from headrace.worker.fence import FencedWrite, Fences, Verdict

EACH_STEP_S = 1e-9


def data_of(connection: redis.Redis, job: Job) -> bytes:
    data = connection.hget(keys.rq_job(job.id), "data")
    assert isinstance(data, bytes)
    return data


def tokens_of(connection: redis.Redis, job: Job) -> list[int] | None:
    raw = connection.get(keys.checkpoint(job.id))
    return decode_checkpoint(raw, model=MODEL, data=data_of(connection, job)) if isinstance(raw, bytes) else None


def hold_with_six_tokens(connection: redis.Redis, held: WorkerThread, job: Job) -> None:
    """Wait until the worker stands still after six passes, with what it has in its checkpoint."""
    wait_until(lambda: tokens_of(connection, job) == [*b"bcdefg"], "six tokens in the checkpoint")


def test_a_dead_workers_job_goes_on_from_its_checkpoint(redis_client: redis.Redis) -> None:
    with (
        producer_for(redis_client) as producer,
        running_worker(redis_client, checkpoint_interval_s=EACH_STEP_S) as dead,
    ):
        dead.model.hold_after = 6
        job = producer.submit("a", max_tokens=9)
        hold_with_six_tokens(redis_client, dead, job)
        assert 0 < redis_client.ttl(keys.checkpoint(job.id)) <= 7 * 24 * 3600
        dead.pretend_to_die()
        with running_worker(redis_client) as heir:
            result = job.result(timeout=20)
        assert result.text == successors("a", 9)
        assert result.outputs[0].token_ids == [*b"bcdefghij"]
        assert result.attempt == 2
        assert result.usage is not None
        assert (result.usage.completion_tokens, result.usage.resumed_tokens) == (9, 6)
        assert len(heir.model.rows_of_steps) == 3
        assert not redis_client.exists(keys.checkpoint(job.id))


def test_what_comes_late_from_a_worker_that_has_lost_its_job_is_refused(redis_client: redis.Redis) -> None:
    with (
        producer_for(redis_client) as producer,
        running_worker(redis_client, checkpoint_interval_s=EACH_STEP_S) as dead,
    ):
        dead.model.hold_after = 6
        job = producer.submit("a", max_tokens=40)
        hold_with_six_tokens(redis_client, dead, job)
        dead.pretend_to_die()
        with running_worker(redis_client, checkpoint_interval_s=0):
            job.result(timeout=20)
        dead.model.gate.set()  # the zombie goes on, and notes each of its steps
        wait_until(lambda: dead.worker._engine.num_rows == 0, "the zombie to finish its row")
        dead.worker.ask_to_stop()
        dead.join()
        assert not redis_client.exists(keys.checkpoint(job.id))


def test_decoding_does_not_wait_for_the_writing_of_checkpoints(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, written = Fences.finish, threading.Event()

    def finish(fences: Fences, writes: list[FencedWrite]) -> list[Verdict]:
        if writes:
            assert written.wait(20)
        return original(fences, writes)

    monkeypatch.setattr(Fences, "finish", finish)
    noting = {"checkpoint_interval_s": EACH_STEP_S}
    with producer_for(redis_client) as producer, running_worker(redis_client, **noting) as running:
        job = producer.submit("a", max_tokens=30)
        wait_until(lambda: len(running.model.rows_of_steps) == 30, "all steps, while the first checkpoint is held up")
        assert not redis_client.exists(keys.checkpoint(job.id))
        written.set()
        assert job.result(timeout=20).text == successors("a", 30)


def test_a_job_handed_back_on_an_orderly_stop_computes_nothing_twice(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 30}] * 4, batch="b")
        with running_worker(redis_client, checkpoint_interval_s=0) as first:
            first.model.hold_after = 6
            wait_until(lambda: len(first.model.rows_of_steps) == 6, "six steps")
            assert list(redis_client.scan_iter(keys.checkpoint("*"))) == []
            first.worker.ask_to_stop()
            first.worker.ask_to_stop()
            first.model.gate.set()
            first.join()
        with running_worker(redis_client) as second:
            results = list(batch.results(timeout=20))
    assert {result.text for result in results} == {successors("a", 30)}
    assert {result.attempt for result in results} == {1}
    steps = first.model.rows_of_steps + second.model.rows_of_steps
    assert sum(steps) == 4 * 30
    assert sum(result.usage.resumed_tokens for result in results if result.usage) == sum(first.model.rows_of_steps)


def test_stop_strings_are_found_across_the_point_of_resuming(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=30, stop="ghi")
        raw = encode_checkpoint([*b"bcdefgh"], model=MODEL, data=data_of(redis_client, job))
        redis_client.set(keys.checkpoint(job.id), raw)
        with running_worker(redis_client):
            result = job.result(timeout=20)
    assert result.text == "bcdef"
    assert result.outputs[0].stop_reason == "ghi"
    assert result.usage is not None
    assert result.usage.resumed_tokens == 7


@pytest.mark.parametrize("raw", [b"", b"\x80\x04junk", b"[98, 99]", "foreign", "vocabulary", "too long", "hash"])
def test_a_checkpoint_that_is_not_this_jobs_is_ignored_and_the_log_says_so(
    redis_client: redis.Redis, raw: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headrace.worker")
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=5, stop="def")
        data = data_of(redis_client, job)
        made = {
            "foreign": encode_checkpoint([*b"xy"], model=MODEL, data=b"another job's"),
            "vocabulary": encode_checkpoint([98, 257], model=MODEL, data=data),
            "too long": encode_checkpoint([*b"bcbcb"], model=MODEL, data=data),
        }
        if raw == "hash":
            redis_client.hset(keys.checkpoint(job.id), "a", "b")
        else:
            redis_client.set(keys.checkpoint(job.id), made[raw] if isinstance(raw, str) else raw)
        with running_worker(redis_client):
            result = job.result(timeout=20)
    assert result.text == "bc"
    assert result.usage is not None
    assert result.usage.resumed_tokens == 0
    assert not redis_client.exists(keys.checkpoint(job.id))
    assert (f"ignored the checkpoint of job {job.id}" in caplog.text) is (raw != "hash")


def test_a_job_that_is_cancelled_after_it_was_handed_back_leaves_no_checkpoint(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer:
        job = producer.submit("a", max_tokens=5)
        redis_client.set(keys.checkpoint(job.id), b"x")
        job.cancel()
        assert not redis_client.exists(keys.checkpoint(job.id))
