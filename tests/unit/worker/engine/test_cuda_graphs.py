"""What surrounds the graphs, on the CPU: there, a capture is the pass itself, run anew on the same memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import CPU, decoder, packed, row, run
from transformers import LlamaForCausalLM

from headrace.worker.engine import cuda_graphs
from headrace.worker.engine.cuda_graphs import GraphedDecoder, Pass, padded_positions, padded_rows
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.rows import Row

Make = Callable[..., tuple[LlamaForCausalLM, Path]]
SLOTS = 40


class FakeCapture:
    """Notes how often it captures, and how often what it has captured runs."""

    def __init__(self) -> None:
        self.captured = 0
        self.runs = 0

    def __call__(self, run: Pass) -> Pass:
        self.captured += 1

        def replay() -> torch.Tensor:
            self.runs += 1
            return run()

        return replay


@pytest.fixture
def model(checkpoint: Make) -> Decoder:
    return decoder(checkpoint(hidden_size=64)[1])


def spare_cache(model: Decoder, max_context: int = 256) -> KVCache:
    return KVCache(
        model.config, num_slots=SLOTS, max_context=max_context, dtype=torch.float32, device=CPU, spare_slots=1
    )


@pytest.mark.parametrize(
    ("count", "rows"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 96), (250, 256)]
)
def test_rows_are_filled_up_to_one_of_a_few_numbers(count: int, rows: int) -> None:
    assert padded_rows(count) == rows


@pytest.mark.parametrize(("count", "positions"), [(1, 256), (256, 256), (257, 512), (512, 512), (1500, 2048)])
def test_positions_are_rounded_up_to_a_power_of_two(count: int, positions: int) -> None:
    assert padded_positions(count) == positions


@pytest.mark.parametrize("num_rows", [1, 3, 17, 39, 40])
def test_a_captured_step_gives_each_row_the_logits_of_the_plain_one(model: Decoder, num_rows: int) -> None:
    generator = random.Random(num_rows)
    prompts = [[generator.randrange(90) for _ in range(generator.randrange(2, 40))] for _ in range(num_rows)]
    plain, spare = spare_cache(model), spare_cache(model)
    capture = FakeCapture()
    graphed = GraphedDecoder(model, capture)
    first = graphed.forward(packed(prompts), spare)
    assert torch.allclose(first, model.forward(packed(prompts), plain), rtol=1e-4, atol=1e-5)
    for _ in range(3):
        step = packed([[generator.randrange(90)] for _ in prompts], starts=[len(each) for each in prompts])
        expected, found = model.forward(step, plain), graphed.forward(step, spare)
        assert found.shape == expected.shape
        # More rows than before may be multiplied in another order.
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        for prompt in prompts:
            prompt.append(0)
    assert torch.allclose(spare.keys[:, :SLOTS], plain.keys[:, :SLOTS], rtol=1e-4, atol=1e-5)
    assert (capture.captured, capture.runs) == (1, 3)


def test_an_engine_captures_once_for_each_number_of_rows_and_of_positions(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_LEAST_POSITIONS", 64)

    def rows() -> list[Row]:
        generator = random.Random(5)
        return [
            row(
                str(number),
                [generator.randrange(90) for _ in range(generator.randrange(2, 30))],
                max_tokens=5 + number * 5,
                temperature=0.8,
                top_k=20,
            )
            for number in range(33)
        ]

    capture = FakeCapture()
    batch = Engine(GraphedDecoder(model, capture), spare_cache(model, max_context=200))
    expected = run(Engine(model, spare_cache(model, max_context=200)), rows())
    assert run(batch, rows()) == expected
    # 40 (the slots), 32, 16, 8, 4, 2 and 1 rows; 64, 128 and 200 positions, which grow as the rows get fewer.
    assert 7 <= capture.captured <= 7 + 2
    assert capture.runs == batch.counts.steps - 1  # the first pass has the prompts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_graphs_on_a_device_give_the_logits_of_plain_steps(checkpoint: Make) -> None:
    device = torch.device("cuda")
    model = decoder(checkpoint(hidden_size=64)[1]).to(device)
    caches = [
        KVCache(model.config, num_slots=8, max_context=64, dtype=torch.float32, device=device, spare_slots=1)
        for _ in range(2)
    ]
    graphed = GraphedDecoder(model)
    for position in range(9):
        host = packed([[position + number] for number in range(5)], starts=[position] * 5)
        there = {name: getattr(host, name).to(device) for name in ("token_ids", "slots", "positions", "last")}
        step = replace(host, **there)
        expected, found = model.forward(step, caches[0]), graphed.forward(step, caches[1])
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)
