"""Retried jobs on a worker: fakeredis and a real server, an engine without weights."""

from __future__ import annotations

import pytest
import redis
from worker_harness import QUEUE, ByteCodec, producer_for, running_worker, wait_until

from headrace.shared import keys


def test_a_job_that_failed_runs_again_and_the_batch_has_one_result_a_job(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, broken = ByteCodec.encode_prompt, True

    def encode_unless_broken(codec: ByteCodec, text: str) -> list[int]:
        if broken and text == "x":
            raise RuntimeError("broken")
        return encode(codec, text)

    monkeypatch.setattr(ByteCodec, "encode_prompt", encode_unless_broken)
    with running_worker(redis_client), producer_for(redis_client) as producer:
        prompts = [{"prompt": prompt, "max_tokens": 2, "id": prompt} for prompt in ("a", "x", "a" * 99)]
        batch = producer.submit_many(prompts, batch="b")
        assert {result.id for result in batch.results(timeout=20) if not result.ok} == {"x", "a" * 99}
        broken = False
        assert batch.retry().count == 2
        results = {result.id: result for result in batch.results(timeout=20)}
        assert {result.text for result in results.values() if result.ok} == {"bc", "yz"}
        assert results["x"].attempt == 1
        progress = batch.progress()
        assert (progress.completed, progress.failed, progress.prompt_tokens) == (2, 1, 2)
        assert redis_client.xlen(keys.batch_done("b")) == 3
        assert redis_client.zcard(f"rq:failed:{QUEUE}") == 1


def test_a_retried_job_is_not_cancelled_by_what_was_said_of_it_before(redis_client: redis.Redis) -> None:
    with running_worker(redis_client) as running, producer_for(redis_client) as producer:
        running.model.gate.clear()
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 20}], batch="b")
        wait_until(lambda: redis_client.zcard(f"rq:wip:{QUEUE}") == 1, "the job to start")
        assert batch.cancel() == 1
        running.model.gate.set()
        (result,) = batch.results(timeout=20)
        assert result.error is not None
        # The worker looks for cancelled jobs every second, and may have seen this one before its result was stored.
        worker = running.worker
        worker._inbox.put(lambda: worker._cancel(result.job_id))
        wait_until(lambda: result.job_id in worker._cancelled_early, "the late word")
        assert batch.retry("cancelled").count == 1
        (again,) = batch.results(timeout=20)
        assert len(again.text) == 20


def test_a_failed_jobs_hash_expires_as_rq_has_it(redis_client: redis.Redis) -> None:
    with running_worker(redis_client), producer_for(redis_client) as producer:
        refused = producer.submit("a" * 99)
        assert refused.result(timeout=20).error is not None
        assert 0 < redis_client.ttl(keys.rq_job(refused.id)) <= 365 * 24 * 3600
