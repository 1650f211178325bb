"""Measuring an engine changes nothing in what it does, and what it counts can be counted by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import decoder, drain, kv_cache, row
from transformers import LlamaForCausalLM

from headrace.worker.bench.report import matmul_weights
from headrace.worker.bench.time_split import SplitEngine
from headrace.worker.engine import generate
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.linear import Linear

Make = Callable[..., tuple[LlamaForCausalLM, Path]]


@pytest.fixture
def engine(checkpoint: Make) -> Engine:
    model = decoder(checkpoint(hidden_size=64)[1])
    return Engine(model, kv_cache(model.config, slots=4))


def test_a_measured_engine_gives_the_same_tokens(engine: Engine) -> None:
    def run() -> dict[str, list[int]]:
        for number in range(6):
            engine.submit(row(str(number), [3, 4, 5 + number], max_tokens=7, temperature=0.8, top_k=20))
        return {each.row_id: each.token_ids for each in drain(engine)}

    plain = run()
    with SplitEngine(engine):
        assert run() == plain


def test_the_split_is_disjoint_and_within_the_time_that_passed(engine: Engine) -> None:
    started = time.perf_counter()
    with SplitEngine(engine) as split:
        for number in range(6):
            engine.submit(row(str(number), max_tokens=20, temperature=0.8, top_k=20))
        drain(engine)
        passed_s = time.perf_counter() - started
    seconds = split.seconds.model_dump()
    assert all(value > 0 for value in seconds.values()), seconds
    assert sum(seconds.values()) == pytest.approx(split.seconds.busy)
    assert split.seconds.busy <= passed_s


def test_time_without_rows_is_not_the_engines(engine: Engine) -> None:
    with SplitEngine(engine) as split:
        for number in range(2):
            engine.submit(row(str(number), max_tokens=2))
            drain(engine)
            before = split.seconds.busy
            waited = time.perf_counter() + 0.05
            while time.perf_counter() < waited:
                engine.step()  # without rows
            assert split.seconds.busy - before < 0.05


def test_row_steps_are_counted_by_slot_and_only_while_jobs_wait(engine: Engine) -> None:
    with SplitEngine(engine) as split:
        engine.submit(row("a", [1, 2, 3], max_tokens=5))
        for _ in range(2):
            engine.step()
        assert split.steps.empty_row_steps == 0  # nobody came after those steps yet
        engine.submit(row("b", [1] * 40, max_tokens=3))
        drain(engine)
    # "a" takes 5 steps, in 3 of which "b" is there, too.
    assert split.steps.steps == 5
    assert split.steps.row_steps == 5 + 3
    assert split.steps.empty_row_steps == 2 * 3
    assert split.steps.prompt_tokens == 43


def test_after_it_the_engine_is_as_it_was(engine: Engine) -> None:
    model: Any = engine._model
    parts = [engine, model, engine._cache, *model.modules()]
    before, sample = [dict(vars(part)) for part in parts], generate.sample
    with SplitEngine(engine):
        assert generate.sample is not sample
    after = [dict(vars(part)) for part in parts]
    for each in (before[0], after[0]):
        each.pop("counts")
    assert generate.sample is sample
    assert after == before


def test_a_step_that_fails_does_not_stop_the_clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    cache: Any = engine._cache
    attend = cache.attend
    monkeypatch.setattr(cache, "attend", fail)
    with SplitEngine(engine) as split:
        engine.submit(row("a", max_tokens=4))
        with pytest.raises(RuntimeError, match="gone"):
            engine.step()
        engine.drop_all()
        before = split.seconds.matrix_products
        monkeypatch.setattr(cache, "attend", attend)
        engine.submit(row("a", max_tokens=4))
        drain(engine)
        assert split.seconds.matrix_products > before


def test_the_weights_of_smollm2_counted_by_hand() -> None:
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        norm_eps=1e-5,
        rope_theta=1e5,
        tied_head=True,
    )
    # 576 x 960 + 576 x 576 + 3 x 576 x 1,536 = 3,538,944 a layer; the head has 576 x 49,152 = 28,311,552
    assert matmul_weights(config) == 30 * 3_538_944 + 28_311_552 == 134_479_872


def test_the_weights_are_those_of_the_models_products(checkpoint: Make) -> None:
    model = decoder(checkpoint(hidden_size=64)[1], dtype=torch.float32)
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    assert matmul_weights(model.config) == products
