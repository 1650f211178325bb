"""Four workers under load, each replaced by a new one in turn."""

from __future__ import annotations

from pathlib import Path

import redis
from faults.real_workers import MODEL, RealWorkers, all_good, attempts, submit, texts, wait_for_progress
from tiny_model import save_tiny_model
from worker_harness import wait_until

from headrace.producer import Producer
from headrace.shared import keys

WORKERS = 4
JOBS = 60


def test_a_rolling_restart_under_load_loses_nothing(tmp_path: Path, redis_url: str) -> None:
    workers = RealWorkers(save_tiny_model(tmp_path / MODEL, max_positions=2048), tmp_path, slots=4, lease_s=30.0)
    try:
        with Producer(redis_url, model=MODEL) as producer, redis.Redis.from_url(redis_url) as direct:
            for _ in range(WORKERS):
                workers.start(redis_url)
            batches = []
            for number in range(WORKERS):
                batches.append(submit(producer, f"batch-{number}", JOBS))
                wait_for_progress(batches[-1], 1)
                assert not batches[-1].progress().finished  # it is stopped under load
                assert workers.terminate(number) == 0
                successor = workers.start(redis_url)
                wait_until(lambda new=successor: workers.name(new, direct) is not None, "the new worker", 90.0)
            found = [all_good(batch) for batch in batches]
            for results in found:
                assert len(results) == JOBS
                assert attempts(results) == {1}  # an orderly stop blames nobody
                assert texts(results) == texts(found[0])
            started = {result.worker or "" for results in found for result in results}
            assert all(direct.llen(keys.claims(worker)) == 0 for worker in started)
    finally:
        workers.stop()
