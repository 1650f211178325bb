"""The folder where models that were fetched or converted are kept: `{cache}/models/{name}/{key}/`.

An entry is immutable: its key says what it was made from and by which version of the conversion, and it appears
under its final name in one rename. So readers need no lock, and of several processes that make the same entry the
first one wins and the others use it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from headrace.shared import environment
from headrace.shared.errors import ModelError

# Part of every key. Raise it when the conversion writes something else than before.
_CONVERSION = 1
_PARTIAL = ".partial-"
_ABANDONED_AFTER_S = 24 * 3600


def cache_folder() -> Path:
    """HEADRACE_CACHE if it is set, otherwise the user's cache folder for headrace."""
    chosen = os.environ.get(environment.CACHE)
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("headrace", appauthor=False)


def entry_folder(name: str, source: str) -> Path:
    """Where the model `name`, made from `source`, is or will be kept. `source` names the exact content."""
    key = hashlib.sha256(f"{_CONVERSION}\0{source}".encode()).hexdigest()[:16]
    return cache_folder() / "models" / name / key


def get_or_build(entry: Path, build: Callable[[Path], None]) -> Path:
    """Return `entry`; if it isn't there, let `build` fill a temporary folder and rename that to it.

    Raises ModelError if the cache can't be written to, and whatever `build` raises; no entry is left then.
    """
    if entry.is_dir():
        return entry
    try:
        _make_room(entry.parent)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=entry.parent, ignore_cleanup_errors=True) as temporary:
            fresh = Path(temporary) / "model"
            fresh.mkdir()
            build(fresh)
            _publish(fresh, entry)
    except OSError as error:
        raise ModelError(
            f"can't keep the model in the cache folder {entry.parent}: {error}. "
            f"Free some space, or name another folder with {environment.CACHE}."
        ) from error
    return entry


def _publish(fresh: Path, entry: Path) -> None:
    try:
        fresh.rename(entry)
    except OSError:
        if not entry.is_dir():  # otherwise another process was first, with the same content
            raise


def _make_room(parent: Path) -> None:
    """Create the parent folder and remove what killed processes have left in it."""
    parent.mkdir(parents=True, exist_ok=True)
    for left_over in parent.glob(f"{_PARTIAL}*"):
        if time.time() - left_over.stat().st_mtime > _ABANDONED_AFTER_S:
            shutil.rmtree(left_over, ignore_errors=True)
