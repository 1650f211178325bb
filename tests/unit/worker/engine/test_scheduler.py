from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from factories import row

from headrace.worker.engine.rows import Row
from headrace.worker.engine.scheduler import share_out, split


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


def parts_of(rows: Sequence[Row], cores: int, max_prompt_tokens: int = 10_000) -> list[list[tuple[str, int]]]:
    parts = split(share_out(rows, max_prompt_tokens), cores)
    return [[(each.row_id, count) for each, count in part] for part in parts]


@pytest.mark.parametrize(
    ("num_rows", "cores", "num_parts"),
    [
        (1, 2, 1),
        (63, 2, 1),
        (64, 2, 2),
        (1000, 2, 2),
        (1000, 1, 1),
        (255, 8, 1),
        (256, 8, 2),
        (400, 8, 3),
        (9999, 8, 8),
    ],
)
def test_a_pass_has_as_many_parts_as_are_worth_while(num_rows: int, cores: int, num_parts: int) -> None:
    parts = parts_of(with_pending(*[1] * num_rows), cores)
    assert len(parts) == num_parts
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_every_share_is_in_one_part_and_parts_have_about_as_many_tokens() -> None:
    generator = random.Random(3)
    split_up = 0
    for _ in range(300):
        number = generator.randrange(1, 300)
        rows = with_pending(*(generator.choice([1, 1, 1, generator.randrange(2, 200)]) for _ in range(number)))
        cores, budget = generator.randrange(1, 6), generator.randrange(1, 2000)
        parts = parts_of(rows, cores, budget)
        assert sorted(share for part in parts for share in part) == sorted(shares(rows, budget))
        sizes = [sum(count for _, count in part) for part in parts]
        assert max(sizes) <= 1.2 * sum(sizes) / len(sizes)
        split_up += len(parts) > 1
    assert split_up > 100


def test_parts_of_as_many_tokens_have_as_much_to_look_back_at() -> None:
    rows = with_pending(*[1] * 64)
    for index, each in enumerate(rows):
        each.prompt_ids = [1] * (10 + 10 * index)
        each.num_cached = each.length - 1
    parts = split(share_out(rows, 0), 2)
    first, second = (sum(each.num_cached for each, _ in part) for part in parts)
    assert abs(first - second) <= 10


def test_one_long_prompt_keeps_all_cores_at_work_on_it() -> None:
    assert parts_of(with_pending(1000), 2) == [[("0", 1000)]]
    assert len(parts_of(with_pending(1000, *[1] * 100), 2)) == 1
    assert len(parts_of(with_pending(1000, 900), 2)) == 2


def test_parts_stay_as_they_are_while_the_same_rows_decode() -> None:
    rows = with_pending(*[1] * 100)
    generator = random.Random(4)
    for each in rows:
        each.prompt_ids = [1] * generator.randrange(5, 300)
        each.num_cached = each.length - 1
    before = parts_of(rows, 2)
    for _ in range(20):
        for each in rows:
            each.token_ids.append(1)
            each.num_cached += 1
        assert parts_of(rows, 2) == before
