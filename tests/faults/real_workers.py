"""Real workers on a small random model, each a process, and the jobs that tests give them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis
from faults.processes import context
from faults.soak_worker import WorkerPlan, run_worker
from worker_harness import wait_until

from headrace.producer import Batch, Producer
from headrace.shared import keys
from headrace.shared.connection import as_text
from headrace.shared.schema import Result

MODEL = "tiny"
QUEUE = "headrace-tiny"
PATIENCE_S = 120.0


class RealWorkers:
    """Worker processes; all are killed at the end. Their logs are in `folder`."""

    def __init__(self, model: Path, folder: Path, **plan: Any) -> None:
        self._plan = {"lease_s": 2.0, "slots": 8, "checkpoint_interval_s": 0.1, "max_crashes": 3, **plan}
        self._model = model
        self._folder = folder
        self._processes: list[BaseProcess] = []

    def start(self, url: str, **plan: Any) -> int:
        """Start one; returns its number, from 0."""
        number = len(self._processes)
        made = WorkerPlan(url=url, model=str(self._model), **{**self._plan, **plan})
        process = context().Process(target=run_worker, args=(made, self._folder, number))
        process.start()
        self._processes.append(process)
        return number

    def log(self, number: int) -> str:
        return (self._folder / f"{number}.log").read_text()

    def logs(self) -> str:
        """All that the workers have said, for the message of a test that fails."""
        return "".join(f"worker {number}:\n{self.log(number)}" for number in range(len(self._processes)))

    def name(self, number: int, direct: redis.Redis) -> str | None:
        """The worker's name, once it has registered and for as long."""
        pid = f"-{self._processes[number].pid}-"
        return next((name for raw in direct.smembers(keys.WORKERS) if pid in (name := as_text(raw))), None)

    def all_live(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].join()

    def terminate(self, number: int) -> int | None:
        """Stop one in good order; returns its exit code."""
        self._processes[number].terminate()
        self._processes[number].join(PATIENCE_S)
        return self._processes[number].exitcode

    def stop(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number)


def submit(producer: Producer, name: str, count: int, max_tokens: int = 60) -> Batch:
    """Jobs with sampling and without an end of their own; those of one number have the same text in each batch."""
    items = [
        {
            "id": str(i),
            "prompt": f"prompt {i}",
            "max_tokens": max_tokens + i,
            "top_k": 20,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(count)
    ]
    return producer.submit_many(items, batch=name)


def all_good(batch: Batch) -> list[Result]:
    """The results of a batch, each without an error and there once, with the batch's counts to match."""
    results = list(batch.results(timeout=PATIENCE_S))
    assert [result.error for result in results if result.error] == []
    assert len({result.id for result in results}) == len(results)
    progress = batch.progress()
    assert (progress.total, progress.completed, progress.failed) == (len(results), len(results), 0)
    return results


def texts(results: list[Result]) -> Mapping[str | None, str]:
    return {result.id: result.text for result in results}


def attempts(results: list[Result]) -> set[int]:
    return {result.attempt for result in results}


def last(seconds: float) -> None:
    """Let a fault last so long. It is what the test is about, and nothing is synchronised by it."""
    time.sleep(seconds)


def wait_for_progress(batch: Batch, completed: int) -> None:
    wait_until(lambda: batch.progress().completed >= completed, f"{completed} jobs to be done", PATIENCE_S)
