"""Checkpoints of tiny random Llamas, written by transformers; torch on one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import KINDS, llama, set_kind
from transformers import LlamaForCausalLM

MakeCheckpoint = Callable[..., tuple[LlamaForCausalLM, Path]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Makes a model of transformers from the fields of a LlamaConfig, and a folder that it was saved in."""
    made: dict[str, tuple[LlamaForCausalLM, Path]] = {}

    def make(**fields: Any) -> tuple[LlamaForCausalLM, Path]:
        key = repr(sorted(fields.items()))
        if key not in made:
            model, folder = llama(**fields), tmp_path_factory.mktemp("llama")
            model.save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """At these sizes more threads only wait for each other, very long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once with plain torch only, once with the compiled kernels that this machine can have."""
    set_kind(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch only."""
    set_kind("plain", monkeypatch)
