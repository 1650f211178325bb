"""A row's tokens and logits are the same to the bit, whatever else is in the batch; a row that fails harms none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from factories import decoder, drain, kv_cache, record, row
from torch.nn import functional
from transformers import LlamaForCausalLM

from headrace.shared.schema import FinishReason
from headrace.worker.engine.elementwise import add_and_norm_, gated_silu
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.model import Decoder, Linear
from headrace.worker.engine.rows import Row
from headrace.worker.engine.stopping import Finish

Make = Callable[..., tuple[LlamaForCausalLM, Path]]
NUM_ROWS = 33
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_row(number: int) -> Row:
    """Row `number` of many: short and long, greedy and sampled."""
    generator = random.Random(number)
    return row(
        str(number),
        [generator.randrange(1, 97) for _ in range(generator.choice([1, 7, 31, 32, 40, 64, 100, 120]))],
        max_tokens=generator.choice([2, 5, 11]),
        temperature=generator.choice([0.0, 0.8, 1.3]),
        top_k=generator.choice([0, 0, 20]),
        top_p=generator.choice([1.0, 0.9]),
    )


# Sizes at which the libraries did tell rows apart: a single row times 1,700 columns in bfloat16, and products of a few
# rows, or activations of more than a thread takes, in float32.
WIDE = {"hidden_size": 64, "intermediate_size": 1700, "num_hidden_layers": 2}


def assert_alone_and_together_are_the_same(
    model: Decoder, num_rows: int, batches: Sequence[tuple[int, int]], kind: str
) -> None:
    """`batches` are numbers of rows with numbers of slots."""
    alone = [record(model, [make_row(number)], slots=1, kind=kind) for number in range(num_rows)]
    generator = random.Random(1)
    for size, slots in batches:
        chosen = generator.sample(range(num_rows), size)
        together = record(model, [make_row(number) for number in chosen], slots=slots, kind=kind)
        for number in chosen:
            together.assert_same(alone[number], str(number))


@DTYPES
def test_a_row_gets_the_same_bits_alone_and_in_any_batch(checkpoint: Make, dtype: torch.dtype, kind: str) -> None:
    model = decoder(checkpoint(**WIDE)[1], dtype=dtype)
    assert_alone_and_together_are_the_same(model, 33, [(2, 2), (3, 4), (7, 7), (32, 32), (33, 5)], kind)


@DTYPES
def test_a_row_gets_the_same_bits_when_the_work_is_cut_up_among_threads(
    checkpoint: Make, dtype: torch.dtype, kind: str
) -> None:
    model = decoder(checkpoint(**WIDE)[1], dtype=dtype)
    torch.set_num_threads(2)
    assert_alone_and_together_are_the_same(model, 9, [(2, 2), (9, 9), (9, 3)], kind)


def test_a_row_that_fails_does_not_change_its_neighbours_by_a_bit(checkpoint: Make, kind: str) -> None:
    model = decoder(checkpoint(hidden_size=64)[1])
    poison = 96
    model.embedding.weight.data[poison] = torch.nan
    sound = [each for each in map(make_row, range(30)) if poison not in each.prompt_ids]
    alone = {each.row_id: record(model, [fresh(each)], slots=1, kind=kind) for each in sound}
    whole = [each for each in sound if alone[each.row_id].finishes[each.row_id] != Finish(reason=FinishReason.ERROR)]
    assert len(whole) > 10
    bad = [row(f"bad {number}", [5] * number + [poison, 3], max_tokens=9) for number in range(8)]
    mixed = [each for pair in zip(whole[:8], bad, strict=True) for each in pair] + whole[8:]
    for slots in (2, 5, 20):
        together = record(model, [fresh(each) for each in mixed], slots=slots, kind=kind)
        for each in whole:
            together.assert_same(alone[each.row_id], each.row_id)
        assert {together.finishes[each.row_id] for each in bad} == {Finish(reason=FinishReason.ERROR)}


def fresh(each: Row) -> Row:
    return Row(row_id=each.row_id, prompt_ids=each.prompt_ids, sampling=each.sampling, stopping=each.stopping)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_slot_that_held_what_is_not_finite_is_clean_for_the_next_row(checkpoint: Make, value: float) -> None:
    model = decoder(checkpoint(hidden_size=64)[1])
    cache = kv_cache(model.config, slots=2)
    batch = Engine(model, cache)
    batch.submit(row("good", [1, 2, 3], max_tokens=60))
    batch.submit(row("bad", [4, 5, 6], max_tokens=60))
    batch.step()
    cache.values[:, 1, :, 2] = value
    cache.keys[:, 1, :, 1] = value
    done = batch.step()
    assert [(each.row_id, each.finish) for each in done] == [("bad", Finish(reason=FinishReason.ERROR))]
    batch.submit(row("next", [7, 8], max_tokens=50, temperature=1.0))
    found = {each.row_id: each.token_ids for each in drain(batch)}
    for name, prompt, changes in (
        ("good", [1, 2, 3], {"max_tokens": 60}),
        ("next", [7, 8], {"max_tokens": 50, "temperature": 1.0}),
    ):
        alone = record(model, [row(name, prompt, **changes)], slots=1, kind="plain")
        assert found[name] == alone.tokens[name]


# The parts where it broke or could break


@pytest.fixture(params=[1, 2, 3, 5, 16], ids=lambda number: f"{number} threads")
def many_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


ALL_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@ALL_DTYPES
@pytest.mark.parametrize(("columns", "outputs"), [(64, 96), (20, 7), (1700, 64)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@torch.inference_mode()
def test_a_product_does_not_depend_on_how_many_rows_there_are(
    many_threads: int, dtype: torch.dtype, columns: int, outputs: int, bias: bool, packed: bool
) -> None:
    torch.manual_seed(1)
    layer = Linear(columns, outputs, bias=bias).to(dtype)
    rows = torch.randn(64, columns, dtype=dtype)
    offset = layer.bias.double() if bias else None
    reference = functional.linear(rows.double(), layer.weight.double(), offset)
    if packed:
        layer.pack()
    whole = layer(rows)
    assert (whole.double() - reference).abs().max() < 2e-2
    for count in (*range(1, 21), 33):
        for start in (0, 1, 30):
            assert torch.equal(layer(rows[start : start + count]), whole[start : start + count]), (start, count)


@ALL_DTYPES
@pytest.mark.parametrize("width", [1536, 1000, 100, 17])
def test_an_activation_does_not_depend_on_where_it_lies(
    many_threads: int, kind: str, dtype: torch.dtype, width: int
) -> None:
    torch.manual_seed(1)
    both = (torch.randn(150, 2 * width) * 3).to(dtype)
    whole = gated_silu(both)
    assert whole.shape == (150, width)
    for count in (1, 2, 7, *range(30, 150, 7)):
        assert torch.equal(gated_silu(both[:count]), whole[:count]), count
        assert torch.equal(gated_silu(both[150 - count :]), whole[150 - count :]), count


@ALL_DTYPES
def test_a_gate_is_opened_by_silu(kind: str, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4])))
    up = torch.linspace(-3, 3, len(gate))
    both = torch.stack((gate, up)).to(dtype)
    expected = functional.silu(both[0].double()) * both[1].double()
    found = gated_silu(both.view(1, -1))[0]
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=3 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).tiny)
    assert gated_silu(torch.tensor([[torch.nan, 1.0]], dtype=dtype)).isnan().all()


@ALL_DTYPES
@pytest.mark.parametrize("width", [576, 64, 20])
def test_a_sum_is_normalized_the_same_in_any_batch(
    many_threads: int, kind: str, dtype: torch.dtype, width: int
) -> None:
    torch.manual_seed(1)
    hidden, update = (torch.randn(150, width).to(dtype) * 3 for _ in range(2))
    weight = torch.randn(width).to(dtype)

    def of_first(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        added = hidden[:count].clone()
        return added, add_and_norm_(added, update[:count].clone(), weight, 1e-2)

    added, normed = of_first(150)
    assert torch.equal(added, hidden + update)
    wide = added.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    assert torch.allclose(normed.double(), expected, rtol=3 * torch.finfo(dtype).eps, atol=1e-6)
    for count in (1, 2, 7, 33, 149):
        for part, whole in zip(of_first(count), (added, normed), strict=True):
            assert torch.equal(part, whole[:count])
