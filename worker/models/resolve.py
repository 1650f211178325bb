"""From what a person gave as --model to a folder in the Hugging Face layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.shared.errors import ModelError
from headrace.worker.models.cache import entry_folder, get_or_build
from headrace.worker.models.catalog import CATALOG
from headrace.worker.models.convert import convert_gguf
from headrace.worker.models.hub import download
from headrace.worker.models.progress import Progress, silent
from headrace.worker.models.pull import did_you_mean, pull

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that is on this machine: the name that it is served by, and its folder in the Hugging Face layout."""

    name: str
    folder: Path


def resolve(model: str, *, progress: Progress = silent) -> ModelFiles:
    """Find `model`: an alias of the catalog, a folder, a .gguf file, or a Hugging Face Hub id, in this order.

    Fetches or converts it if needed, once; a model that is on this machine is found without any network access.
    Raises ModelError if it can't be found, fetched or converted, or if its weights are not safetensors.
    """
    if model in CATALOG:
        return ModelFiles(name=model, folder=pull(model, progress))
    path = Path(model).expanduser()
    if model and path.is_dir():
        return ModelFiles(name=path.resolve().name, folder=_checked(path))
    if path.suffix.lower() == ".gguf":
        return ModelFiles(name=path.stem, folder=_converted(path, progress))
    if path.is_file():
        raise ModelError(f"{model} is a file, but not a .gguf file; for safetensors give the folder that holds it")
    if _HUB_ID.fullmatch(model):
        progress(f"looking up {model} on the Hugging Face Hub")
        return ModelFiles(name=model, folder=_checked(download(model)))
    raise ModelError(
        f"no model {model!r}{did_you_mean(model)}. A model is one of {', '.join(sorted(CATALOG))}, a folder in the "
        "Hugging Face layout, a .gguf file, or an owner/name of the Hugging Face Hub."
    )


def _converted(path: Path, progress: Progress) -> Path:
    path = path.resolve()
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error

    def build(folder: Path) -> None:
        progress(f"converting {path.name}, once; it will be kept in {target}")
        convert_gguf(path, folder)

    target = entry_folder(path.stem, f"{path}\0{status.st_size}\0{status.st_mtime_ns}")
    return get_or_build(target, build)


def _checked(folder: Path) -> Path:
    """The folder, if it has a configuration and safetensors. Pickled weights are refused: loading them runs code."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model in the Hugging Face layout")
    if any(folder.glob("*.safetensors")):
        return folder
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder} has its weights in {pickled[0]} only, a format whose loading can run any code; "
            "convert them to safetensors first (transformers: model.save_pretrained(folder))"
        )
    raise ModelError(f"{folder} has no weights: no *.safetensors in it")
