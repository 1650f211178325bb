"""Plain tables for `headrace status`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.producer.batches import Progress
from headrace.producer.status import ServerStatus

_COUNTS = ("total", "completed", "failed", "cancelled", "left", "generated tokens")


def status_table(status: ServerStatus) -> str:
    """Queues, workers and batches, each a table under its name."""
    queues = [
        (queue.name, queue.waiting, queue.running, queue.finished, queue.failed, queue.cancelled)
        for queue in status.queues
    ]
    workers = [
        (worker.name, worker.state, worker.queues, worker.finished, worker.failed, worker.last_heartbeat)
        for worker in status.workers
    ]
    batches: list[tuple[str | int, ...]] = [
        (batch.name, batch.queue, *_counts(batch.progress)) for batch in status.batches
    ]
    parts = (
        _table(("queue", "waiting", "running", "finished", "failed", "cancelled"), queues, "no queues"),
        _table(("worker", "state", "queues", "finished", "failed", "last heartbeat"), workers, "no workers"),
        _table(("batch", "queue", *_COUNTS), batches, "no batches"),
    )
    return "\n\n".join(parts)


def progress_table(name: str, progress: Progress) -> str:
    """One batch's counts."""
    state = "finished" if progress.finished else "running" if progress.submitted else "being submitted"
    return _table(("batch", "state", *_COUNTS), [(name, state, *_counts(progress))], "")


def _counts(progress: Progress) -> tuple[int, ...]:
    left = max(0, progress.total - progress.done)
    return progress.total, progress.completed, progress.failed, progress.cancelled, left, progress.completion_tokens


def _table(head: Sequence[str], rows: Sequence[Sequence[str | int]], empty: str) -> str:
    if not rows:
        return empty
    shown = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(head), *shown]) for column in range(len(head))]
    is_number = [isinstance(cell, int) for cell in rows[0]]

    def line(cells: Sequence[str]) -> str:
        placed = zip(cells, widths, is_number, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in placed).rstrip()

    return "\n".join([line(head), *(line(row) for row in shown)])
