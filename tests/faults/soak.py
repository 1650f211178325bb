"""Many jobs, workers and a server that are killed, frozen and cut off by a seeded schedule, and the books at the end.

python -m faults.soak --jobs 10000 --minutes 15 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis
from faults.durable_server import DurableServer
from faults.processes import context
from faults.soak_worker import NO_SERVER, WorkerPlan, run_worker, sampled_tokens

from headrace.producer import Producer
from headrace.shared import keys
from headrace.shared.schema import Result

MODEL = "tiny"
UNDISTURBED = "undisturbed"
DISTURBED = "disturbed"
_TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A soak. Faults come for `fault_s` seconds at most, one about every `fault_every_s`; all follow from `seed`.

    Jobs are submitted in so many `waves`, spread over that time.
    """

    jobs: int
    waves: int = 10
    fault_s: float
    fault_every_s: float
    seed: int = 1
    workers: int = 2
    slots: int = 16
    lease_s: float = 2.0
    checkpoint_interval_s: float = 0.25
    max_crashes: int = 10  # no job is to blame for what happens here, however often it happens
    finish_s: float = 300.0  # how long the rest may take once the faults are over


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a soak. `wrong` has a line for each thing that must not be."""

    wrong: list[str]
    faults: Counter[str]
    tokens: int
    sampled: int
    resumed: int
    attempts: Counter[int]
    seconds: float

    @property
    def twice_share(self) -> float:
        """The share of the tokens that were computed more than once."""
        return self.sampled / self.tokens - 1

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        attempts = ", ".join(f"{count} in {number}" for number, count in sorted(self.attempts.items()))
        lines = [
            f"{self.seconds:.0f} s; faults: {faults}",
            f"jobs by attempts: {attempts}",
            f"{self.tokens:,} tokens in the results, {self.resumed:,} of them from checkpoints; "
            f"{self.sampled:,} computed: {self.twice_share:.2%} twice",
            *self.wrong,
            "FAILED" if self.wrong else "every job has one result, and the text of an undisturbed run",
        ]
        return "\n".join(lines)


def requests(plan: Plan, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Requests number `first` and on: mostly short answers and some long ones, half of them with a stop string."""
    for number in range(first, first + count):
        rng = random.Random(f"{plan.seed} {number}")
        yield {
            "id": str(number),
            "prompt": "".join(rng.choices("abcdefgh ", k=rng.randint(4, 60))),
            "max_tokens": rng.randint(400, 1200) if rng.random() < 0.2 else rng.randint(20, 200),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_k": 40,
            "seed": number,
            "ignore_eos": True,
            "stop": "".join(rng.choices("abcdefgh", k=2)) if rng.random() < 0.5 else [],
        }


class Crew:
    """Worker processes, as many as the plan wants: whoever is gone is replaced."""

    def __init__(self, plan: Plan, url: str, model: Path, folder: Path, faults: Counter[str]) -> None:
        self._worker_plan = WorkerPlan(
            url=url,
            model=str(model),
            slots=plan.slots,
            lease_s=plan.lease_s,
            checkpoint_interval_s=plan.checkpoint_interval_s,
            max_crashes=plan.max_crashes,
        )
        self._folder = folder
        self._faults = faults
        self._expected: set[int] = set()  # pids that were told to end
        self._number = 0
        self.live: list[BaseProcess] = []

    def fill(self, count: int) -> None:
        """Bury the dead and start workers until there are `count`."""
        for process in [each for each in self.live if not each.is_alive()]:
            self.live.remove(process)
            if process.pid not in self._expected and process.exitcode != NO_SERVER:
                self._faults["worker that ended of itself"] += 1
        while len(self.live) < count:
            self._number += 1
            process = context().Process(target=run_worker, args=(self._worker_plan, self._folder, self._number))
            process.start()
            self.live.append(process)

    def signal(self, process: BaseProcess, *numbers: int) -> None:
        """Send signals; those that end a process are expected to."""
        assert process.pid is not None
        if set(numbers) & {signal.SIGKILL, signal.SIGTERM}:
            self._expected.add(process.pid)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def thaw(self, process: BaseProcess) -> None:
        """Let a frozen process go on, if it is still there."""
        if process.is_alive():
            self.signal(process, signal.SIGCONT)

    def stop(self) -> None:
        """End all of them, at once."""
        for process in self.live:
            self.signal(process, signal.SIGCONT, signal.SIGKILL)
            process.join()
        self.live.clear()


