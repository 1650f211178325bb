from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from factories import row

from headrace.worker.engine.rows import Row
from headrace.worker.engine.scheduler import share_out


def with_pending(*pending: int) -> list[Row]:
    """Rows that have so many tokens left to compute: one each that decodes, and more of newcomers."""
    rows = [row(str(index), [1] * max(7, number)) for index, number in enumerate(pending)]
    for each, number in zip(rows, pending, strict=True):
        each.num_cached = each.length - number
    return rows


def shares(rows: Sequence[Row], max_prompt_tokens: int) -> list[tuple[str, int]]:
    return [(each.row_id, count) for each, count in share_out(rows, max_prompt_tokens)]


def test_rows_that_decode_come_first_then_newcomers_in_order_of_arrival() -> None:
    rows = with_pending(30, 1, 20, 1)
    assert shares(rows, 1000) == [("1", 1), ("3", 1), ("0", 30), ("2", 20)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, [("1", 1), ("0", 1)]),
        (30, [("1", 1), ("0", 30)]),
        (31, [("1", 1), ("0", 30), ("2", 1)]),
        (50, [("1", 1), ("0", 30), ("2", 20)]),
        (51, [("1", 1), ("0", 30), ("2", 20), ("3", 1)]),
    ],
)
def test_prompts_are_cut_at_the_budget_and_nobody_is_overtaken(budget: int, expected: list[tuple[str, int]]) -> None:
    assert shares(with_pending(30, 1, 20, 5), budget) == expected


def test_rows_that_decode_do_not_take_of_the_budget() -> None:
    assert shares(with_pending(*[1] * 20, 9), 8) == [*((str(index), 1) for index in range(20)), ("20", 8)]


def test_an_interrupted_rows_tokens_are_shared_out_with_its_prompt() -> None:
    resumed = row("a", [1] * 5, token_ids=[2] * 4)
    assert shares([resumed], 100) == [("a", 9)]
    resumed.num_cached = 6
    assert shares([resumed], 2) == [("a", 2)]


def test_random_rows_are_served_within_the_budget_as_if_token_by_token() -> None:
    generator = random.Random(2)
    for _ in range(500):
        rows = with_pending(
            *(generator.choice([1, 1, generator.randrange(2, 60)]) for _ in range(generator.randrange(12)))
        )
        budget = generator.randrange(1, 150)
        given = {each.row_id: 0 for each in rows}
        for each in rows:
            if each.num_pending == 1:
                given[each.row_id] = 1
        for _ in range(budget):  # each prompt token goes to the first newcomer that can take one more
            for each in rows:
                if each.num_pending > 1 and given[each.row_id] < each.num_pending:
                    given[each.row_id] += 1
                    break
        found = shares(rows, budget)
        assert dict(found) == {row_id: count for row_id, count in given.items() if count}
        assert len(found) == len(dict(found))
        order = [next(each for each in rows if each.row_id == row_id) for row_id, _ in found]
        assert order == sorted(order, key=lambda each: (each.num_pending > 1, int(each.row_id)))
