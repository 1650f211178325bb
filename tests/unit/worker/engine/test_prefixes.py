"""Prompts' beginnings that are computed once: which are found, and that the engine's texts are the same with them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from factories import drain, engine, row, run
from fakes import VOCAB, HistoryModel, continuation

from headrace.shared.schema import FinishReason
from headrace.worker.engine import generate
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.prefixes import MIN_SHARED, PrefixIndex, Shared
from headrace.worker.engine.rows import NO_SLOT, Row

LONG = [(7 * i) % 61 for i in range(100)]


def in_slot(slot: int, prompt: Sequence[int], num_cached: int | None = None) -> Row:
    """A row that has so much of its prompt computed, all of it unless said otherwise."""
    made = row(f"row {slot}", prompt)
    made.slot = slot
    made.num_cached = len(prompt) if num_cached is None else num_cached
    return made


def index_of(*rows: Row, gone: Sequence[Row] = ()) -> PrefixIndex:
    index = PrefixIndex()
    for each in rows:
        index.put(each)
    for each in gone:
        each.slot = NO_SLOT
    return index


def ready(slot: int, length: int) -> Shared:
    return Shared(slot=slot, length=length, is_ready=True)


# What the index finds


def test_the_longest_beginning_is_found() -> None:
    index = index_of(in_slot(0, LONG[:40] + [1] * 9), in_slot(1, LONG[:70] + [1] * 9), in_slot(2, LONG[:55] + [1] * 9))
    assert index.find(LONG) == ready(1, 70)


def test_a_prompts_last_token_is_never_copied() -> None:
    # The model has to see it for the logits that follow.
    index = index_of(in_slot(0, LONG))
    assert index.find(LONG) == ready(0, 99)
    assert index.find(LONG[:50]) == ready(0, 49)
    assert index.find(LONG[: MIN_SHARED + 1]) == ready(0, MIN_SHARED)
    assert index.find(LONG[:MIN_SHARED]) is None


@pytest.mark.parametrize("length", [0, 1, MIN_SHARED - 1])
def test_a_short_beginning_is_not_worth_copying(length: int) -> None:
    index = index_of(in_slot(0, LONG[:length] + [60] * 50))
    assert index.find(LONG[:length] + [59] * 50) is None


def test_a_gone_rows_beginning_is_used_as_far_as_it_was_computed() -> None:
    rows = in_slot(0, LONG, 60), in_slot(1, LONG, 20)
    index = index_of(*rows, gone=rows)
    assert index.find(LONG) == ready(0, 60)
    few = in_slot(0, LONG, MIN_SHARED - 1)
    assert index_of(few, gone=[few]).find(LONG) is None


def test_a_row_that_is_being_computed_is_worth_waiting_for() -> None:
    gone, live = in_slot(0, LONG, 40), in_slot(1, LONG[:90], 10)
    index = index_of(gone, live, gone=[gone])
    assert index.find(LONG) == Shared(slot=1, length=90, is_ready=False)
    live.num_cached = 66  # what is missing, 24 positions, is less than a quarter of the prompt
    assert index.find(LONG) == ready(1, 66)
    live.num_cached = 65
    assert index.find(LONG) == Shared(slot=1, length=90, is_ready=False)


def test_a_beginning_that_is_too_short_to_copy_is_no_reason_not_to_wait() -> None:
    live = in_slot(0, LONG[:40], MIN_SHARED - 1)
    assert index_of(live).find(LONG[:30]) == Shared(slot=0, length=29, is_ready=False)
    live.num_cached = MIN_SHARED  # which can be copied; the 13 that are missing are too few to wait for
    assert index_of(live).find(LONG[:30]) == ready(0, MIN_SHARED)


def test_a_short_wait_is_not_worth_it() -> None:
    live = in_slot(0, LONG[:32], 16)
    index = index_of(live)
    assert index.find(LONG[:33]) == Shared(slot=0, length=32, is_ready=False)
    live.num_cached = 17
    assert index.find(LONG[:33]) == ready(0, 17)  # 15 more would come
    live.num_cached = 10
    assert index.find(LONG[:16]) is None  # neither what is there nor what would come: 15, without the last token


def test_nobody_waits_for_a_row_that_is_gone() -> None:
    gone = in_slot(0, LONG, 20)
    assert index_of(gone, gone=[gone]).find(LONG) == ready(0, 20)


def test_a_slot_that_another_row_has_got_or_that_was_wiped_is_not_used() -> None:
    first = in_slot(0, LONG)
    index = index_of(first, gone=[first])
    index.put(in_slot(0, [60] * 30))
    assert index.find(LONG) is None
    assert index.find([60] * 25) == ready(0, 24)
    index.forget(0)
    assert index.find([60] * 25) is None
    index.forget(0)  # nothing is there any more, and that is fine
    index.put(in_slot(0, [1]))  # too short to be of use, but what was there is gone all the same
    assert index.find(LONG) is None


def longest_by_trying(rows: dict[int, Row], prompt: list[int]) -> tuple[int, int]:
    """How many positions are worth copying, and how many could be later: token by token over all slots.

    Prompts that have less than MIN_SHARED in common are not looked at.
    """
    ready, coming = 0, 0
    for slot, each in rows.items():
        common = 0
        while common < len(prompt) - 1 and common < len(each.prompt_ids) and each.prompt_ids[common] == prompt[common]:
            common += 1
        if each.prompt_ids[:MIN_SHARED] != prompt[:MIN_SHARED]:
            continue
        ready = max(ready, min(common, each.num_cached))
        if each.slot == slot:
            coming = max(coming, common)
    return ready if ready >= MIN_SHARED else 0, coming


@pytest.mark.parametrize("seed", range(5))
def test_random_prompts_get_the_longest_beginning_that_there_is(seed: int) -> None:
    generator = random.Random(seed)
    roots = [[generator.randrange(2) for _ in range(100)] for _ in range(3)]

    def prompt() -> list[int]:
        beginning = generator.choice(roots)[: generator.randrange(100)]
        return [*beginning, *(generator.randrange(2) for _ in range(generator.randrange(1, 20)))]

    index = PrefixIndex()
    rows: dict[int, Row] = {}
    kinds = {"none": 0, "ready": 0, "coming": 0}
    for _ in range(1500):
        slot, action = generator.randrange(12), generator.random()
        if action < 0.3:
            tokens = prompt()
            rows[slot] = in_slot(slot, tokens, generator.randrange(len(tokens) + 1))
            index.put(rows[slot])
        elif action < 0.35:
            rows.pop(slot, None)
            index.forget(slot)
        elif action < 0.45 and slot in rows:
            rows[slot].slot = NO_SLOT
        elif slot in rows and rows[slot].slot == slot:
            rows[slot].num_cached = generator.randrange(rows[slot].num_cached, len(rows[slot].prompt_ids) + 1)
        wanted = prompt()
        ready, coming = longest_by_trying(rows, wanted)
        found = index.find(wanted)
        if coming - ready >= max(MIN_SHARED, len(wanted) // 4):
            assert found is not None
            assert (found.length, found.is_ready) == (coming, False)
            assert rows[found.slot].slot == found.slot
            kinds["coming"] += 1
        elif ready:
            assert found is not None
            assert (found.length, found.is_ready) == (ready, True)
            assert rows[found.slot].prompt_ids[:ready] == wanted[:ready]
            assert rows[found.slot].num_cached >= ready
            kinds["ready"] += 1
        else:
            assert found is None
            kinds["none"] += 1
    assert min(kinds.values()) > 50, kinds


# What the engine does with it


def rows_alike(count: int, *, beginning: Sequence[int] = LONG) -> list[Row]:
    return [row(str(number), [*beginning, number, number + 1], max_tokens=6 + number % 5) for number in range(count)]


def assert_right(found: dict[str, list[int]], rows: Sequence[Row]) -> None:
    assert found == {each.row_id: continuation(each.prompt_ids, each.stopping.max_tokens) for each in rows}


def test_a_common_beginning_is_computed_once_and_the_others_wait_for_it() -> None:
    model = HistoryModel()
    batch = engine(model)
    rows = rows_alike(4)
    assert_right(run(batch, rows), rows)
    assert model.passes[:2] == [(102, 1), (1 + 3 * 2, 4)]
    assert [each.num_reused for each in rows] == [0, 100, 100, 100]
    assert batch.counts.reused_tokens == 300
    assert batch.counts.prompt_tokens == 102 + 3 * 2


def test_rows_wait_while_a_long_beginning_is_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 20)
    model = HistoryModel()
    batch = engine(model)
    rows = rows_alike(4)
    assert_right(run(batch, rows), rows)
    # From 80 positions on the rest is not worth the wait: 20 of 102.
    assert [tokens for tokens, _ in model.passes[:4]] == [20] * 4
    assert rows[0].num_reused == 0
    assert all(each.num_reused >= 80 for each in rows[1:])
    assert batch.counts.reused_tokens == sum(each.num_reused for each in rows)


def test_rows_of_another_kind_do_not_wait() -> None:
    model = HistoryModel()
    batch = engine(model)
    rows = [row(str(number), [number] * 30, max_tokens=3) for number in range(4)]
    assert_right(run(batch, rows), rows)
    assert model.passes[0] == (120, 4)
    assert batch.counts.reused_tokens == 0


def test_what_a_gone_row_left_is_used_by_the_next() -> None:
    batch = engine(HistoryModel(), slots=2)
    for number in range(5):
        rows = rows_alike(1)
        assert_right(run(batch, rows), rows)
        assert rows[0].num_reused == (101 if number else 0)


def test_a_row_may_get_the_slot_that_it_copies_from() -> None:
    batch = engine(HistoryModel(), slots=1)
    rows = rows_alike(6)
    assert_right(run(batch, rows), rows)
    assert [each.num_reused for each in rows] == [0] + [100] * 5


def test_what_a_slots_next_row_has_overwritten_is_not_used() -> None:
    batch = engine(HistoryModel(), slots=1)
    other = row("other", [60] * 50, max_tokens=60)
    rows = [*rows_alike(1), other, *rows_alike(1)]
    for each in rows:
        assert run(batch, [each])[each.row_id] == continuation(each.prompt_ids, each.stopping.max_tokens)
        assert each.num_reused == 0


def test_a_failed_rows_slot_is_not_used() -> None:
    bad = [*LONG[:50], VOCAB, 3]
    batch = Engine(HistoryModel(poison=[VOCAB]), engine(HistoryModel(), slots=2)._cache)
    failed = row("bad", bad)
    run(batch, [failed])
    assert failed.error is not None
    sound = row("sound", LONG, max_tokens=6)
    assert run(batch, [sound]) == {"sound": continuation(LONG, 6)}
    assert sound.num_reused == 0


@pytest.mark.parametrize("leave", ["cancelled", "dropped"])
def test_rows_that_wait_for_one_that_leaves_go_on_without_it(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 20)
    batch = engine(HistoryModel())
    first, *others = rows_alike(4)
    for each in (first, *others):
        batch.submit(each)
    batch.step()
    batch.step()
    assert (first.num_cached, [each.slot for each in others]) == (40, [NO_SLOT] * 3)
    if leave == "cancelled":
        batch.end(first.row_id, FinishReason.CANCELLED)
    else:
        batch.drop(first.row_id)
    found = {each.row_id: each.token_ids for each in drain(batch) if each is not first}
    assert_right(found, others)


def test_an_interrupted_row_copies_of_its_prompt_only() -> None:
    batch = engine(HistoryModel())
    first = row("first", LONG, max_tokens=9)
    run(batch, [first])
    resumed = row("again", LONG, max_tokens=9, token_ids=first.token_ids[:5])
    assert run(batch, [resumed]) == {"again": first.token_ids}
    assert resumed.num_reused == 99
