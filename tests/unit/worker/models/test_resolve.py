from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import LlamaForCausalLM

from headrace.shared.errors import ModelError
from headrace.worker.models import ModelFiles, resolve


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_taken_as_it_is_and_named_after_itself(folder_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_maker.write(name="my-model")
    assert resolve(str(folder)) == ModelFiles(name="my-model", folder=folder)
    monkeypatch.chdir(folder)
    assert resolve(".").name == "my-model"


@pytest.mark.usefixtures("no_network")
def test_a_folder_called_like_a_hub_id_is_a_folder(folder_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_maker.write()
    monkeypatch.chdir(folder.parent.parent)
    assert resolve(f"{folder.parent.name}/{folder.name}").name == "model"


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file_is_converted_once(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], cache: Path) -> None:
    path = gguf_maker.write(llama())
    lines: list[str] = []
    found = resolve(str(path), progress=lines.append)
    assert found.name == "tiny"
    assert found.folder.is_relative_to(cache)
    assert resolve(str(path), progress=lines.append) == found
    assert len(lines) == 1


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file_that_has_changed_is_converted_again(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    path = gguf_maker.write(llama())
    first = resolve(str(path)).folder
    os.utime(path, (1, 1))
    assert resolve(str(path)).folder != first


def test_a_gguf_file_that_is_broken_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"bad\.gguf is damaged"):
        resolve(str(tmp_path / "bad.gguf"))
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2-135m", "no model 'smolm2-135m'; did you mean smollm2-135m?"),
        ("nothing-like-it", "A model is one of smollm2-135m, a folder in the Hugging Face layout, a .gguf file, or an"),
        ("", "no model ''"),
        ("a/b/c", "no model 'a/b/c'"),
        ("./owner/name", "no model './owner/name'"),
        ("no/such.gguf", "can't read"),
    ],
)
@pytest.mark.usefixtures("no_network")
def test_what_is_no_model_is_answered_with_what_is(model: str, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        resolve(model)
    assert message in str(raised.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="for safetensors give the folder"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(folder_maker: Any, name: str) -> None:
    folder = folder_maker.write()
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=f"{name} only, a format whose loading can run any code; convert them"):
        resolve(str(folder))


def test_a_folder_that_is_no_model_is_refused(folder_maker: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    folder = folder_maker.write()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        resolve(str(folder))


def test_only_data_is_asked_of_the_hub(folder_maker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_maker.write()
    asked: dict[str, Any] = {}

    def snapshot(repo_id: str, **settings: Any) -> str:
        asked.update(settings, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo_id, timeout: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("owner/name") == ModelFiles(name="owner/name", folder=folder)
    files = ["config.json", "model.safetensors", "pytorch_model.bin", "modeling.py", "a.pt", "x.pkl", "chat.jinja"]
    allowed = huggingface_hub.utils.filter_repo_objects(files, allow_patterns=asked["allow_patterns"])
    assert list(allowed) == ["config.json", "model.safetensors", "chat.jinja"]


def test_an_unreachable_hub_is_one_line_within_seconds(tmp_path: Path) -> None:
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = "from headrace.worker.models import resolve; resolve('owner/name')"
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
        started = time.monotonic()
        outcome = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90
        )
    assert time.monotonic() - started < 60
    last = outcome.stderr.strip().splitlines()[-1]
    assert "ModelError: can't fetch owner/name from the Hugging Face Hub" in last
    assert "give --model a local folder in the Hugging Face layout, a .gguf file, or one of smollm2-135m" in last


def test_a_hub_model_that_was_fetched_before_needs_no_network(
    folder_maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    folder_maker.write().rename(repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("owner/name").folder == repository / "snapshots" / ("0" * 40)
