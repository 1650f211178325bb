"""The curves are measured at what they say, within the engine's room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import decoder, kv_cache
from transformers import LlamaForCausalLM

from headrace.worker.bench.matmul_limit import matmul_limit
from headrace.worker.bench.step_cost import doublings, step_curves
from headrace.worker.engine.generate import Engine

Make = Callable[..., tuple[LlamaForCausalLM, Path]]


def test_the_curves_double_up_to_the_engines_room(checkpoint: Make) -> None:
    model = decoder(checkpoint(hidden_size=64)[1])
    engine = Engine(model, kv_cache(model.config, slots=6, max_context=128))
    curves = step_curves(engine)
    assert [point.at for point in curves.by_rows] == [1, 2, 4, 6]
    lengths = [point.at for point in curves.by_cached_tokens]
    assert lengths[:3] == [16, 32, 64]
    assert 64 < lengths[3] < 128
    assert [point.at for point in curves.next_token_cached] == lengths
    assert [point.at for point in curves.next_token_recomputed] == lengths
    assert curves.rows == 6
    assert all(point.seconds > 0 for point in (*curves.by_rows, *curves.next_token_recomputed))
    assert engine.num_rows == 0


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(1, 1, [1]), (1, 8, [1, 2, 4, 8]), (1, 6, [1, 2, 4, 6]), (5, 3, [3])]
)
def test_doublings_end_with_the_last(first: int, last: int, expected: list[int]) -> None:
    assert list(doublings(first, last)) == expected


def test_the_limit_is_measured_in_the_type_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.worker.bench.matmul_limit._SIZES", {"cpu": (64, 128)})
    limit = matmul_limit(torch.device("cpu"), torch.float32)
    assert (limit.device, limit.dtype) == ("cpu", "float32")
    assert limit.size in (64, 128)
    assert limit.flops_per_s > 0
