from __future__ import annotations

import math

import pytest
import torch
from factories import drain, engine, row
from fakes import VOCAB, HistoryModel, continuation

from headrace.worker.bisection import isolate, works
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.rows import Row

BAD = VOCAB  # no row generates it


class RaisesAtBad(HistoryModel):
    """A pass raises if one of its rows has BAD in its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0

    def forward(self, tokens: PackedTokens, cache: KVCache) -> torch.Tensor:
        self.num_passes += 1
        if (tokens.token_ids == BAD).any():
            raise RuntimeError("bad row")
        return super().forward(tokens, cache)


def rows(count: int, bad: set[int]) -> list[Row]:
    return [row(str(i), [BAD, i] if i in bad else [1, i], max_tokens=20) for i in range(count)]


@pytest.mark.parametrize("bad", [set(), {0}, {31}, {3, 4}, {0, 7, 13, 31}])
def test_the_rows_that_fail_are_found_and_the_others_go_on_as_if_nothing_had_been(bad: set[int]) -> None:
    model = RaisesAtBad()
    batch = engine(model, slots=32)
    live = rows(32, bad)
    found = isolate(batch, batch.step, live)
    assert {each.row_id for each, _ in found.culprits} == {str(i) for i in bad}
    assert all(str(error) == "bad row" for _, error in found.culprits)
    assert model.num_passes <= 1 + 2 * len(bad) * math.log2(32)
    for each in found.rest:
        batch.submit(each)
    done = drain(batch)
    assert {each.row_id: each.token_ids for each in done} == {
        str(i): continuation([1, i], 20) for i in range(32) if i not in bad
    }


def test_suspects_are_tried_alone_first() -> None:
    model = RaisesAtBad()
    batch = engine(model, slots=32)
    found = isolate(batch, batch.step, rows(32, {5}), suspects=frozenset({"5", "6"}))
    assert [each.row_id for each, _ in found.culprits] == ["5"]
    assert model.num_passes == 3  # each of the two, and the rest


def test_rows_that_end_during_the_search_are_done() -> None:
    batch = engine(RaisesAtBad())
    short = row("short", [1, 2], max_tokens=1)
    found = isolate(batch, batch.step, [short, row("bad", [BAD])])
    assert found.done == [short]
    assert short.token_ids == continuation([1, 2], 1)
    assert found.rest == []


def test_more_rows_than_one_step_admits_are_all_tried() -> None:
    batch = engine(RaisesAtBad(), slots=64)
    found = isolate(batch, batch.step, [row(str(i), [1] * 100, max_tokens=20) for i in range(64)])
    assert len(found.rest) == 64
    assert all(each.token_ids for each in found.rest)


@pytest.mark.parametrize("place", [0, 30, 2499])
def test_a_row_that_fails_in_any_part_of_a_long_prompt_is_found(place: int) -> None:
    batch = engine(RaisesAtBad(), slots=2, max_context=3000)
    prompt = [1] * 2500
    prompt[place] = BAD
    found = isolate(batch, batch.step, [row("bad", prompt), row("a", [2] * 2500), row("b", [3]), row("c", [4])])
    assert [each.row_id for each, _ in found.culprits] == ["bad"]
    assert sorted(each.row_id for each in found.rest) == ["a", "b", "c"]


def test_an_engine_works_or_says_why_not() -> None:
    batch = engine(RaisesAtBad())
    assert works(batch, batch.step) is None
    assert batch.num_rows == 0

    def broken() -> list[Row]:
        raise RuntimeError("gone")

    assert str(works(batch, broken)) == "gone"
    assert batch.num_rows == 0
