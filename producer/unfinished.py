"""What lets `headrace run` go on: a note beside the output for as long as the run has not ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

from headrace.shared.errors import InputError

_SUFFIX = ".unfinished"


class Note:
    """The note of a run that writes to `output` and whose input and settings have this fingerprint."""

    def __init__(self, output: str, fingerprint: str) -> None:
        self.path = Path(output + _SUFFIX)
        self._output = Path(output)
        self._fingerprint = fingerprint

    def read(self) -> str | None:
        """The batch of the same run, if one was begun and has not ended. Raises InputError if another run has not."""
        if not (self.path.exists() and self._output.exists()):
            return None
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            fingerprint, batch = str(found["fingerprint"]), str(found["batch"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            fingerprint, batch = "", ""
        if fingerprint != self._fingerprint and self._output.stat().st_size == 0:
            return None  # nothing to lose
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{self._output} holds the answers of a run that has not ended and had another input or other options; "
                f"give it the same to go on with it, name another output, or remove {self.path}"
            )
        return batch

    def write(self, batch: str) -> None:
        """Say that the run has begun. Raises InputError if that can't be written."""
        whole = self.path.with_name(self.path.name + ".new")
        try:
            whole.write_text(json.dumps({"fingerprint": self._fingerprint, "batch": batch}) + "\n", encoding="utf-8")
            os.replace(whole, self.path)
        except OSError as error:
            raise InputError(f"can't write {self.path}: {(error.strerror or str(error)).lower()}") from error

    def remove(self) -> None:
        """Say that the run has ended."""
        self.path.unlink(missing_ok=True)
