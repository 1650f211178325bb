"""Writing results as they arrive: JSON Lines of results, or the two files of the OpenAI Batch API."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from headrace.producer.formats import Format
from headrace.producer.openai_batch import output_line
from headrace.shared.errors import HeadraceError
from headrace.shared.schema import Result

STDOUT = "-"


class ResultWriter:
    """Writes and flushes results, a line each. Failures of an OpenAI batch go to `error_path`, made when needed."""

    def __init__(self, path: str, source: str, out: IO[str], files: contextlib.ExitStack) -> None:
        self.path = path
        self.error_path = error_path_of(path) if source != "requests" and path != STDOUT else None
        self.num_written = 0
        self._line = _line_of(source)
        self._out = out
        self._errors: IO[str] | None = None
        self._files = files

    def write(self, results: Iterable[Result]) -> None:
        """Write results and flush them to the operating system. Raises HeadraceError if that fails."""
        with _readable_failure(self.path):
            for result in results:
                self._sink(result).write(self._line(result) + "\n")
                self.num_written += 1
            self._out.flush()
            if self._errors is not None:
                self._errors.flush()

    def _sink(self, result: Result) -> IO[str]:
        if result.ok or self.error_path is None:
            return self._out
        if self._errors is None:
            self._errors = self._files.enter_context(_create(self.error_path))
        return self._errors


@contextlib.contextmanager
def open_writer(path: str, source: str) -> Iterator[ResultWriter]:
    """A writer to `path` ("-": standard output), for a batch whose input was of the form `source`.

    What was at the path before is replaced. Raises HeadraceError if it can't be written.
    """
    with contextlib.ExitStack() as files:
        if path == STDOUT:
            yield ResultWriter(path, source, sys.stdout, files)
            return
        with _readable_failure(path):
            out = files.enter_context(_create(path))
            if source != "requests":
                Path(error_path_of(path)).unlink(missing_ok=True)
        yield ResultWriter(path, source, out, files)


def error_path_of(path: str) -> str:
    """The error file beside an output file: results.jsonl → results.errors.jsonl."""
    return str(Path(path).with_suffix(".errors.jsonl"))


def _create(path: str) -> IO[str]:
    return open(path, "w", encoding="utf-8", newline="\n")


def _line_of(source: str) -> Callable[[Result], str]:
    if source == Format.OPENAI_CHAT:
        return lambda result: output_line(result, chat=True)
    if source == Format.OPENAI_COMPLETIONS:
        return lambda result: output_line(result, chat=False)
    return Result.to_json


@contextlib.contextmanager
def _readable_failure(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HeadraceError(
            f"can't write {error.filename or path}: {(error.strerror or str(error)).lower()}"
        ) from error
