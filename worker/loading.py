"""From settings to a model that is ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cuda_graphs import GraphedDecoder
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.huge_pages import move_into_huge_pages
from headrace.worker.engine.placement import (
    choose_device,
    choose_dtype,
    choose_int8,
    choose_max_context,
    choose_slots,
    make_cache,
)
from headrace.worker.engine.weights import load_decoder
from headrace.worker.memory import keep_freed_memory
from headrace.worker.models import TextCodec, resolve
from headrace.worker.runner import Runner
from headrace.worker.settings import EngineSettings

logger = logging.getLogger("headrace.worker")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model's engine and the runner that feeds it."""

    name: str
    engine: Engine
    runner: Runner


def load(settings: EngineSettings) -> Loaded:
    """Find, read and place a model. Raises ModelError or SettingsError."""
    keep_freed_memory()
    files = resolve(settings.model, progress=logger.info)
    config = ModelConfig.from_folder(files.folder)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    max_context = choose_max_context(settings.max_context, config)
    codec = TextCodec.load(files.folder)
    int8 = choose_int8(settings.quantization, device)
    decoder = load_decoder(files.folder, config, max_context=max_context, dtype=dtype, device=device, int8=int8)
    model = GraphedDecoder(decoder) if device.type == "cuda" else decoder
    slots = choose_slots(
        settings.slots, settings.most_slots, config, max_context=max_context, dtype=dtype, device=device
    )
    if device.type == "cpu":
        move_into_huge_pages()
    cache = make_cache(config, num_slots=slots, max_context=max_context, dtype=dtype, device=device)
    logger.info(
        "model %s in %s on %s: %d slots of %s positions, KV cache %s MiB "
        "(a position takes 2 x %d layers x %d heads x %d x %d bytes)",
        files.name,
        str(dtype).removeprefix("torch.") + (" with int8 products" if int8 else ""),
        device,
        slots,
        f"{max_context:,}",
        f"{cache.num_bytes / 2**20:,.0f}",
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        dtype.itemsize,
    )
    runner = Runner(
        codec, model_name=files.name, max_context=max_context, vocab_size=config.vocab_size, limits=settings.limits
    )
    return Loaded(name=files.name, engine=Engine(model, cache), runner=runner)
