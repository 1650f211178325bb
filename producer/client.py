"""The synchronous client: submit jobs, wait for results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import redis

from headrace.producer import settings
from headrace.producer.batches import Collector, Progress, batch_fields, batch_progress
from headrace.producer.cancel import cancel_batch, cancel_job
from headrace.producer.jobs import job_status, remaining_s, submit_entry, wait_for_result
from headrace.producer.lines import Line
from headrace.producer.retry import Retried, retry_batch
from headrace.producer.status import ServerStatus, server_status
from headrace.producer.steps import DEFAULT_PATIENCE_S, MAX_BLOCK_S, Steps, describe, drive
from headrace.producer.submission import Submission
from headrace.shared.connection import connect
from headrace.shared.errors import ResultTimeout
from headrace.shared.schema import Request, Result

T = TypeVar("T")
Item = str | Mapping[str, Any] | Request | Line


class Producer:
    """Submits jobs to Redis and reads their results. Threads may share one; use it as a context manager or close it.

    `url`, `model`, `queue` and `result_ttl_s` default to HEADRACE_REDIS_URL, HEADRACE_MODEL, HEADRACE_QUEUE and
    HEADRACE_RESULT_TTL. Without a queue, each request goes to the queue of its model. `tenant` (HEADRACE_TENANT) and
    `priority` ("high", "normal", "low") are those of requests that name none; with a tenant, batches' names begin with
    it and a dot, and `status` and `cancel` use its keys alone. `connection` is a client of the caller's own, which
    stays open. Raises SettingsError, ServerUnavailable.

    A method waits up to `patience_s` for a server that is away, failing over or out of memory, also beyond its own
    timeout; nothing is done twice for it. It raises ServerUnavailable after that.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        queue: str | None = None,
        result_ttl_s: int | None = None,
        tenant: str | None = None,
        priority: str | None = None,
        connection: redis.Redis | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._settings = settings.resolve(url, model, queue, result_ttl_s, tenant, priority)
        self._owned = connection is None
        self._where = self._settings.url if connection is None else describe(connection)
        self._redis = connect(self._settings.url) if connection is None else connection

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> Job:
        """Queue one job; `params` are the fields of Request. Raises InvalidRequest."""
        entry = settings.single_entry(self._settings.route, prompt, messages, params)
        self._run(submit_entry(entry))
        return Job(self, entry.job_id)

    def submit_many(self, items: Iterable[Item], *, batch: str | None = None, **defaults: Any) -> Batch:
        """Queue a batch, in chunks, from anything that can be iterated; it is never held as a whole.

        An item is a prompt, a mapping of Request's fields, or a Request; `defaults` fill what it does not say. An
        item without an id gets its position, from "0". A malformed item has an error as its result. Raises
        BatchExists; InvalidRequest for a default; DuplicateIds, for a sequence before anything is sent.
        """
        return self._submit(items, self._submission(batch, defaults))

    def job(self, job_id: str) -> Job:
        """A handle of a job that was submitted earlier, or elsewhere. Asks the server nothing."""
        return Job(self, job_id)

    def batch(self, name: str) -> Batch:
        """A handle of a batch that was submitted earlier, or elsewhere. Asks the server nothing."""
        return Batch(self, name)

    def status(self) -> ServerStatus:
        """The queues, workers and batches on the server."""
        return self._run(server_status(self._settings.route))

    def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._owned:
            self._redis.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submission(
        self,
        batch: str | None,
        defaults: Mapping[str, Any],
        *,
        source: str = "requests",
        listed: bool = True,
        fingerprint: str | None = None,
        also_closed: bool = False,
    ) -> Submission:
        return Submission(
            batch or settings.new_batch_name(defaults.get("tenant") or self._settings.route.tenant),
            route=self._settings.route,
            defaults=defaults,
            ttl_s=self._settings.result_ttl_s,
            source=source,
            listed=listed,
            fingerprint=fingerprint,
            also_closed=also_closed,
        )

    def _submit(self, items: Iterable[Item], submission: Submission, *, checked: bool = False) -> Batch:
        """`checked` says that the ids are known to be different."""
        if isinstance(items, Sequence):
            submission.check_sequence(items)
        elif not checked:
            submission.watch_duplicates()
        self._run(submission.open())
        self._fill(items, submission)
        return Batch(self, submission.name)

    def _fill(self, items: Iterable[Item], submission: Submission) -> None:
        """Send the items of a batch that is open, and close it, unless the same can be gone on with later."""
        to_be_closed = True
        try:
            for item in items:
                if submission.add(item):
                    self._run(submission.send())
                if submission.stopped:
                    break
            self._run(submission.send())
        except BaseException:  # whatever it was, the same command sends the rest
            to_be_closed = submission.fingerprint is None
            raise
        finally:  # also when the iterable fails: what was sent can be collected
            if to_be_closed:
                self._run(submission.close())

    def _run(self, steps: Steps[T]) -> T:
        return drive(self._redis, self._where, steps, self._patience_s)


class Job:
    """A submitted job."""

    def __init__(self, producer: Producer, job_id: str) -> None:
        self._producer = producer
        self.id = job_id

    def status(self) -> str:
        """RQ's word: queued, started, finished, failed, canceled. Raises JobNotFound."""
        return self._producer._run(job_status(self.id))

    def result(self, timeout: float | None = None) -> Result:
        """The result, waiting up to `timeout` seconds for it. Raises ResultTimeout, JobNotFound."""
        return self._producer._run(wait_for_result(self.id, timeout))

    def cancel(self) -> bool:
        """Cancel it: a waiting job ends at once, a running one soon, with its text so far.

        False if it had ended before. Raises JobNotFound.
        """
        return self._producer._run(cancel_job(self.id, self._producer._settings))


class Batch:
    """A submitted batch."""

    def __init__(self, producer: Producer, name: str) -> None:
        self._producer = producer
        self.name = name

    def progress(self) -> Progress:
        """The counts as they are now. Raises BatchNotFound."""
        return self._producer._run(batch_progress(self.name))

    def results(self, timeout: float | None = None) -> Iterator[Result]:
        """All results in the order of finishing, each as soon as it is there; ends with the batch's last.

        A job that is retried after its result has come here comes again.
        Raises BatchNotFound, and ResultTimeout when `timeout` seconds after the call it has not ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        collector = Collector(self.name)
        while not collector.finished:
            block_s = max(remaining_s(deadline, MAX_BLOCK_S), 0.0)
            results = self._producer._run(collector.take(block_s))
            yield from results
            if not results and block_s == 0 and not collector.finished:
                raise ResultTimeout(f"batch {self.name!r} has not ended after {timeout} s: {collector.counts()}")

    def wait(self, timeout: float | None = None) -> Progress:
        """Wait until all jobs have their results. Raises BatchNotFound, ResultTimeout."""
        for _ in self.results(timeout):
            pass
        return self.progress()

    def cancel(self) -> int:
        """Cancel what has not ended; returns how many jobs that were. Raises BatchNotFound."""
        return self._producer._run(cancel_batch(self.name, self._producer._settings))

    def retry(self, *codes: str) -> Retried:
        """Queue the failed jobs once more: those with one of these error codes, or all but the cancelled ones.

        Their results are taken back; each has one again when it has run. Raises BatchNotFound, SettingsError.
        """
        return self._producer._run(retry_batch(self.name, codes, self._producer._settings.result_ttl_s))

    def source(self) -> str:
        """The form of the input: "requests" or "openai". Raises BatchNotFound."""
        return self._producer._run(batch_fields(self.name)).get("source", "requests")
