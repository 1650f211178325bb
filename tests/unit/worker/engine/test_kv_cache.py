from __future__ import annotations

import pytest
import torch
from factories import attend, keys_of, kv_cache, model_config, packed, values_of
from torch import Tensor

from headrace.worker.engine.kv_cache import KVCache

SHAPE = model_config(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


def fill(cache: KVCache, slot: int, length: int, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Give a slot random keys and values from position 0 on, and return them: (T, K, D) twice."""
    keys, values = (torch.randn(length, 2, 16).to(cache.keys.dtype) for _ in range(2))
    attend(cache, packed([[1] * length], slots=[slot]), torch.zeros(length, 4, 16).to(keys), keys, values, layer=layer)
    return keys, values


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
    for slot in range(3):
        fill(cache, slot, 64)
    cache.copy_prefix(2, 0, 63)
    cache.clear(1)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.num_bytes == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_lands_in_its_layer_slot_and_position_only(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    cache = kv_cache(SHAPE, slots=4, max_context=128, dtype=dtype, kind=kind)
    tokens = packed([[1] * 32, [1], [1] * 70], slots=[1, 3, 0], starts=[0, 127, 50])
    keys, values = (torch.randn(103, 2, 16).to(dtype) for _ in range(2))
    attend(cache, tokens, torch.randn(103, 4, 16).to(dtype), keys, values, layer=1)
    for found, given in ((keys_of(cache), keys), (values_of(cache), values)):
        expected = torch.zeros(2, 4, 2, 128, 16, dtype=dtype)
        expected[1, 1, :, :32] = given[:32].transpose(0, 1)
        expected[1, 3, :, 127] = given[32]
        expected[1, 0, :, 50:120] = given[33:].transpose(0, 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 150])
def test_a_copied_beginning_is_that_of_the_source_and_nothing_else_changes(
    kind: str, dtype: torch.dtype, length: int
) -> None:
    torch.manual_seed(2)
    cache = kv_cache(SHAPE, slots=4, max_context=192, dtype=dtype, kind=kind)
    for layer in range(2):
        for slot in range(4):
            fill(cache, slot, 160, layer)
    keys, values = keys_of(cache).clone(), values_of(cache).clone()
    cache.copy_prefix(3, 1, length)
    for found, before in ((keys_of(cache), keys), (values_of(cache), values)):
        assert torch.equal(found[:, [0, 2, 3]], before[:, [0, 2, 3]])
        assert torch.equal(found[:, 1, :, :length], before[:, 3, :, :length])
        assert torch.equal(found[:, 1, :, 192:], before[:, 1, :, 192:])
    assert torch.equal(values_of(cache)[:, 1, :, length:], values[:, 1, :, length:])


def test_a_token_attends_to_a_copied_beginning_as_to_the_source(kind: str) -> None:
    torch.manual_seed(3)
    cache = kv_cache(SHAPE, slots=3, max_context=256, kind=kind)
    for slot in range(3):
        fill(cache, slot, 200, 1)
    cache.copy_prefix(2, 0, 131)
    queries, keys, values = (torch.randn(1, heads, 16).expand(3, -1, -1) for heads in (4, 2, 2))
    found = attend(cache, packed([[1], [1], [1]], starts=[131] * 3), queries, keys, values, layer=1)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_a_slot_may_be_copied_to_itself(kind: str) -> None:
    cache = kv_cache(SHAPE, slots=2, max_context=128, kind=kind)
    fill(cache, 1, 100)
    before = keys_of(cache).clone(), values_of(cache).clone()
    cache.copy_prefix(1, 1, 70)
    assert torch.equal(keys_of(cache), before[0])
    assert torch.equal(values_of(cache), before[1])


def test_a_cleared_slot_holds_nothing_and_its_neighbours_all(kind: str) -> None:
    cache = kv_cache(SHAPE, slots=3, max_context=64, kind=kind)
    cache.keys.fill_(1.0)
    cache.values.fill_(torch.nan)
    cache.clear(1)
    assert not cache.keys[:, 1].any()
    assert not cache.values[:, 1].any()
    assert cache.values[:, [0, 2]].isnan().all()
    assert (cache.keys[:, [0, 2]] == 1).all()
