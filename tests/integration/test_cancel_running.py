"""Cancelling a running job when the message to its worker got lost, or the worker with it."""

from __future__ import annotations

import pytest
import redis
from worker_harness import producer_for, running_worker, wait_until

from headrace.producer import cancel
from headrace.shared import keys
from headrace.shared.job import CANCEL_FIELD
from headrace.shared.schema import ErrorCode, FinishReason, Result


@pytest.fixture(autouse=True)
def _messages_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "_stop", lambda worker, job_id: ("PUBLISH", "nobody", job_id))


def assert_cancelled(result: Result) -> None:
    assert result.error is not None
    assert result.error.code is ErrorCode.CANCELLED
    assert result.outputs[0].finish_reason is FinishReason.CANCELLED


def test_a_running_job_is_cancelled_though_the_message_was_lost(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.hold_after = 6
        job, other = producer.submit("a", max_tokens=60), producer.submit("a", max_tokens=20)
        wait_until(lambda: not running.model.gate.is_set(), "five steps")
        assert job.cancel()
        wait_until(lambda: not running.worker._inbox.empty(), "the worker to have noticed")
        running.model.gate.set()
        result = job.result(timeout=20)
        assert_cancelled(result)
        assert "bcdefgh".startswith(result.text)
        assert result.text != ""
        assert len(other.result(timeout=20).text) == 20
        assert not redis_client.hexists(keys.rq_job(job.id), CANCEL_FIELD)
        assert not redis_client.exists(keys.cancels(running.worker.name))


def test_a_cancelled_job_whose_worker_dies_keeps_its_text_and_is_run_no_further(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client, checkpoint_interval_s=1e-9) as dead:
        dead.model.hold_after = 6
        job = producer.submit("a", max_tokens=60)
        # The step that is held up is in the way of what the worker is told; what it has stored is six tokens long.
        wait_until(lambda: redis_client.strlen(keys.checkpoint(job.id)) == 17 + 6 * 4, "the checkpoint")
        assert job.cancel()
        dead.pretend_to_die()
        with running_worker(redis_client) as heir:
            result = job.result(timeout=20)
        assert_cancelled(result)
        assert result.text == "bcdefg"
        assert result.attempt == 2
        assert heir.model.rows_of_steps == []
        assert not redis_client.hexists(keys.rq_job(job.id), CANCEL_FIELD)


def test_what_is_no_job_id_in_the_set_of_cancels_is_passed_over(redis_client: redis.Redis) -> None:
    with producer_for(redis_client) as producer, running_worker(redis_client) as running:
        running.model.gate.clear()
        job = producer.submit("a", max_tokens=60)
        wait_until(lambda: job.status() == "started", "the job to start")
        redis_client.sadd(keys.cancels(running.worker.name), b"\xff", "a b", "no-such-job")
        assert job.cancel()
        seen = running.worker._inbox.qsize()
        wait_until(lambda: running.worker._inbox.qsize() >= seen + 3, "a whole look of the keeper")  # two ids a look
        running.model.gate.set()
        assert_cancelled(job.result(timeout=20))
