"""A worker process for the soak: the real worker on a real model, which counts the tokens that it samples.

The count lies in a file of its own that outlives the process however it ends, for only so can it be known how much was
computed twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults.namespaces import enter_namespace
from faults.processes import end_with_parent

from headrace.shared.connection import connect, open_client
from headrace.worker.batch_worker import BatchWorker
from headrace.worker.cli import _log_to_stderr
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.loading import load
from headrace.worker.settings import EngineSettings, QueueSettings

NO_SERVER = 2  # the exit code of a worker that found no server when it began


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What each worker of a soak is started with; `namespace` is the network namespace that it lives in."""

    url: str
    model: str
    slots: int
    lease_s: float
    checkpoint_interval_s: float
    max_crashes: int
    socket_timeout_s: float = 10.0
    namespace: str | None = None


class CountingModel:
    """A model whose sampled tokens are counted: one a row of each pass."""

    def __init__(self, model: Any, count: mmap.mmap) -> None:
        self._model = model
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: PackedTokens, cache: KVCache) -> torch.Tensor:
        logits: torch.Tensor = self._model.forward(tokens, cache)
        struct.pack_into("<Q", self._count, 0, struct.unpack_from("<Q", self._count)[0] + len(tokens.last))
        return logits


def sampled_tokens(folder: Path) -> int:
    """What all workers of a soak have sampled."""
    return sum(struct.unpack("<Q", path.read_bytes())[0] for path in folder.glob("*.count"))


def run_worker(plan: WorkerPlan, folder: Path, number: int) -> None:
    """Be a worker until told to stop. Its count and its log go to `folder`."""
    end_with_parent()
    if plan.namespace is not None:
        enter_namespace(plan.namespace)
    with (folder / f"{number}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    _log_to_stderr("INFO")
    torch.set_num_threads(1)
    try:
        connect(plan.url).close()
    except Exception:
        sys.exit(NO_SERVER)
    loaded = load(EngineSettings(model=plan.model, slots=plan.slots, dtype="float32", device="cpu"))
    settings = QueueSettings(
        lease_s=plan.lease_s, checkpoint_interval_s=plan.checkpoint_interval_s, max_crashes=plan.max_crashes
    )
    with (
        _counter(folder / f"{number}.count") as count,
        open_client(plan.url, socket_timeout_s=plan.socket_timeout_s) as connection,
    ):
        loaded.engine._model = CountingModel(loaded.engine._model, count)
        worker = BatchWorker(connection, loaded.engine, loaded.runner, settings)
        worker.install_signal_handlers()
        worker.run()


@contextlib.contextmanager
def _counter(path: Path) -> Iterator[mmap.mmap]:
    path.write_bytes(bytes(8))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as count:
        yield count
