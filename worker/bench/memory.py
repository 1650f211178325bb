"""Resident memory of this process."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # man 5 proc, clear_refs


def resident_bytes() -> int:
    """What is resident now; where the system does not tell (not Linux), the peak."""
    return _status_bytes("VmRSS") or peak_bytes()


def reset_peak() -> None:
    """Let the peak begin anew, where the system can do it; elsewhere it is the process's whole life's."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """The most that was resident since `reset_peak`."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM") or largest * (1 if sys.platform == "darwin" else 1024)


def _status_bytes(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
