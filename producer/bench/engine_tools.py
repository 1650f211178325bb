"""Running the measuring tools of the worker's side in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import TypeVar

from pydantic import BaseModel

from headrace.shared.errors import HeadraceError

COMMAND = (sys.executable, "-m", "headrace.worker.bench")
_ERROR_PREFIX = "headrace: error: "
_LOG_TAIL_LINES = 5
Answer = TypeVar("Answer", bound=BaseModel)


def measure(answer: type[Answer], *arguments: str) -> Answer:
    """Run a tool and read its answer. Raises HeadraceError with what it said, if it failed."""
    done = subprocess.run([*COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HeadraceError(_last_words(arguments[0], done.returncode, done.stderr))
    return answer.model_validate_json(done.stdout)


def _last_words(tool: str, code: int, log: str) -> str:
    lines = log.strip().splitlines()
    errors = [line for line in lines if line.startswith(_ERROR_PREFIX)]
    if errors:
        return errors[-1].removeprefix(_ERROR_PREFIX)
    tail = "\n".join(lines[-_LOG_TAIL_LINES:])
    return f"{tool} ended with code {code}; its last lines:\n{tail}"
