from __future__ import annotations

import random

import torch
from factories import CPU, row

from headrace.worker.engine.packing import pack
from headrace.worker.engine.rows import Row


def at(slot: int, num_cached: int, prompt: list[int], answer: list[int] | None = None) -> Row:
    """A row in a slot, with its first tokens computed."""
    made = row(str(slot), prompt, token_ids=answer or [])
    made.slot, made.num_cached = slot, num_cached
    return made


def test_each_token_has_its_rows_slot_and_its_position() -> None:
    rows = [at(3, 0, [5, 6, 7]), at(0, 2, [8, 9], [10]), at(2, 1, [11, 12, 13, 14])]
    tokens = pack([(rows[0], 3), (rows[1], 1), (rows[2], 2)], CPU)
    assert tokens.token_ids.tolist() == [5, 6, 7, 10, 12, 13]
    assert tokens.slots.tolist() == [3, 3, 3, 0, 2, 2]
    assert tokens.positions.tolist() == [0, 1, 2, 2, 1, 2]
    assert tokens.longest == 3


def test_only_rows_that_become_complete_have_their_last_token_wanted() -> None:
    rows = [at(0, 0, [1, 2, 3]), at(1, 0, [1, 2, 3]), at(2, 1, [4], [5]), at(3, 1, [4], [5, 6])]
    assert pack([(rows[0], 2), (rows[1], 3), (rows[2], 1), (rows[3], 1)], CPU).last.tolist() == [4, 5]


def test_a_pass_may_complete_no_row() -> None:
    tokens = pack([(at(0, 0, [1, 2, 3]), 2)], CPU)
    assert (tokens.last.shape, tokens.last.dtype) == ((0,), torch.int64)
    assert tokens.longest == 2


def test_an_interrupted_rows_tokens_follow_its_prompt_across_the_border() -> None:
    resumed = at(1, 1, [1, 2, 3], [4, 5])
    assert pack([(resumed, 4)], CPU).token_ids.tolist() == [2, 3, 4, 5]
    assert pack([(resumed, 1)], CPU).token_ids.tolist() == [2]
    resumed.num_cached = 3
    assert pack([(resumed, 2)], CPU).token_ids.tolist() == [4, 5]


def test_random_rows_are_packed_as_their_tokens_say() -> None:
    generator = random.Random(3)
    for _ in range(200):
        shares, expected, last = [], [], []
        for slot in generator.sample(range(9), generator.randrange(1, 9)):
            whole = [generator.randrange(99) for _ in range(generator.randrange(1, 40))]
            prompt = generator.randrange(1, len(whole) + 1)
            start = generator.randrange(len(whole))
            count = generator.randrange(1, len(whole) - start + 1)
            shares.append((at(slot, start, whole[:prompt], whole[prompt:]), count))
            expected += [(whole[position], slot, position) for position in range(start, start + count)]
            last += [len(expected) - 1] if start + count == len(whole) else []
        tokens = pack(shares, CPU)
        columns = tokens.token_ids.tolist(), tokens.slots.tolist(), tokens.positions.tolist()
        assert list(zip(*columns, strict=True)) == expected
        assert tokens.last.tolist() == last
        assert tokens.longest == max(position for _, _, position in expected) + 1
