"""The HEADRACE_* variables. An option on the command line wins over its variable."""

from __future__ import annotations

import difflib
import os

from headrace.shared.errors import SettingsError

REDIS_URL = "HEADRACE_REDIS_URL"
MODEL = "HEADRACE_MODEL"
QUEUE = "HEADRACE_QUEUE"
TENANT = "HEADRACE_TENANT"
SLOTS = "HEADRACE_SLOTS"
DTYPE = "HEADRACE_DTYPE"
DEVICE = "HEADRACE_DEVICE"
QUANTIZATION = "HEADRACE_QUANTIZATION"
MAX_CONTEXT = "HEADRACE_MAX_CONTEXT"
LEASE = "HEADRACE_LEASE"
DRAIN_TIMEOUT = "HEADRACE_DRAIN_TIMEOUT"
STEP_TIMEOUT = "HEADRACE_STEP_TIMEOUT"
CHECKPOINT_INTERVAL = "HEADRACE_CHECKPOINT_INTERVAL"
RESULT_TTL = "HEADRACE_RESULT_TTL"
CACHE = "HEADRACE_CACHE"
LOG_LEVEL = "HEADRACE_LOG_LEVEL"
LIMIT_PAYLOAD_BYTES = "HEADRACE_LIMIT_PAYLOAD_BYTES"
LIMIT_MAX_TOKENS = "HEADRACE_LIMIT_MAX_TOKENS"
LIMIT_STOPS = "HEADRACE_LIMIT_STOPS"

KNOWN = frozenset(
    {
        REDIS_URL,
        MODEL,
        QUEUE,
        TENANT,
        SLOTS,
        DTYPE,
        DEVICE,
        QUANTIZATION,
        MAX_CONTEXT,
        LEASE,
        DRAIN_TIMEOUT,
        STEP_TIMEOUT,
        CHECKPOINT_INTERVAL,
        RESULT_TTL,
        CACHE,
        LOG_LEVEL,
        LIMIT_PAYLOAD_BYTES,
        LIMIT_MAX_TOKENS,
        LIMIT_STOPS,
    }
)

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RESULT_TTL_S = 7 * 24 * 3600


def whole_number(name: str) -> int | None:
    """A variable as a whole number; None if it is unset or empty. Raises SettingsError."""
    text = os.environ.get(name, "")
    try:
        return int(text) if text else None
    except ValueError:
        raise SettingsError(f"{name} is {text[:40]!r}; it must be a whole number") from None


def refuse_unknown_variables() -> None:
    """Raise SettingsError for a HEADRACE_* variable that nothing reads: a misspelt setting must not be ignored."""
    for name in sorted(os.environ):
        if name.startswith("HEADRACE_") and name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(KNOWN))}"
            raise SettingsError(f"unknown environment variable {name}{hint}")
