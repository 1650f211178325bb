from __future__ import annotations

from typing import Any

import pytest
import torch
from factories import kv_cache, model_config
from torch import Tensor

from headrace.worker.engine.attention import DECODE_BLOCK, prompt_attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = [1, 2, 15, 16, 17, DECODE_BLOCK - 1, DECODE_BLOCK, DECODE_BLOCK + 1, 2 * DECODE_BLOCK, 300]


def exact(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax attention of one query a head over all keys, in float64: (H, D), two of (T, K, D) -> (H, D)."""
    heads, head_dim = queries.shape
    group = heads // keys.shape[1]
    rows = []
    for head in range(heads):
        key, value = keys[:, head // group].double(), values[:, head // group].double()
        weights = torch.softmax(key @ queries[head].double() / head_dim**0.5, dim=0)
        rows.append(weights @ value)
    return torch.stack(rows)


def filled_cache(kind: str, dtype: torch.dtype, heads: int, kv_heads: int, scale: float) -> tuple[Any, Tensor, Tensor]:
    """A cache of a row a length, and its keys and values: (B, T, K, D)."""
    config = model_config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=16)
    cache = kv_cache(config, slots=len(LENGTHS), max_context=320, dtype=dtype, kind=kind)
    keys, values = (torch.randn(len(LENGTHS), 320, kv_heads, 16).to(dtype) for _ in range(2))
    keys = keys * scale
    cache.write_prompts(0, 0, keys, values)
    return cache, keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["even weights", "one weight above all"])
def test_a_new_token_attends_to_its_own_rows_positions(kind: str, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(1)
    cache, keys, values = filled_cache(kind, dtype, 4, 2, scale)
    queries = torch.randn(len(LENGTHS), 4, 16).to(dtype)
    found = cache.attend(0, queries, torch.tensor(LENGTHS), max(LENGTHS))
    assert found.dtype == dtype
    for row, length in enumerate(LENGTHS):
        expected = exact(queries[row], keys[row, :length], values[row, :length])
        assert (found[row].double() - expected).abs().max() < TOLERANCE[dtype] * max(1, scale / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_attends_alike_in_every_batch_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    cache, _, _ = filled_cache(kind, dtype, 4, 2, 1.0)
    queries, lengths = torch.randn(len(LENGTHS), 4, 16).to(dtype), torch.tensor(LENGTHS)
    whole = cache.attend(0, queries, lengths, max(LENGTHS))
    for count in range(1, len(LENGTHS)):
        part = cache.attend(0, queries[:count], lengths[:count], max(LENGTHS[:count]))
        assert torch.equal(part, whole[:count])


def test_what_lies_beyond_a_rows_end_has_no_weight(kind: str) -> None:
    torch.manual_seed(3)
    cache, keys, values = filled_cache(kind, torch.float32, 4, 2, 1.0)
    queries, lengths = torch.randn(len(LENGTHS), 4, 16), torch.tensor(LENGTHS)
    before = cache.attend(0, queries, lengths, max(LENGTHS))
    for row, length in enumerate(LENGTHS):
        keys[row, length:] = 1e4
        values[row, length:] = -1e4
    cache.write_prompts(0, 0, keys, values)
    assert torch.equal(cache.attend(0, queries, lengths, max(LENGTHS)), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_a_prompts_positions_attend_to_themselves_and_before(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    torch.manual_seed(4)
    queries = torch.randn(3, 40, heads, 16).to(dtype)
    keys, values = (torch.randn(3, 40, kv_heads, 16).to(dtype) for _ in range(2))
    found = prompt_attention(queries, keys, values)
    for row in range(3):
        for position in (0, 1, 20, 39):
            expected = exact(queries[row, position], keys[row, : position + 1], values[row, : position + 1])
            assert (found[row, position].double() - expected).abs().max() < TOLERANCE[dtype]
