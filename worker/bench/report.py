"""`headrace worker --report`: the worker's engine, measured from when it is ready until its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from headrace.shared.engine_report import EngineReport, Memory
from headrace.shared.errors import SettingsError
from headrace.worker.bench.memory import peak_bytes, reset_peak, resident_bytes
from headrace.worker.bench.step_cost import warm_up
from headrace.worker.bench.time_split import SplitEngine, cache_of, decoder_of
from headrace.worker.engine.config import ModelConfig
from headrace.worker.loading import Loaded


@contextmanager
def reporting(loaded: Loaded, path: Path) -> Iterator[None]:
    """Measure the engine in the block, and write its EngineReport to `path` as JSON at the end.

    The engine is warmed up first: what is compiled once is no job's time. Raises SettingsError if `path` can't be
    written, at once.
    """
    try:
        path.write_text("")
    except OSError as error:
        raise SettingsError(f"can't write the report to {path}: {error.strerror or error}") from None
    warm_up(loaded.engine)
    reset_peak()
    start_bytes = resident_bytes()
    with SplitEngine(loaded.engine) as split:
        try:
            yield
        finally:
            end_bytes = resident_bytes()
            memory = Memory(start_bytes=start_bytes, peak_bytes=max(start_bytes, peak_bytes()), end_bytes=end_bytes)
            path.write_text(report_of(loaded, split, memory).model_dump_json(indent=2) + "\n")


def report_of(loaded: Loaded, split: SplitEngine, memory: Memory) -> EngineReport:
    """What was measured, with what it was measured on."""
    config, cache = decoder_of(loaded.engine).config, cache_of(loaded.engine)
    positions = cache.num_slots * cache.max_context
    return EngineReport(
        model=loaded.name,
        device=str(cache.keys.device),
        dtype=str(cache.keys.dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        num_slots=cache.num_slots,
        max_context=cache.max_context,
        matmul_weights=matmul_weights(config),
        kv_cache_bytes=cache.num_bytes,
        kv_cache_formula_bytes=config.kv_bytes_per_position(cache.keys.dtype.itemsize) * positions,
        seconds=split.seconds,
        steps=split.steps,
        memory=memory,
    )


def matmul_weights(config: ModelConfig) -> int:
    """The weights that each token is multiplied with; a looked-up embedding is none of them, the head is.

    L x (E x (H + 2K) x D + H x D x E + 3 x E x I) + E x V.
    """
    width = config.hidden_size
    qkv = width * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    output = config.num_heads * config.head_dim * width
    feed_forward = 3 * width * config.intermediate_size
    return config.num_layers * (qkv + output + feed_forward) + width * config.vocab_size
