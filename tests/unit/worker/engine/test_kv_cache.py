from __future__ import annotations

import pytest
import torch
from factories import kv_cache, model_config

SHAPE = model_config(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("layers", "heads", "positions", "head_dim", "dtype", "slots", "expected"),
    [
        (30, 3, 2048, 64, torch.bfloat16, 2, 2 * 30 * 3 * 2048 * 64 * 2 * 2),  # SmolLM2-135M: 45 MiB a row
        (2, 2, 96, 16, torch.float32, 5, 2 * 2 * 2 * 96 * 16 * 4 * 5),
        (1, 1, 100, 8, torch.float16, 1, 2 * 100 * 8 * 2),
    ],
)
def test_the_cache_takes_the_bytes_of_the_formula(
    layers: int, heads: int, positions: int, head_dim: int, dtype: torch.dtype, slots: int, expected: int
) -> None:
    config = model_config(num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
    cache = kv_cache(config, slots=slots, max_context=positions, dtype=dtype)
    assert cache.num_bytes == expected
    assert cache.keys.untyped_storage().nbytes() + cache.values.untyped_storage().nbytes() == expected
    assert config.kv_bytes_per_position(dtype.itemsize) * positions * slots == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_never_grows(kind: str, dtype: torch.dtype) -> None:
    cache = kv_cache(SHAPE, slots=3, max_context=64, dtype=dtype, kind=kind)
    addresses, before = (cache.keys.data_ptr(), cache.values.data_ptr()), cache.num_bytes
    assert before == 2 * 2 * 2 * 64 * 16 * dtype.itemsize * 3
    cache.write_prompts(0, 0, torch.ones(3, 64, 2, 16, dtype=dtype), torch.ones(3, 64, 2, 16, dtype=dtype))
    cache.commit(2, 64)
    cache.move(2, 0)
    cache.clear(1)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.num_bytes == before


def test_what_is_written_lands_in_its_slot_and_position_only(kind: str) -> None:
    torch.manual_seed(1)
    cache = kv_cache(SHAPE, slots=4, max_context=64, kind=kind)
    keys, values = torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 16)
    cache.write_prompts(1, 1, keys, values)
    cache.write_step(1, torch.tensor([0, 20, 40]), torch.ones(3, 2, 16), torch.full((3, 2, 16), 2.0))
    expected = torch.zeros(4, 2, 64, 16)
    expected[1:3, :, :32] = values.transpose(1, 2)
    for slot, position in enumerate([0, 20, 40]):
        expected[slot, :, position] = 2.0
    assert torch.equal(cache.values[1], expected)
    assert not cache.values[0].any()
    assert not cache.keys[0].any()
    assert cache.keys[1].sum().item() == pytest.approx(keys.sum().item() - keys[0, 20].sum().item() + 3 * 32, rel=1e-5)


def test_a_row_attends_to_the_same_after_it_has_moved(kind: str) -> None:
    torch.manual_seed(2)
    cache = kv_cache(SHAPE, slots=4, max_context=256, kind=kind)
    for layer in range(2):
        cache.write_prompts(layer, 0, torch.randn(4, 160, 2, 16), torch.randn(4, 160, 2, 16))
    cache.commit(3, 131)
    queries = torch.randn(1, 4, 16)
    before = cache.attend(1, queries.expand(4, -1, -1), torch.full((4,), 131), 131)[3]
    cache.move(3, 1)
    assert int(cache.lengths[1]) == 131
    after = cache.attend(1, queries.expand(2, -1, -1), torch.full((2,), 131), 131)[1]
    assert torch.equal(after, before)


def test_a_cleared_slot_holds_nothing_and_its_neighbours_all(kind: str) -> None:
    cache = kv_cache(SHAPE, slots=3, max_context=64, kind=kind)
    cache.keys.fill_(1.0)
    cache.values.fill_(torch.nan)
    cache.clear(1)
    assert not cache.keys[:, 1].any()
    assert not cache.values[:, 1].any()
    assert cache.values[:, [0, 2]].isnan().all()
    assert (cache.keys[:, [0, 2]] == 1).all()


def test_lengths_grow_by_one_for_the_rows_of_a_step() -> None:
    cache = kv_cache()
    cache.commit(0, 7)
    cache.commit(1, 3)
    cache.commit(2, 5)
    cache.advance(2)
    assert cache.lengths.tolist() == [8, 4, 5, 0]
