"""A worker's settings: checked once, then passed in and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from headrace.shared.environment import DEFAULT_RESULT_TTL_S
from headrace.shared.errors import SettingsError
from headrace.shared.lanes import check_queue_name
from headrace.shared.options import EngineOptions
from headrace.shared.schema import MAX_STOP_STRINGS

MIN_LEASE_S = 2.0
MIN_PAYLOAD_BYTES = 1024
DEFAULT_CHECKPOINT_INTERVAL_S = 2.0
DEFAULT_STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one job may ask for: bytes of its data, unpacked; `max_tokens`; stop strings, and as many stop token ids."""

    payload_bytes: int = 16 * 2**20
    max_tokens: int | None = None
    stops: int = MAX_STOP_STRINGS

    def __post_init__(self) -> None:
        if self.payload_bytes < MIN_PAYLOAD_BYTES:
            raise SettingsError(
                f"--limit-payload-bytes is {self.payload_bytes:,}; it needs at least {MIN_PAYLOAD_BYTES:,}"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingsError(f"--limit-max-tokens is {self.max_tokens}; it needs at least 1")
        if not 0 <= self.stops <= MAX_STOP_STRINGS:
            raise SettingsError(f"--limit-stops is {self.stops}; allowed are 0 to {MAX_STOP_STRINGS}")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineOptions):
    """What decides the engine's shape, and what one job may ask of it."""

    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """How a worker behaves on the queue; without a name, the queue of its model. Times in seconds.

    A worker that has not renewed its lease for `lease_s` counts as dead and its jobs go to others. After SIGTERM the
    running jobs have `drain_timeout_s` to finish. Every `checkpoint_interval_s` (0: never) their tokens are stored, and
    whenever they are handed back, so that another worker can go on from there. A step that has not come back after
    `step_timeout_s` counts as hung. A job that fails, or takes its worker along, `max_crashes` times without getting
    any further is given up. `burst` ends the worker when the queue is empty.
    """

    queue: str | None = None
    lease_s: float = 30.0
    drain_timeout_s: float = 60.0
    checkpoint_interval_s: float = DEFAULT_CHECKPOINT_INTERVAL_S
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S
    burst: bool = False
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    max_crashes: int = 3

    def __post_init__(self) -> None:
        if self.lease_s < MIN_LEASE_S:
            raise SettingsError(f"--lease is {self.lease_s:g} s; it needs at least {MIN_LEASE_S:g} s")
        if self.drain_timeout_s < 0:
            raise SettingsError(f"--drain-timeout is {self.drain_timeout_s:g} s; it can't be negative")
        if not 0 <= self.checkpoint_interval_s < inf:
            raise SettingsError(
                f"--checkpoint-interval is {self.checkpoint_interval_s:g} s; it needs a number of seconds, "
                "or 0 for none while jobs run"
            )
        if not 0 < self.step_timeout_s < inf:
            raise SettingsError(f"--step-timeout is {self.step_timeout_s:g} s; it needs a number of seconds above 0")
        if self.result_ttl_s < 1:
            raise SettingsError(f"--result-ttl is {self.result_ttl_s} s; it needs at least 1 s")
        if self.queue == "":
            raise SettingsError("--queue is empty; give the name of a queue")
        check_queue_name(self.queue or "")
