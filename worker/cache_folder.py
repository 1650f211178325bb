"""The folder where a worker keeps what it can fetch or make again: models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from headrace.shared import environment


def cache_folder() -> Path:
    """HEADRACE_CACHE if it is set, otherwise the user's cache folder for headrace."""
    chosen = os.environ.get(environment.CACHE)
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("headrace", appauthor=False)
