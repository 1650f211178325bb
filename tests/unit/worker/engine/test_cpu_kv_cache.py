"""The CPU's cache and kernel against the plain ones, and row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.cpu_kv_cache import CpuKVCache, is_supported
from headrace.worker.engine.kv_cache import KVCache

SLOTS = 6
CONTEXT = 200
CPU = torch.device("cpu")
SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 8)]


def config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=CONTEXT,
        norm_eps=1e-5,
        rope_theta=1e4,
    )


def both(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[KVCache, CpuKVCache]:
    plain = KVCache(config(*shape), num_slots=SLOTS, max_context=CONTEXT, dtype=dtype, device=CPU)
    return plain, CpuKVCache(config(*shape), num_slots=SLOTS, max_context=CONTEXT, dtype=dtype)


def fill(cache: KVCache, shape: tuple[int, int, int], lengths: list[int]) -> None:
    """Prompts one shorter than `lengths`, then a step for each, the same for equal arguments."""
    generator = torch.Generator().manual_seed(1)
    _, kv_heads, head_dim = shape

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(cache.keys.dtype)

    for layer in range(2):
        prompts = random(2, len(lengths), max(lengths), kv_heads, head_dim)
        cache.write_prompts(layer, 0, *prompts)
        cache.write_step(layer, torch.tensor(lengths) - 1, *random(2, len(lengths), kv_heads, head_dim))
    for slot, length in enumerate(lengths):
        cache.commit(slot, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_attends_as_the_plain_cache_does(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [1, 15, 16, 17, 130, CONTEXT]
    plain, fast = both(shape, dtype)
    queries = torch.randn(SLOTS, shape[0], shape[2]).to(dtype)
    for cache in (plain, fast):
        fill(cache, shape, lengths)
    for layer in range(2):
        expected = plain.attend(layer, queries, torch.tensor(lengths), CONTEXT)
        found = fast.attend(layer, queries, torch.tensor(lengths), CONTEXT)
        assert found.dtype == dtype
        tolerance = 2e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_the_kernel_matches_a_softmax_in_float64() -> None:
    shape = (4, 2, 16)
    _, fast = both(shape, torch.float32)
    lengths = [3, 40, 77, 100, 150, 200]
    fill(fast, shape, lengths)
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(SLOTS, 4, 16, generator=generator) * 20  # sharp, so that exp is tried over its whole range
    keys = fast.keys[0].permute(0, 1, 2, 4, 3).reshape(SLOTS, 2, -1, 16)
    found = fast.attend(0, queries, torch.tensor(lengths), CONTEXT)
    for row, length in enumerate(lengths):
        for head in range(4):
            k, v = keys[row, head // 2, :length].double(), fast.values[0, row, head // 2, :length].double()
            weights = (k @ queries[row, head].double() / 4).softmax(dim=0)
            # Scores of up to 100 are 8e-6 apart in float32.
            torch.testing.assert_close(found[row, head].double(), weights @ v, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_attention_is_the_same_to_the_bit_wherever_it_stands(dtype: torch.dtype) -> None:
    shape = (9, 3, 64)
    lengths = [5, 150, 33, 16, 199, 80]
    _, fast = both(shape, dtype)
    fill(fast, shape, lengths)
    queries = torch.randn(SLOTS, 9, 64).to(dtype)
    together = fast.attend(1, queries, torch.tensor(lengths), CONTEXT)
    assert torch.equal(fast.attend(1, queries[:1], torch.tensor(lengths[:1]), 5)[0], together[0])
    fast.move(4, 1)
    moved = fast.attend(1, queries[[0, 4]], torch.tensor([5, 199]), CONTEXT)
    assert torch.equal(moved, together[[0, 4]])


def test_what_lies_beyond_a_rows_end_has_no_part_in_it() -> None:
    shape = (4, 2, 16)
    _, fast = both(shape, torch.bfloat16)
    fill(fast, shape, [100] * SLOTS)
    queries = torch.randn(SLOTS, 4, 16).bfloat16()
    before = fast.attend(0, queries, torch.full((SLOTS,), 50), 50)
    fast.values[0, :, :, 64:] = torch.nan
    fast.values[0, :, :, 50:64] = 1e30
    fast.keys[0, :, :, 4:] = torch.nan
    assert torch.equal(fast.attend(0, queries, torch.full((SLOTS,), 50), 50), before)


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
    assert fast.num_bytes == 2 * 2 * SLOTS * 3 * 208 * 64 * 2


def test_shapes_and_types_without_a_kernel_are_left_to_the_plain_cache() -> None:
    good = config(4, 2, 16)
    assert is_supported(good, torch.bfloat16, CPU)
    assert not is_supported(good, torch.float16, CPU)
    assert not is_supported(good, torch.bfloat16, torch.device("cuda"))
    assert not is_supported(dataclasses.replace(good, head_dim=12), torch.bfloat16, CPU)
