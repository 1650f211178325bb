"""The worker that `headrace run` starts: a subprocess, so that nothing here imports torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from headrace.producer.child import start_child
from headrace.shared import environment
from headrace.shared.errors import HeadraceError, SettingsError

COMMAND = (sys.executable, "-m", "headrace.worker")
_ERROR_PREFIX = "headrace: error: "
_LOG_TAIL_LINES = 5
_LOG_TAIL_BYTES = 64 * 1024
# After the first signal the worker ends its running jobs, after the second it hands them back.
_DRAIN_S = 1.0
_HAND_BACK_S = 5.0


def require_worker(command: str = "run") -> None:
    """Raise SettingsError, which names the headrace command, if the worker's packages are not installed."""
    if importlib.util.find_spec("torch") is None:
        raise SettingsError(f"`headrace {command}` needs the worker extra: pip install 'headrace[worker]'")


class WorkerProcess:
    """A running `headrace worker`, or another `command`, as a context manager; it is always stopped at the end."""

    def __init__(self, redis_url: str, arguments: Sequence[str], *, command: Sequence[str] | None = None) -> None:
        self._command = [*(command or COMMAND), *arguments]
        # Not as an argument: everybody on the machine can read those, and the URL may have a password.
        self._environment = {**os.environ, environment.REDIS_URL: redis_url}

    def __enter__(self) -> WorkerProcess:
        self._log = tempfile.TemporaryFile(prefix="headrace-worker-")
        self._process = start_child(self._command, log=self._log, environment=self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patience_s in (_DRAIN_S, _HAND_BACK_S):
            self._process.terminate()
            try:
                self._process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def check(self) -> None:
        """Raise HeadraceError, with what the worker said last, if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise HeadraceError(self._last_words(code))

    def resident_bytes(self) -> int | None:
        """Memory that the process has resident now; None where the system does not tell (not Linux)."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return None

    def _last_words(self, code: int) -> str:
        self._log.seek(max(0, self._log.seek(0, 2) - _LOG_TAIL_BYTES))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith(_ERROR_PREFIX)]
        if errors:
            return errors[-1].removeprefix(_ERROR_PREFIX)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return f"the worker {how} before all jobs were done" + (f"; its last lines:\n{tail}" if tail else "")
