"""Real worker processes on a real server: kills, stops, and RQ's own tools."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from tiny_model import save_tiny_model
from worker_harness import wait_until

from headrace.producer import Batch, Producer
from headrace.shared import keys
from headrace.shared.schema import Result

MODEL = "tiny"
QUEUE = "headrace-tiny"
START_S = 90.0


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def producer(redis_url: str) -> Iterator[Producer]:
    with Producer(redis_url, model=MODEL) as made:
        yield made


class Workers:
    """Worker processes that are killed at the end of the test if they are still there."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self._url = url
        self._folder = folder
        self._stack = stack

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "headrace.worker", "--redis", self._url, "--model", str(self._folder)]
        # One thread each, so that several on a small machine do not wait for one another.
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--lease", "2", "--slots", "8", *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def workers(redis_url: str, tiny_folder: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(redis_url, tiny_folder, stack)


def run_stock_worker(url: str, folder: Path) -> None:
    """RQ's own worker, until the queue is empty."""
    options = ("--worker-class", "rq.worker.SimpleWorker", "--serializer", "rq.serializers.JSONSerializer")
    subprocess.run(
        [Path(sys.executable).with_name("rq"), "worker", "--burst", "--url", url, *options, QUEUE],
        env={**os.environ, "HEADRACE_MODEL": str(folder), "HEADRACE_DTYPE": "float32"},
        check=True,
        timeout=START_S,
    )


def submit(producer: Producer, name: str, count: int = 60) -> Batch:
    """Jobs with sampling and without seeds; the ids make them the same in each batch of one name."""
    return producer.submit_many(
        (
            {
                "id": str(i),
                "prompt": f"prompt {i}",
                "max_tokens": 60 + i % 40,
                "top_k": 20,
                "seed": i,
                "ignore_eos": True,
            }
            for i in range(count)
        ),
        batch=name,
    )


def texts(batch: Batch) -> dict[str | None, str]:
    return {result.id: result.text for result in all_good(batch)}


def all_good(batch: Batch) -> list[Result]:
    """The results of a batch, each without an error and there once."""
    results = list(batch.results(timeout=START_S))
    assert [result.error for result in results if result.error] == []
    assert len({result.id for result in results}) == len(results)
    return results


def test_jobs_of_a_killed_worker_go_on_from_their_checkpoints_and_end_once_with_the_same_text(
    connection: redis.Redis, producer: Producer, workers: Workers
) -> None:
    undisturbed = submit(producer, "undisturbed")
    victim = workers.start("--checkpoint-interval", "0.02")
    expected = texts(undisturbed)
    batch = submit(producer, "disturbed")
    wait_until(lambda: batch.progress().completed >= 5, "the victim to be at work", START_S)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert batch.progress().completed < 60
    assert connection.zcard(f"rq:wip:{QUEUE}") > 0
    workers.start()
    results = all_good(batch)
    assert {result.id: result.text for result in results} == expected
    resumed = [result.usage.resumed_tokens for result in results if result.usage and result.attempt == 2]
    assert len(resumed) > 0
    assert sum(resumed) > 0
    assert list(connection.scan_iter(keys.checkpoint("*"))) == []
    progress = batch.progress()
    assert (progress.total, progress.completed, progress.failed) == (60, 60, 0)
    assert connection.xlen(keys.batch_done("disturbed")) == 60
    assert connection.zcard(f"rq:wip:{QUEUE}") == 0


def test_sigterm_finishes_the_running_jobs_and_leaves_the_rest_in_the_queue(
    connection: redis.Redis, producer: Producer, workers: Workers
) -> None:
    batch = submit(producer, "b")
    worker = workers.start()
    wait_until(lambda: batch.progress().completed >= 5, "the worker to be at work", START_S)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(START_S) == 0
    done = batch.progress().completed
    assert 5 <= done < 60
    assert connection.llen(keys.rq_queue(QUEUE)) == 60 - done
    assert connection.zcard(f"rq:wip:{QUEUE}") == 0
    assert connection.smembers(keys.WORKERS) == set()
    assert connection.smembers("rq:workers") == set()


def test_a_running_job_is_cancelled_though_its_worker_was_cut_off_when_it_was_told(
    connection: redis.Redis, producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    long = save_tiny_model(tmp_path / MODEL, max_positions=16_384)
    job = producer.submit("a", max_tokens=16_000, ignore_eos=True)
    workers.start("--model", str(long), "--max-context", "16384", "--slots", "1", "--checkpoint-interval", "0.1")
    wait_until(lambda: connection.exists(keys.checkpoint(job.id)), "the job to be under way", START_S)
    assert connection.client_kill_filter(_type="pubsub") == 1  # the worker listens again after a second
    assert job.cancel()
    result = job.result(timeout=START_S)
    assert result.error is not None
    assert result.error.code == "cancelled"
    assert 0 < len(result.outputs[0].token_ids) < 16_000


def test_two_workers_share_a_queue(producer: Producer, workers: Workers) -> None:
    batch = submit(producer, "b", 400)
    workers.start()
    workers.start()
    results = list(batch.results(timeout=START_S))
    assert len({result.job_id for result in results}) == len(results) == 400
    assert len({result.worker for result in results}) == 2


def test_a_stock_rq_worker_runs_a_job_alone(
    connection: redis.Redis, producer: Producer, tiny_folder: Path, redis_url: str
) -> None:
    good = submit(producer, "b", 1)
    bad = producer.submit("a", model="other-model", max_tokens=3)
    connection.lmove(keys.rq_queue("headrace-other-model"), keys.rq_queue(QUEUE), "LEFT", "RIGHT")
    run_stock_worker(redis_url, tiny_folder)
    (result,) = good.results(timeout=5)
    assert result.error is None
    assert result.usage is not None
    assert result.usage.completion_tokens == 60
    refused = bad.result(timeout=5)
    assert refused.error is not None
    assert refused.error.code == "model_mismatch"
    assert bad.status() == "failed"


def test_a_stock_worker_and_ours_give_the_same_text(
    producer: Producer, workers: Workers, tiny_folder: Path, redis_url: str
) -> None:
    ours = submit(producer, "ours", 3)
    workers.start("--burst")
    expected = texts(ours)
    theirs = submit(producer, "theirs", 3)
    run_stock_worker(redis_url, tiny_folder)
    assert texts(theirs) == expected


def test_a_worker_that_can_not_start_says_why_in_one_line(workers: Workers, redis_url: str, tmp_path: Path) -> None:
    base = [sys.executable, "-m", "headrace.worker"]
    cases = [
        (["--redis", "redis://127.0.0.1:1/0"], "no answer from Redis at redis://127.0.0.1:1/0"),
        (["--redis", redis_url, "--model", str(tmp_path)], "config.json"),
        (["--redis", redis_url, "--model", "smolm2-135m"], "smollm2-135m"),
        (["--redis", redis_url, "--lease", "0.5"], "--lease is 0.5 s"),
        (["--redis", redis_url, "--checkpoint-interval", "-1"], "--checkpoint-interval is -1 s"),
        (["--redis", redis_url, "--step-timeout", "0"], "--step-timeout is 0 s"),
        (["--redis", "nonsense"], "not a Redis URL"),
    ]
    for options, says in cases:
        outcome = subprocess.run([*base, *options], capture_output=True, text=True, timeout=START_S, check=False)
        assert outcome.returncode == 2, outcome.stderr
        assert outcome.stderr.count("\n") == 1, outcome.stderr
        assert outcome.stderr.startswith("headrace: error: ")
        assert says in outcome.stderr
