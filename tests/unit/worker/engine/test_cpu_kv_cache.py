"""The CPU's cache and kernels against the plain ones, against float64, and row by row."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("numba")

import torch
from factories import CPU, attend, keys_of, kv_cache, model_config, packed, values_of
from torch import Tensor

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cpu_attention import BLOCK
from headrace.worker.engine.cpu_kv_cache import CpuKVCache, is_supported
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.rope import rotation_table

CONTEXT = 200
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130, CONTEXT]
SLOTS = len(LENGTHS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Query heads, key heads, head size: every number of queries a key head that kernels take otherwise, every head size.
SHAPES = [
    (2, 2, 16),
    (4, 2, 32),
    (9, 3, 64),
    (8, 2, 48),
    (5, 1, 80),
    (14, 2, 128),
    (8, 1, 96),
    (16, 1, 64),
    (4, 4, 32),
    (8, 1, 128),
]


def config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return model_config(num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=500.0)


def both(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[KVCache, CpuKVCache]:
    plain, fast = (
        kv_cache(config(*shape), slots=SLOTS, max_context=CONTEXT, dtype=dtype, kind=kind)
        for kind in ("plain", "fastest")
    )
    assert isinstance(fast, CpuKVCache)
    assert not isinstance(plain, CpuKVCache)
    return plain, fast


def random_pass(
    shape: tuple[int, int, int], dtype: torch.dtype, *, sharpness: float = 1.0
) -> tuple[PackedTokens, list[Tensor]]:
    """A prompt a slot, with queries, keys and values: (T, H, D), two of (T, K, D). The same for equal arguments."""
    generator = torch.Generator().manual_seed(1)
    tokens = packed([[1] * length for length in LENGTHS])
    heads, kv_heads, head_dim = shape
    drawn = [torch.randn(sum(LENGTHS), count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads)]
    drawn[0] *= sharpness
    return tokens, [each.to(dtype) for each in drawn]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_turn_store_and_attend_as_the_plain_cache_does(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    tokens, drawn = random_pass(shape, dtype)
    rotations = rotation_table(config(*shape), CONTEXT, dtype)[tokens.positions]
    plain, fast = both(shape, dtype)
    mixed = torch.cat(drawn, dim=1).flatten(1)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    for layer in range(2):
        expected, found = (cache.attend(layer, mixed, rotations, tokens) for cache in (plain, fast))
        assert found.dtype == dtype
        assert found.shape == (sum(LENGTHS), shape[0] * shape[2])
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(keys_of(fast)[..., :CONTEXT, :], plain.keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(values_of(fast)[..., :CONTEXT, :], plain.values)


@DTYPES
@pytest.mark.parametrize("sharpness", [1.0, 20.0], ids=["", "exp over its whole range"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_match_a_softmax_in_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, sharpness: float
) -> None:
    tokens, (queries, keys, values) = random_pass(shape, dtype, sharpness=sharpness)
    heads, kv_heads, head_dim = shape
    found = attend(both(shape, dtype)[1], tokens, queries, keys, values)
    # Scores of up to 100 are 8e-6 apart in float32. In bfloat16 each weight and the result are rounded once.
    unit = 1e-5 if dtype is torch.float32 else 2 * 2**-8
    for slot, length in enumerate(LENGTHS):
        rows = (tokens.slots == slot).nonzero()[:, 0]
        for position in {0, length // 2, length - 1}:
            for head in range(heads):
                seen, kv = rows[: position + 1], head * kv_heads // heads
                scores = keys[seen, kv].double() @ queries[rows[position], head].double() / head_dim**0.5
                weights = scores.softmax(dim=0)
                expected = weights @ values[seen, kv].double()
                allowed = 2e-5 + unit * (weights @ values[seen, kv].double().abs())
                assert ((found[rows[position], head].double() - expected).abs() <= allowed).all()


@DTYPES
def test_a_rows_attention_is_the_same_to_the_bit_in_any_slot_and_company(dtype: torch.dtype) -> None:
    shape = (9, 3, 64)
    tokens, drawn = random_pass(shape, dtype)
    whole = attend(both(shape, dtype)[1], tokens, *drawn)
    for slot, length in enumerate(LENGTHS):
        own = tokens.slots == slot
        alone = packed([[1] * length], slots=[(slot + 4) % SLOTS])
        assert torch.equal(attend(both(shape, dtype)[1], alone, *(each[own] for each in drawn)), whole[own])


def test_what_lies_beyond_a_rows_end_has_no_part_in_it() -> None:
    shape = (4, 2, 16)
    _, fast = both(shape, torch.bfloat16)
    torch.manual_seed(2)
    queries, keys, values = (torch.randn(50, heads, 16).bfloat16() for heads in (4, 2, 2))
    tokens = packed([[1] * 50], slots=[3])
    before = attend(fast, tokens, queries, keys, values)
    fast.values[0, 3, :, 2:] = torch.nan
    fast.values[0, 3, :, 1, 2:, :, 1] = 1e30  # positions 50 to 63
    fast.keys[0, 3, :, 2:] = torch.nan
    fast.keys[0, 3, :, 1, :, 18:] = torch.nan
    assert torch.equal(attend(fast, tokens, queries, keys, values), before)


@DTYPES
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 100])
def test_a_copied_beginning_brings_nothing_along_from_behind_it(dtype: torch.dtype, length: int) -> None:
    _, fast = both((4, 2, 16), dtype)
    torch.manual_seed(3)
    queries, keys, values = (torch.randn(130, heads, 16).to(dtype) for heads in (4, 2, 2))
    attend(fast, packed([[1] * 130], slots=[1]), queries, keys, values)
    bad = values.clone()
    bad[length:] = torch.nan
    attend(fast, packed([[1] * 130], slots=[2]), queries, keys, bad)
    fast.copy_prefix(2, 4, length)
    assert torch.equal(keys_of(fast)[0, 4, :, :length], keys_of(fast)[0, 1, :, :length])
    assert torch.equal(values_of(fast)[0, 4, :, :length], values_of(fast)[0, 1, :, :length])
    assert fast.values[:, 4].isfinite().all()


def test_a_cleared_slot_holds_nothing() -> None:
    _, fast = both((4, 2, 16), torch.float32)
    fast.values[:, 2] = torch.nan
    fast.keys[:, 2] = torch.nan
    fast.clear(2)
    assert not fast.values.any()
    assert not fast.keys.any()


def test_bytes_are_those_of_the_formula_up_to_a_block() -> None:
    plain, fast = both((9, 3, 64), torch.bfloat16)
    assert plain.num_bytes == 2 * 2 * SLOTS * 3 * CONTEXT * 64 * 2
    assert fast.num_bytes == 2 * 2 * SLOTS * 3 * 224 * 64 * 2


@pytest.mark.parametrize("head_dim", [8, 12, 20, 24, 40, 72])
def test_a_head_size_without_a_kernel_is_left_to_the_plain_cache(head_dim: int) -> None:
    shape = dataclasses.replace(config(4, 2, 16), head_dim=head_dim)
    assert not is_supported(shape, torch.bfloat16, CPU)
    assert type(kv_cache(shape, kind="fastest")) is KVCache


def test_types_and_devices_without_a_kernel_are_left_to_the_plain_cache() -> None:
    good = config(4, 2, 16)
    assert is_supported(good, torch.bfloat16, CPU)
    assert is_supported(good, torch.float32, CPU)
    assert not is_supported(good, torch.float16, CPU)
    assert not is_supported(good, torch.bfloat16, torch.device("cuda"))
    assert type(kv_cache(good, dtype=torch.float16, kind="fastest")) is KVCache


@DTYPES
def test_threads_that_store_neighbours_at_the_same_time_spoil_nothing(dtype: torch.dtype) -> None:
    """Values 16 positions apart lie in one pair; threads that have one each must not write the other's."""
    numba = pytest.importorskip("numba")
    length = 2 * BLOCK
    fast = kv_cache(config(1, 1, 128), slots=1, max_context=length, dtype=dtype, kind="fastest")
    tokens = packed([[1] * length])
    order = torch.arange(length).view(2, -1).T.flatten()  # the threads, which take a half each, meet in every block
    mixed_up = dataclasses.replace(tokens, positions=order)
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    try:
        for _ in range(300):
            queries, keys, values = (torch.randn(length, 1, 128).to(dtype) for _ in range(3))
            attend(fast, mixed_up, queries, keys, values)
            assert torch.equal(values_of(fast)[0, 0, 0, order], values[:, 0])
            assert torch.equal(keys_of(fast)[0, 0, 0, order], keys[:, 0])
    finally:
        numba.set_num_threads(before)
