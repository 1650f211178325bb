from __future__ import annotations

import random
from collections import deque

import pytest
from factories import row

from headrace.worker.engine.rows import Row
from headrace.worker.engine.scheduler import PAD_MULTIPLE, padded_length, take_newcomers


def queue(*lengths: int) -> deque[Row]:
    return deque(row(str(index), [1] * length) for index, length in enumerate(lengths))


def names(groups: list[list[Row]]) -> list[list[str]]:
    return [[each.row_id for each in group] for group in groups]


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 32), (31, 32), (32, 32), (33, 64), (64, 64), (65, 96), (97, 100), (99, 100)]
)
def test_a_prompt_is_padded_to_a_multiple_within_the_context(length: int, expected: int) -> None:
    assert padded_length(length, 100) == expected


def test_prompts_of_like_lengths_are_grouped_in_order_of_arrival() -> None:
    waiting = queue(5, 40, 32, 64, 1, 33, 70)
    assert names(take_newcomers(waiting, 6, 10_000, 256)) == [["0", "2", "4"], ["1", "3", "5"]]
    assert [each.row_id for each in waiting] == ["6"]


def test_nothing_is_taken_without_a_free_slot() -> None:
    waiting = queue(5, 5)
    assert take_newcomers(waiting, 0, 10_000, 256) == []
    assert len(waiting) == 2


def test_padded_tokens_stay_within_the_budget_and_nobody_is_overtaken() -> None:
    waiting = queue(30, 60, 60, 1)
    assert names(take_newcomers(waiting, 8, 127, 256)) == [["0"], ["1"]]
    assert [each.row_id for each in waiting] == ["2", "3"]


def test_a_prompt_over_the_budget_is_taken_alone() -> None:
    waiting = queue(200, 1)
    assert names(take_newcomers(waiting, 8, 128, 256)) == [["0"]]
    assert names(take_newcomers(waiting, 8, 128, 256)) == [["1"]]


def test_random_queues_are_taken_from_the_front_within_both_limits() -> None:
    generator = random.Random(2)
    for _ in range(300):
        lengths = [generator.randrange(1, 250) for _ in range(generator.randrange(12))]
        waiting = queue(*lengths)
        free, budget = generator.randrange(6), generator.randrange(1, 600)
        groups = take_newcomers(waiting, free, budget, 256)
        taken = sorted(int(name) for group in names(groups) for name in group)
        assert taken == list(range(len(taken)))
        assert [int(each.row_id) for each in waiting] == list(range(len(taken), len(lengths)))
        costs = [-(-length // PAD_MULTIPLE) * PAD_MULTIPLE for length in lengths]
        assert len(taken) <= free
        assert sum(costs[: len(taken)]) <= budget or len(taken) == 1
        if len(taken) < min(free, len(lengths)):
            assert taken, "a free slot and a waiting row, but nothing was taken"
            assert sum(costs[: len(taken) + 1]) > budget
        for group in groups:
            assert len({-(-len(each.prompt_ids) // PAD_MULTIPLE) for each in group}) == 1
