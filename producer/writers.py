"""Writing results as they arrive: JSON Lines of results, or the two files of the OpenAI Batch API.

Files that an interrupted run has left can be gone on with: what is in them is kept, but for a last line that was torn.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from headrace.producer.duplicates import IdIndex
from headrace.producer.formats import Format
from headrace.producer.openai_batch import output_line
from headrace.shared.errors import HeadraceError, InputError
from headrace.shared.schema import Result

STDOUT = "-"


class ResultWriter:
    """Writes and flushes results, a line each. Failures of an OpenAI batch go to `error_path`, made when needed.

    `num_kept` lines were there already, `num_kept_failed` of them failures.
    """

    def __init__(self, path: str, source: str, files: contextlib.ExitStack) -> None:
        self.path = path
        self.error_path = error_path_of(path) if source != "requests" and path != STDOUT else None
        self.num_written = self.num_kept = self.num_kept_failed = 0
        self._line = _line_of(source)
        self._kept = files.enter_context(IdIndex())
        self._out = sys.stdout
        self._errors: IO[str] | None = None
        self._files = files

    def begin(self, *, anew: bool) -> None:
        """Open the files; `anew`: without what they hold."""
        if self.path == STDOUT:
            return
        with _readable_failure(self.path):
            for path in filter(None, (self.path, self.error_path)):
                if not anew and Path(path).exists():
                    self._keep(path)
                elif path == self.error_path:
                    Path(path).unlink(missing_ok=True)
            self._out = self._files.enter_context(_open(self.path, "w" if anew else "a"))
            if self.error_path is not None and Path(self.error_path).exists():
                self._errors = self._files.enter_context(_open(self.error_path, "a"))

    def has(self, result_id: str | None) -> bool:
        """Whether a result of that id was there already."""
        return bool(self.num_kept) and result_id is not None and self._kept.position(result_id) is not None

    def write(self, results: Iterable[Result]) -> list[Result]:
        """Write those results that were not there, flush them to the operating system, and return them.

        Raises HeadraceError if that fails.
        """
        new = [result for result in results if not self.has(result.id)]
        with _readable_failure(self.path):
            for result in new:
                self._sink(result).write(self._line(result) + "\n")
                self.num_written += 1
            self._out.flush()
            if self._errors is not None:
                self._errors.flush()
        return new

    def _sink(self, result: Result) -> IO[str]:
        if result.ok or self.error_path is None:
            return self._out
        if self._errors is None:
            self._errors = self._files.enter_context(_open(self.error_path, "w"))
        return self._errors

    def _keep(self, path: str) -> None:
        """Note the results that a file has, and cut off a last line that has no end."""
        with open(path, "rb+") as file:
            whole = 0
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    found = json.loads(line)
                    result_id, failed = found["custom_id" if self.error_path else "id"], found["error"] is not None
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise InputError(
                        f"can't go on with {path}: line {number} is no result; remove it, or {path} as a whole"
                    ) from None
                if isinstance(result_id, str):  # a result that was lost on the server has none, and is asked for again
                    self._kept.add(result_id, number)
                    self.num_kept += 1
                    self.num_kept_failed += failed or path == self.error_path
            file.truncate(whole)


@contextlib.contextmanager
def open_writer(path: str, source: str, *, anew: bool = True) -> Iterator[ResultWriter]:
    """A writer to `path` ("-": standard output), for a batch whose input was of the form `source`.

    What was at the path before is replaced, or kept and gone on with. Raises HeadraceError if it can't be written.
    """
    with contextlib.ExitStack() as files:
        writer = ResultWriter(path, source, files)
        writer.begin(anew=anew)
        yield writer


def check_writable(path: str) -> None:
    """Raise HeadraceError if a file can't be written there; what it holds stays, and where there is none is none."""
    if is_kept(path):
        with _readable_failure(path):
            is_new = not os.path.lexists(path)
            _open(path, "a").close()
            if is_new:
                os.unlink(path)


def is_kept(path: str) -> bool:
    """Whether what is written there can be read again: not standard output, a pipe or a device."""
    return path != STDOUT and (os.path.isfile(path) or not os.path.exists(path))


def error_path_of(path: str) -> str:
    """The error file beside an output file: results.jsonl → results.errors.jsonl."""
    return str(Path(path).with_suffix(".errors.jsonl"))


def _open(path: str, mode: str) -> IO[str]:
    return open(path, mode, encoding="utf-8", newline="\n")


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
