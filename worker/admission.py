"""Which rows go into the batch: all as they come, but a row on its last attempt runs alone.

A worker that dies takes all its rows with it, and nobody can tell which of them it died of. Run alone the last time, a
row that is innocent finishes, and only the one that workers die of is given up.
"""

from __future__ import annotations

from collections import deque

from headrace.worker.engine.rows import Row


class Admission:
    """Rows between the courier and the engine. They are held back only while a row waits to run alone, or does."""

    def __init__(self) -> None:
        self._together: deque[Row] = deque()
        self._alone: deque[Row] = deque()
        self._one_runs_alone = False

    def __len__(self) -> int:
        return len(self._together) + len(self._alone)

    def add(self, row: Row, *, alone: bool) -> None:
        """Take a row in."""
        (self._alone if alone else self._together).append(row)

    def admit(self, num_rows: int) -> list[Row]:
        """The rows that may go into an engine that has `num_rows` now."""
        if num_rows == 0:
            self._one_runs_alone = bool(self._alone)
            if self._alone:
                return [self._alone.popleft()]
        if self._one_runs_alone or self._alone:
            return []
        return self.take_all()

    def take_all(self) -> list[Row]:
        """Forget all rows and return them."""
        rows = [*self._alone, *self._together]
        self._alone.clear()
        self._together.clear()
        return rows

    def drop(self, row_id: str) -> None:
        """Forget a row, if it is here."""
        self._alone = deque(row for row in self._alone if row.row_id != row_id)
        self._together = deque(row for row in self._together if row.row_id != row_id)
