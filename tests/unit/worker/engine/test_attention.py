from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from factories import attend, kv_cache, model_config, packed
from torch import Tensor

from headrace.worker.engine.attention import BLOCK
from headrace.worker.engine.kv_cache import KVCache

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 300]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


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


@dataclass(frozen=True)
class Rows:
    """A row a length: its queries, keys and values by position, each a list of (length, heads, D)."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    def attend(self, cache: KVCache, spans: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        """What a pass gives the positions of each of the rows, each (stop - start, H, D)."""
        tokens = packed(
            [[1] * (stop - start) for start, stop in spans.values()],
            slots=list(spans),
            starts=[start for start, _ in spans.values()],
        )
        q, k, v = (
            torch.cat([part[row][start:stop] for row, (start, stop) in spans.items()])
            for part in (self.queries, self.keys, self.values)
        )
        found = attend(cache, tokens, q, k, v)
        assert found.dtype == q.dtype
        return dict(zip(spans, found.split([stop - start for start, stop in spans.values()]), strict=True))


def random_rows(
    dtype: torch.dtype, *, heads: int = 4, kv_heads: int = 2, scale: float = 1.0, seed: int = 1, extra: int = 0
) -> Rows:
    torch.manual_seed(seed)

    def draw(count: int, factor: float = 1.0) -> list[Tensor]:
        return [torch.randn(length + extra, count, 16).to(dtype) * factor for length in LENGTHS]

    return Rows(draw(heads), draw(kv_heads, scale), draw(kv_heads))


def cache_for(kind: str, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> KVCache:
    config = model_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=16)
    return kv_cache(config, slots=len(LENGTHS), max_context=320, dtype=dtype, kind=kind)


WHOLE = {row: (0, length) for row, length in enumerate(LENGTHS)}
LAST = {row: (length - 1, length) for row, length in enumerate(LENGTHS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_a_prompts_positions_attend_to_themselves_and_before(
    kind: str, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    rows = random_rows(dtype, heads=heads, kv_heads=kv_heads)
    found = rows.attend(cache_for(kind, dtype, heads, kv_heads), WHOLE)
    for row, length in enumerate(LENGTHS):
        for position in {0, length // 3, length // 2, length - 1}:
            seen = slice(position + 1)
            expected = exact(rows.queries[row][position], rows.keys[row][seen], rows.values[row][seen])
            assert (found[row][position].double() - expected).abs().max() < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["even weights", "one weight above all"])
def test_a_new_token_attends_to_its_own_rows_positions(kind: str, dtype: torch.dtype, scale: float) -> None:
    rows = random_rows(dtype, scale=scale)
    cache = cache_for(kind, dtype)
    rows.attend(cache, {row: (0, length - 1) for row, length in enumerate(LENGTHS) if length > 1})
    found = rows.attend(cache, LAST)
    # Scores of up to 100 are rounded as far as they are kept: to the type in plain torch, to float32 by the kernels.
    rounding = 1 if kind == "fastest" and dtype is torch.bfloat16 else max(1, scale / 3)
    for row in WHOLE:
        expected = exact(rows.queries[row][-1], rows.keys[row], rows.values[row])
        assert (found[row][0].double() - expected).abs().max() < TOLERANCE[dtype] * rounding


@DTYPES
def test_a_row_attends_alike_in_every_batch_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    rows = random_rows(dtype, seed=2)
    whole = rows.attend(cache_for(kind, dtype), WHOLE)
    for count in range(1, len(LENGTHS)):
        part = rows.attend(cache_for(kind, dtype), {row: WHOLE[row] for row in reversed(range(count))})
        assert all(torch.equal(part[row], whole[row]) for row in range(count))


@DTYPES
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_token_attends_alike_with_the_prompt_or_after_it_bit_for_bit(
    kind: str, dtype: torch.dtype, step: int
) -> None:
    rows = random_rows(dtype, seed=3)
    whole = rows.attend(cache_for(kind, dtype), WHOLE)
    cache = cache_for(kind, dtype)
    parts: dict[int, list[Tensor]] = {row: [] for row in WHOLE}
    for start in range(0, max(LENGTHS), step):
        spans = {row: (start, min(start + step, length)) for row, length in enumerate(LENGTHS) if start < length}
        for row, found in rows.attend(cache, spans).items():
            parts[row].append(found)
    assert all(torch.equal(torch.cat(parts[row]), whole[row]) for row in WHOLE)


def test_what_lies_beyond_a_tokens_position_has_no_weight(kind: str) -> None:
    rows = random_rows(torch.float32, seed=4, extra=20)
    cache = cache_for(kind, torch.float32)
    before = rows.attend(cache, WHOLE)
    for row, length in enumerate(LENGTHS):
        rows.keys[row][length:] = 1e4
        rows.values[row][length:] = -1e4
    rows.attend(cache, {row: (length, length + 20) for row, length in enumerate(LENGTHS)})
    again = rows.attend(cache, LAST)
    assert all(torch.equal(again[row][0], before[row][-1]) for row in WHOLE)
