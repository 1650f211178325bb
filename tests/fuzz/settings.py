"""How many cases, and that they are the same ones at every run. HEADRACE's own variables are left to users."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings


def many(count: int) -> Callable[[Any], Any]:
    """The same `count` cases at every run; FUZZ=20 in the environment makes it 20 times as many, drawn anew."""
    factor = int(os.environ.get("FUZZ", "0"))
    return settings(
        max_examples=count * max(1, factor),
        derandomize=not factor,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