class Soak:
    """One run, in a folder of its own."""

    def __init__(self, plan: Plan, model: Path, folder: Path) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._faults: Counter[str] = Counter()
        self._server = DurableServer(folder)
        self._crew = Crew(plan, self._server.url, model, folder, self._faults)
        self._folder = folder
        self._later: list[tuple[float, Callable[[], None]]] = []  # what is to be done when

    def run(self) -> Report:
        """The undisturbed run, the disturbed one, and the books."""
        try:
            self._server.start()
            expected = self._undisturbed()
            before, started_s = sampled_tokens(self._folder), time.monotonic()
            self._disturbed()
            return self._books(expected, before, time.monotonic() - started_s)
        finally:
            self._crew.stop()
            self._server.kill()

    def _undisturbed(self) -> dict[str, str]:
        with Producer(self._server.url, model=MODEL) as producer:
            producer.submit_many(requests(self._plan, 0, self._plan.jobs), batch=UNDISTURBED)
        self._crew.fill(self._plan.workers)
        self._wait_for(UNDISTURBED, self._plan.jobs, time.monotonic() + self._plan.fault_s + self._plan.finish_s)
        texts = {str(result.id): result.text for result in self._results(UNDISTURBED)}
        self._crew.stop()
        return texts

    def _disturbed(self) -> None:
        start_s = time.monotonic()
        end_s = start_s + self._plan.fault_s
        size = -(-self._plan.jobs // self._plan.waves)
        for wave in range(self._plan.waves):
            due_s = start_s + wave * self._plan.fault_s / self._plan.waves
            self._later.append((due_s, lambda first=wave * size: self._submit(first, size)))  # type: ignore[misc]
        next_fault_s = start_s + self._plan.fault_every_s
        done = 0
        while ((now := time.monotonic()) < end_s and done < self._plan.jobs) or self._later:
            self._do_what_is_due(now)
            self._crew.fill(self._plan.workers)
            before, done = done, self._num_entries(DISTURBED)
            if next_fault_s <= now < end_s and done > before:  # a fault hits when work is being done
                fault = self._rng.choice([self._kill, self._kill, self._freeze, self._stop, self._cut, self._restart])
                fault()
                next_fault_s = now + self._plan.fault_every_s * self._rng.uniform(0.5, 1.5)
            time.sleep(_TICK_S)
        self._wait_for(DISTURBED, self._plan.jobs, time.monotonic() + self._plan.finish_s)

    def _submit(self, first: int, count: int) -> None:
        """Submit a wave of jobs, as a batch."""
        items = list(requests(self._plan, first, min(count, self._plan.jobs - first)))
        with Producer(self._server.url, model=MODEL) as producer:
            producer.submit_many(items, batch=f"{DISTURBED}-{first}")

    def _do_what_is_due(self, now_s: float) -> None:
        due = [each for each in self._later if each[0] <= now_s]
        self._later = [each for each in self._later if each[0] > now_s]
        for _, action in due:
            action()

    # Faults

    def _kill(self) -> None:
        self._faults["SIGKILL"] += 1
        self._crew.signal(self._rng.choice(self._crew.live), signal.SIGKILL)

    def _freeze(self) -> None:
        self._faults["SIGSTOP past the lease"] += 1
        process = self._rng.choice(self._crew.live)
        self._crew.signal(process, signal.SIGSTOP)
        thaw_s = time.monotonic() + self._plan.lease_s * self._rng.uniform(1.2, 2.0)
        self._later.append((thaw_s, lambda: self._crew.thaw(process)))

    def _stop(self) -> None:
        self._faults["SIGTERM twice"] += 1
        self._crew.signal(self._rng.choice(self._crew.live), signal.SIGTERM, signal.SIGTERM)

    def _cut(self) -> None:
        self._faults["CLIENT KILL of all"] += 1
        with redis.Redis.from_url(self._server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)

    def _restart(self) -> None:
        self._faults["server restart"] += 1
        self._server.kill()
        self._server.start()

    # Books

    def _batches(self, name: str) -> list[str]:
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            return sorted(each for each in client.zrange(keys.BATCHES, 0, -1) if each.startswith(name))

    def _num_entries(self, name: str) -> int:
        with redis.Redis.from_url(self._server.url) as client:
            return sum(int(client.xlen(keys.batch_done(batch))) for batch in self._batches(name))

    def _entries(self, name: str) -> list[dict[str, str]]:
        with redis.Redis.from_url(self._server.url, decode_responses=True) as client:
            return [fields for batch in self._batches(name) for _, fields in client.xrange(keys.batch_done(batch))]

    def _results(self, name: str) -> list[Result]:
        job_ids = [entry["job_id"] for entry in self._entries(name)]
        with redis.Redis.from_url(self._server.url) as client:
            raw = client.mget([keys.result(job_id) for job_id in job_ids]) if job_ids else []
        return [Result.model_validate_json(each) for each in raw if each is not None]

    def _wait_for(self, name: str, count: int, deadline_s: float) -> None:
        """Wait until the batches have so many entries, replacing workers that end meanwhile; at the deadline, go on."""
        while self._num_entries(name) < count and time.monotonic() < deadline_s:
            self._crew.fill(self._plan.workers)
            time.sleep(10 * _TICK_S)

    def _books(self, expected: dict[str, str], sampled_before: int, seconds: float) -> Report:
        entries = Counter(entry["job_id"] for entry in self._entries(DISTURBED))
        results = self._results(DISTURBED)
        numbers = Counter(result.id for result in results)
        texts = {str(result.id): result.text for result in results if result.ok}
        lost = expected.keys() - numbers.keys()
        checks = {
            "jobs without a result": len(lost),
            "jobs with more than one entry in the stream": sum(count > 1 for count in entries.values()),
            "requests with more than one result": sum(count > 1 for count in numbers.values()),
            "results with an error": len(results) - len(texts),
            "texts that differ": sum(text != expected[number] for number, text in texts.items()),
            "jobs short of the plan in the undisturbed run": self._plan.jobs - len(expected),
            "workers that ended of themselves": self._faults["worker that ended of itself"],
            **self._left_over(),
        }
        return Report(
            wrong=[f"{count} {what}" for what, count in checks.items() if count],
            faults=self._faults,
            tokens=sum(result.usage.completion_tokens for result in results if result.usage),
            sampled=sampled_tokens(self._folder) - sampled_before,
            resumed=sum(result.usage.resumed_tokens for result in results if result.usage),
            attempts=Counter(result.attempt for result in results),
            seconds=seconds,
        )

    def _left_over(self) -> dict[str, int]:
        """What the server should hold no more when all is done."""
        queue = keys.queue_name(MODEL)
        with redis.Redis.from_url(self._server.url) as client:
            return {
                "checkpoints left": sum(1 for _ in client.scan_iter(keys.checkpoint("*"), count=10_000)),
                "jobs left as running": int(client.zcard(f"rq:wip:{queue}")),
                "jobs left in the queue": int(client.llen(keys.rq_queue(queue))),
            }


def soak(plan: Plan, model: Path) -> Report:
    """Run a soak in a folder that is removed afterwards, unless something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    report = Soak(plan, model, folder).run()
    if not report.wrong:
        shutil.rmtree(folder)
        return report
    return Report(**{**vars(report), "wrong": [*report.wrong, f"the workers' logs are in {folder}"]})


def main(arguments: Sequence[str] | None = None) -> int:
    from tiny_model import save_tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long faults come")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    plan = Plan(
        jobs=options.jobs,
        fault_s=options.minutes * 60,
        fault_every_s=options.every,
        seed=options.seed,
        workers=options.workers,
    )
    with tempfile.TemporaryDirectory() as folder:
        report = soak(plan, save_tiny_model(Path(folder) / MODEL, max_positions=2048))
    print(report)
    return 1 if report.wrong or report.twice_share > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
