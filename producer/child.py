"""Starting a program that serves a run and must not outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

_PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>


def start_child(
    command: Sequence[str], *, log: BinaryIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program with both its outputs in `log`. Call it from the main thread.

    It has a session of its own: Ctrl-C is for us, and we stop it in our own time. Where the system can do it (Linux),
    it is told to end if we are killed before that.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """Runs in the child before the program: ask the kernel for SIGTERM when the parent dies."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without prctl: then as elsewhere
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
