"""The asyncio client; everything but the waiting is shared with the synchronous one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import redis
import redis.asyncio

from headrace.producer import settings
from headrace.producer.batches import Collector, Progress, batch_progress
from headrace.producer.cancel import cancel_batch, cancel_job
from headrace.producer.client import Item
from headrace.producer.jobs import job_status, remaining_s, submit_entry, wait_for_result
from headrace.producer.retry import Retried, retry_batch
from headrace.producer.status import ServerStatus, server_status
from headrace.producer.steps import DEFAULT_PATIENCE_S, MAX_BLOCK_S, Call, Patience, Steps, describe
from headrace.producer.submission import Submission
from headrace.shared.connection import connect_async
from headrace.shared.errors import ResultTimeout
from headrace.shared.schema import Result

T = TypeVar("T")
# Each command under way holds a connection, of which redis-py's pool has 100. Blocking reads have their own share, so
# that they never hold up a command; more waits than this take turns, and so notice a result a little later.
MAX_BLOCKING_READS = 64
MAX_COMMANDS = 32


class AsyncProducer:
    """As Producer, for asyncio; it connects with the first command. Use one an event loop."""

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        queue: str | None = None,
        result_ttl_s: int | None = None,
        tenant: str | None = None,
        priority: str | None = None,
        connection: redis.asyncio.Redis | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
        self._has_answered = connection is not None  # a wrong address should be noticed at once
        self._settings = settings.resolve(url, model, queue, result_ttl_s, tenant, priority)
        self._owned = connection is None
        self._where = self._settings.url if connection is None else describe(connection)
        self._redis = connect_async(self._settings.url) if connection is None else connection
        self._reads = asyncio.Semaphore(MAX_BLOCKING_READS)
        self._commands = asyncio.Semaphore(MAX_COMMANDS)

    async def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> AsyncJob:
        """Queue one job; `params` are the fields of Request. Raises InvalidRequest."""
        entry = settings.single_entry(self._settings.route, prompt, messages, params)
        await self._run(submit_entry(entry))
        return AsyncJob(self, entry.job_id)

    async def submit_many(
        self, items: Iterable[Item] | AsyncIterable[Item], *, batch: str | None = None, **defaults: Any
    ) -> AsyncBatch:
        """As Producer.submit_many; the items may come from an asynchronous iterator."""
        submission = Submission(
            batch or settings.new_batch_name(defaults.get("tenant") or self._settings.route.tenant),
            route=self._settings.route,
            defaults=defaults,
            ttl_s=self._settings.result_ttl_s,
        )
        if isinstance(items, Sequence):
            submission.check_sequence(items)
        else:
            submission.watch_duplicates()
        await self._run(submission.open())
        try:
            async for item in _each(items):
                if submission.add(item):
                    await self._run(submission.send())
                if submission.stopped:
                    break
            await self._run(submission.send())
        finally:  # also when the iterable fails: what was sent can be collected
            await self._run(submission.close())
        return AsyncBatch(self, submission.name)

    def job(self, job_id: str) -> AsyncJob:
        """A handle of a job that was submitted earlier, or elsewhere. Asks the server nothing."""
        return AsyncJob(self, job_id)

    def batch(self, name: str) -> AsyncBatch:
        """A handle of a batch that was submitted earlier, or elsewhere. Asks the server nothing."""
        return AsyncBatch(self, name)

    async def status(self) -> ServerStatus:
        """The queues, workers and batches on the server."""
        return await self._run(server_status(self._settings.route))

    async def close(self) -> None:
        """Close the connections, unless they are the caller's."""
        if self._owned:
            await self._redis.aclose()

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        """`headrace.producer.steps.drive`, awaited."""
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._answer(call))
        except StopIteration as stop:
            outcome: T = stop.value
            return outcome

    async def _answer(self, call: Call) -> list[Any]:
        patience = Patience(self._where, self._patience_s if self._has_answered else 0.0)
        while True:
            try:
                replies = await self._send(call)
                self._has_answered = True
                return replies
            except redis.RedisError as error:
                pause_s = patience.pause_s(error)
            await asyncio.sleep(pause_s)

    async def _send(self, call: Call) -> list[Any]:
        if call.blocking:
            async with self._reads:
                execute: Any = self._redis.execute_command
                return [await execute(*call.commands[0])]
        async with self._commands, self._redis.pipeline(transaction=call.atomic) as pipeline:
            queue: Any = pipeline.execute_command
            for command in call.commands:
                queue(*command)
            replies: list[Any] = await pipeline.execute()
            return replies


class AsyncJob:
    """A submitted job."""

    def __init__(self, producer: AsyncProducer, job_id: str) -> None:
        self._producer = producer
        self.id = job_id

    async def status(self) -> str:
        """As Job.status."""
        return await self._producer._run(job_status(self.id))

    async def result(self, timeout: float | None = None) -> Result:
        """As Job.result."""
        return await self._producer._run(wait_for_result(self.id, timeout))

    async def cancel(self) -> bool:
        """As Job.cancel."""
        return await self._producer._run(cancel_job(self.id, self._producer._settings))


class AsyncBatch:
    """A submitted batch."""

    def __init__(self, producer: AsyncProducer, name: str) -> None:
        self._producer = producer
        self.name = name

    async def progress(self) -> Progress:
        """As Batch.progress."""
        return await self._producer._run(batch_progress(self.name))

    async def results(self, timeout: float | None = None) -> AsyncIterator[Result]:
        """As Batch.results."""
        deadline = None if timeout is None else time.monotonic() + timeout
        collector = Collector(self.name)
        while not collector.finished:
            block_s = max(remaining_s(deadline, MAX_BLOCK_S), 0.0)
            results = await self._producer._run(collector.take(block_s))
            for result in results:
                yield result
            if not results and block_s == 0 and not collector.finished:
                raise ResultTimeout(f"batch {self.name!r} has not ended after {timeout} s: {collector.counts()}")

    async def wait(self, timeout: float | None = None) -> Progress:
        """As Batch.wait."""
        async for _ in self.results(timeout):
            pass
        return await self.progress()

    async def cancel(self) -> int:
        """As Batch.cancel."""
        return await self._producer._run(cancel_batch(self.name, self._producer._settings))

    async def retry(self, *codes: str) -> Retried:
        """As Batch.retry."""
        return await self._producer._run(retry_batch(self.name, codes, self._producer._settings.result_ttl_s))


async def _each(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterator[Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
