"""Engines that hang or take their process along: who is given up, and who is not."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

import pytest
import redis
from faults.faulty_worker import run_faulty_worker
from faults.processes import context
from worker_harness import producer_for, successors, wait_until

from headrace.producer import Batch
from headrace.shared import keys
from headrace.shared.schema import ErrorCode


def start(url: str, fault: str) -> BaseProcess:
    process = context().Process(target=run_faulty_worker, args=(url, fault))
    process.start()
    return process


def supervise(url: str, fault: str, batch: Batch) -> list[int | None]:
    """Start a worker again and again until the batch is done; returns the exit codes of those that ended."""
    codes: list[int | None] = []
    process = start(url, fault)
    try:
        while not batch.progress().finished:
            process.join(0.05)
            if process.exitcode is not None:
                codes.append(process.exitcode)
                process = start(url, fault)
        return codes
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("fault", "exit_code", "code", "says"),
    [
        ("hang", 3, ErrorCode.INTERNAL_ERROR, "failed 3 times, the last with: a step did not come back for 1 s"),
        ("die", -9, ErrorCode.WORKER_LOST, "3 workers died while running this job"),
    ],
)
def test_the_job_that_workers_end_of_is_given_up_and_its_neighbours_finish(
    redis_url: str, fault: str, exit_code: int, code: ErrorCode, says: str
) -> None:
    with redis.Redis.from_url(redis_url) as connection, producer_for(connection) as producer:
        good = [{"prompt": "n", "max_tokens": 40}] * 3
        batch = producer.submit_many([*good, {"prompt": "a", "id": "bad", "max_tokens": 40}, *good], batch="b")
        codes = supervise(redis_url, fault, batch)
        assert set(codes) == {exit_code}
        # The third worker in a row that ends while a job gets no further is the last. It has 12 tokens to get further
        # by, and each may take the blame for two of them away.
        assert 3 <= len(codes) <= 3 + 2 * 12
        results = list(batch.results(timeout=20))
        assert len(results) == connection.xlen(keys.batch_done("b")) == 7
        (bad,) = (result for result in results if result.id == "bad")
        assert {result.text for result in results if result is not bad} == {successors("n", 40)}
        assert all(result.ok for result in results if result is not bad)
        assert bad.error is not None
        assert bad.error.code is code
        assert bad.error.message.startswith(says)
        assert bad.attempt == len(codes)


def test_a_hung_worker_hands_its_jobs_back_before_it_ends(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as connection, producer_for(connection) as producer:
        batch = producer.submit_many([{"prompt": "a", "max_tokens": 40}] * 6, batch="b")  # two of them wait for a slot
        worker = start(redis_url, "hang")
        wait_until(lambda: worker.exitcode is not None, "the worker to end", 60)
        assert worker.exitcode == 3
        assert connection.lrange(keys.rq_queue("headrace-fake"), 0, -1) == connection.lrange(
            keys.batch_jobs("b"), 0, -1
        )
        assert connection.zcard("rq:wip:headrace-fake") == 0
        assert connection.smembers(keys.WORKERS) == set()
        assert sum(1 for _ in connection.scan_iter(keys.checkpoint("*"))) == 4
        assert batch.progress().finished is False
