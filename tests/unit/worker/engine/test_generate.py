from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factories import drain, engine, kv_cache, row, run, stop_strings
from fakes import VOCAB, ConstantModel, FakeClock, HistoryModel, continuation

from headrace.shared.schema import FinishReason
from headrace.worker.engine import generate
from headrace.worker.engine.generate import MAX_OVERTAKEN, Engine
from headrace.worker.engine.rows import Row, suppress_early_stops
from headrace.worker.engine.stopping import Finish


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(generate, "now_s", fake)
    return fake


def fails_at(number: int) -> Callable[[int], None]:
    """Raises at the pass of that number, counted from one."""

    def check(this: int) -> None:
        if this == number:
            raise RuntimeError("out of memory")

    return check


COMMON = [token_id * 7 % VOCAB for token_id in range(80)]


def random_row(generator: random.Random, name: str) -> Row:
    sampled = generator.random() < 0.5
    beginning = COMMON[: generator.choice([0, 0, 20, 40, 80])]  # some prompts begin alike
    return row(
        name,
        beginning + [generator.randrange(VOCAB) for _ in range(generator.choice([1, 5, 31, 32, 33, 70]))],
        max_tokens=generator.choice([1, 2, 3, 10, 40]),
        temperature=generator.choice([0.7, 1.5]) if sampled else 0.0,
        top_k=generator.choice([0, 5]),
        top_p=generator.choice([1.0, 0.9]),
        eos_ids=frozenset({generator.randrange(VOCAB)}),
    )


def test_a_row_is_continued_from_its_own_tokens() -> None:
    assert run(engine(HistoryModel()), [row("a", [5, 6], max_tokens=20)]) == {"a": continuation([5, 6], 20)}


def test_rows_of_all_lengths_are_each_continued_from_their_own_tokens() -> None:
    generator = random.Random(1)
    prompts = {str(i): [generator.randrange(VOCAB) for _ in range(1 + 9 * i)] for i in range(12)}
    rows = [row(name, prompt, max_tokens=3 + len(prompt) % 17) for name, prompt in prompts.items()]
    found = run(engine(HistoryModel(), slots=5), rows)
    assert found == {each.row_id: continuation(each.prompt_ids, each.stopping.max_tokens) for each in rows}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("at_once", [9, 100, 1024], ids=lambda tokens: f"{tokens} prompt tokens")
def test_rows_that_come_and_go_at_random_get_what_they_get_alone(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    rows = [random_row(generator, str(number)) for number in range(30)]
    alone = {each.row_id: run(engine(HistoryModel(), slots=1), [fresh(each)])[each.row_id] for each in rows}
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", at_once)
    batch = engine(HistoryModel(), slots=generator.choice([2, 3, 7]))
    coming, done, cancelled = list(rows), [], {}
    while coming or batch.num_rows:
        for _ in range(min(len(coming), generator.choice([0, 0, 1, 4]))):
            batch.submit(coming.pop())
        done += batch.step()
        here = [each for each in rows if each not in coming and each not in done and each.row_id not in cancelled]
        if here and generator.random() < 0.1:
            victim = generator.choice(here)
            cancelled[victim.row_id] = len(victim.token_ids)
            assert batch.end(victim.row_id, FinishReason.CANCELLED)
    assert sorted(each.row_id for each in done) == sorted(alone)
    for each in done:
        length = cancelled.get(each.row_id, len(alone[each.row_id]))
        assert each.token_ids == alone[each.row_id][:length]
        assert (each.finish == Finish(reason=FinishReason.CANCELLED)) is (each.row_id in cancelled)
    assert batch.counts.reused_tokens > 0


def fresh(each: Row, **changes: Any) -> Row:
    return Row(
        row_id=each.row_id, prompt_ids=each.prompt_ids, sampling=each.sampling, stopping=each.stopping, **changes
    )


@pytest.mark.parametrize("at", [1, 4, 9, 19])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_a_row_that_comes_with_tokens_goes_on_as_if_it_had_not_stopped(at: int, sampling: dict[str, Any]) -> None:
    whole = run(engine(HistoryModel()), [row("a", [5, 6], max_tokens=20, **sampling)])["a"]
    assert (whole != continuation([5, 6], 20)) is bool(sampling)
    batch = engine(HistoryModel())
    assert run(batch, [row("a", [5, 6], max_tokens=20, token_ids=whole[:at], **sampling)]) == {"a": whole}
    assert batch.counts.row_steps == 20 - at  # max_tokens counts those that it came with


@pytest.mark.parametrize("after", [1, 3, 12])
def test_rows_of_a_failed_batch_are_resumed_by_another(after: int) -> None:
    generator = random.Random(after)
    rows = [random_row(generator, str(number)) for number in range(12)]
    expected = {each.row_id: run(engine(HistoryModel(), slots=1), [fresh(each)])[each.row_id] for each in rows}
    batch = engine(HistoryModel(fail_at=fails_at(after + 1)), slots=5)
    for each in rows:
        batch.submit(each)
    done = [each for _ in range(after) for each in batch.step()]
    with pytest.raises(RuntimeError):
        batch.step()
    rest = batch.drop_all()
    assert any(each.token_ids for each in rest)
    resumed = run(engine(HistoryModel(), slots=3), [fresh(each, token_ids=list(each.token_ids)) for each in rest])
    assert {each.row_id: each.token_ids for each in done} | resumed == expected


def test_a_finished_row_is_returned_by_the_step_that_finished_it() -> None:
    batch = engine(HistoryModel())
    for name, length in (("a", 1), ("b", 3), ("c", 2), ("d", 3)):
        batch.submit(row(name, max_tokens=length))
    assert [sorted(each.row_id for each in batch.step()) for _ in range(4)] == [["a"], ["c"], ["b", "d"], []]
    assert batch.num_rows == 0


def test_a_freed_slot_is_refilled_while_the_others_go_on() -> None:
    model = HistoryModel()
    batch = engine(model, slots=2)
    for name, length in (("long", 20), ("a", 2), ("b", 3), ("c", 4)):
        batch.submit(row(name, max_tokens=length))
    finished = {each.row_id: step for step in range(30) for each in batch.step()}
    # Each short row begins in the step after the one that freed the slot.
    assert finished == {"a": 1, "b": 4, "c": 8, "long": 19}
    assert [wanted for _, wanted in model.passes] == [2] * 9 + [1] * 11


def test_no_step_is_spent_on_a_finished_row() -> None:
    model = HistoryModel()
    batch = engine(model, slots=3)
    generator = random.Random(4)
    rows = [row(str(i), max_tokens=generator.randrange(1, 12)) for i in range(25)]
    tokens = run(batch, rows)
    total = sum(map(len, tokens.values()))
    assert total == sum(each.stopping.max_tokens for each in rows)
    assert sum(wanted for _, wanted in model.passes) == batch.counts.row_steps == total
    assert len(model.passes) == batch.counts.steps


@pytest.mark.parametrize("at_once", [1, 7, 10, 1024])
def test_the_counts_say_what_went_through_the_model(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", at_once)
    model = HistoryModel()
    batch = engine(model, slots=2)
    alike = [2] * 20
    prompts = {"a": [1] * 10, "b": [1] * 33, "one": [3], "c": [*alike, 1], "d": [*alike, 1], "e": [*alike, 1, 4, 4]}
    run(batch, [row(name, prompt, max_tokens=5) for name, prompt in prompts.items()])
    assert batch.counts.reused_tokens == 20 + 21  # all but the last token of "d", all that "c" or "d" has of "e"
    assert batch.counts.prompt_tokens == sum(map(len, prompts.values())) - batch.counts.reused_tokens
    assert batch.counts.row_steps == 5 * len(prompts)
    # Each token but a row's last goes through the model, once.
    assert sum(tokens for tokens, _ in model.passes) == batch.counts.prompt_tokens + 4 * len(prompts)


def test_an_interrupted_rows_tokens_are_computed_anew_and_counted() -> None:
    batch = engine(HistoryModel())
    run(batch, [row("a", [5] * 30, max_tokens=9, token_ids=continuation([5] * 30, 6))])
    assert (batch.counts.prompt_tokens, batch.counts.row_steps) == (36, 3)


def test_rows_of_a_step_lie_side_by_side_without_padding() -> None:
    model = HistoryModel()
    batch = engine(model)
    for name, prompt in (("a", [1] * 5), ("b", [2] * 33), ("c", [3])):
        batch.submit(row(name, prompt, max_tokens=3))
    batch.step()
    batch.submit(row("d", [4] * 7, max_tokens=1))
    batch.step()
    assert model.passes == [(39, 3), (3 + 7, 4)]


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_live_rows_get_a_token_in_every_pass_while_a_long_prompt_is_computed(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", at_once)
    model = HistoryModel()
    batch = engine(model)
    live = [row(name, [number], max_tokens=200) for number, name in enumerate("ab")]
    for each in live:
        batch.submit(each)
    batch.step()
    batch.step()
    long = row("long", [9] * 150, max_tokens=5)
    batch.submit(long)
    passes = -(-150 // at_once)
    for number in range(passes):
        assert long.token_ids == []
        before = [len(each.token_ids) for each in live]
        batch.step()
        assert [len(each.token_ids) for each in live] == [length + 1 for length in before]
        assert model.passes[-1][0] == 2 + min(at_once, 150 - number * at_once)
    assert long.token_ids == continuation([9] * 150, 1)
    assert {each.row_id: each.token_ids for each in drain(batch)}["long"] == continuation([9] * 150, 5)


def test_prompts_are_spread_over_steps_so_that_live_rows_go_on() -> None:
    model = HistoryModel()
    batch = engine(model, slots=30)
    for number in range(30):
        batch.submit(row(str(number), [number] * 200, max_tokens=50))
    batch.step()
    # Six rows are begun and five of them complete; the budget is spent to the last token.
    assert model.passes == [(generate.MAX_PROMPT_TOKENS, 5)]
    batch.step()
    assert model.passes[1] == (5 + generate.MAX_PROMPT_TOKENS, 10)


def test_a_row_may_fill_the_context_to_its_last_position() -> None:
    prompts = {"one left": [3] * 63, "two left": [4] * 62, "none but the prompt's": [5] * 32}
    rows = [row(name, prompt, max_tokens=64 - len(prompt)) for name, prompt in prompts.items()]
    found = run(engine(HistoryModel(), max_context=64), rows)
    assert found == {name: continuation(prompt, 64 - len(prompt)) for name, prompt in prompts.items()}


@pytest.mark.parametrize("length", [0, 64])
def test_a_prompt_that_leaves_no_position_is_not_taken(length: int) -> None:
    with pytest.raises(AssertionError):
        engine(HistoryModel(), max_context=64).submit(row("a", [1] * length))


# Rows that fail


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_a_row_without_finite_logits_fails_alone_and_leaves_its_slot_clean(slots: int) -> None:
    poison = VOCAB  # no row generates it
    sound = {str(i): [i, i + 1, i + 2] for i in range(10)}
    rows = [row(name, prompt, max_tokens=5 + int(name)) for name, prompt in sound.items()]
    for place in (0, 3, 7):
        rows.insert(place, row(f"bad prompt {place}", [poison, 1], max_tokens=5))
    cache = kv_cache(slots=slots)
    batch = Engine(HistoryModel(poison=[poison]), cache)
    found = {each.row_id: each for each in drain_all(batch, rows)}
    for name, prompt in sound.items():
        assert found[name].token_ids == continuation(prompt, 5 + int(name))
        assert found[name].error is None
    for place in (0, 3, 7):
        bad = found[f"bad prompt {place}"]
        assert bad.finish == Finish(reason=FinishReason.ERROR)
        assert bad.token_ids == []
        assert "no finite logits" in str(bad.error)
    assert cache.values.isfinite().all()


def test_a_row_that_fails_on_its_way_keeps_what_it_had() -> None:
    expected = continuation([20], 6)
    poison = expected[3]
    assert poison not in [20, *expected[:3]]
    cache = kv_cache(slots=2)
    batch = Engine(HistoryModel(poison=[poison]), cache)
    rows = [row("bad", [20], max_tokens=10), *(row(str(i), [i], max_tokens=9) for i in range(4))]
    sound = {str(i): continuation([i], 9) for i in range(4)}
    assert not any(poison in [int(name), *tokens] for name, tokens in sound.items())
    found = {each.row_id: each for each in drain_all(batch, rows)}
    assert found.pop("bad").token_ids == expected[:4]
    assert {name: each.token_ids for name, each in found.items()} == sound
    assert cache.values.isfinite().all()


@pytest.mark.parametrize("leave", ["cancelled", "dropped"])
def test_a_row_that_leaves_before_its_prompt_is_complete_leaves_its_slot_clean(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 30)
    cache = kv_cache(slots=1)
    batch = Engine(HistoryModel(poison=[VOCAB]), cache)
    batch.submit(row("bad", [VOCAB] * 50))
    batch.step()
    assert cache.values.isnan().any()  # and no logits that would show it yet
    if leave == "cancelled":
        batch.end("bad", FinishReason.CANCELLED)
        batch.step()
    else:
        batch.drop("bad")
    assert run(batch, [row("next", [3], max_tokens=9)]) == {"next": continuation([3], 9)}


def drain_all(batch: Engine, rows: list[Row]) -> list[Row]:
    for each in rows:
        batch.submit(each)
    return drain(batch)


def test_logits_that_are_all_impossible_fail_the_row() -> None:
    batch = engine(ConstantModel([-torch.inf, 3.0, -torch.inf]))
    suppressed = row("bad", eos_ids=frozenset({1}), min_tokens=2)
    found = {each.row_id: each.finish for each in drain_all(batch, [suppressed, row("good")])}
    assert found == {"bad": Finish(reason=FinishReason.ERROR), "good": Finish(reason=FinishReason.LENGTH)}


# Stopping


def test_eos_and_stop_ids_end_a_row_with_their_token() -> None:
    tokens = continuation([1, 2, 3], 30)
    for at in (0, 1, 4):
        first = tokens.index(tokens[at])
        stopped = row("a", max_tokens=30, stop_ids=frozenset({tokens[at], 10**6}))
        ended = row("b", max_tokens=30, eos_ids=frozenset({tokens[at]}))
        assert run(engine(HistoryModel()), [stopped, ended]) == {"a": tokens[: first + 1], "b": tokens[: first + 1]}
        assert stopped.finish == Finish(reason=FinishReason.STOP, stopped_by=tokens[at])
        assert ended.finish == Finish(reason=FinishReason.STOP)


def test_min_tokens_makes_stop_tokens_impossible_until_then_and_for_that_row_only() -> None:
    logits = [0.0, 9.0, 8.0, 7.0]
    held = row("held", eos_ids=frozenset({1}), stop_ids=frozenset({2, 99}), min_tokens=3)
    free = row("free", eos_ids=frozenset({1}))
    sampled = row("sampled", eos_ids=frozenset({1}), min_tokens=3, temperature=1.0, top_k=2, seed=1)
    found = run(engine(ConstantModel(logits)), [held, free, sampled])
    assert found["held"] == [3, 3, 3, 1]
    assert found["free"] == [1]
    assert 1 not in found["sampled"][:3]


def test_suppressing_a_token_leaves_the_models_logits_alone() -> None:
    logits = torch.randn(3, 5)
    before = logits.clone()
    held = row("held", eos_ids=frozenset({1, 4}), min_tokens=2)
    suppressed = suppress_early_stops(logits, [row("a", eos_ids=frozenset({1})), held, row("b")])
    assert torch.equal(logits, before)
    assert suppressed[1].isneginf().tolist() == [False, True, False, False, True]
    assert torch.equal(suppressed[[0, 2]], before[[0, 2]])


def test_a_stop_string_ends_a_row_and_cuts_its_text() -> None:
    tokens = continuation([1, 2, 3], 10)
    pieces = [f"<{token}>" for token in range(VOCAB)]
    wanted = f"{tokens[3]}><{tokens[4]}"
    stopped = row("a", max_tokens=10, strings=stop_strings(wanted, pieces=pieces))
    assert run(engine(HistoryModel()), [stopped])["a"] == tokens[:5]
    assert stopped.finish == Finish(reason=FinishReason.STOP, stopped_by=wanted)
    assert stopped.strings is not None
    assert stopped.strings.text == "".join(pieces[token] for token in tokens[:3]) + "<"


# Ending from outside


def test_a_cancelled_row_is_returned_with_what_it_has() -> None:
    model = HistoryModel()
    batch = engine(model, slots=1)
    for name in ("live", "waiting", "next"):
        batch.submit(row(name, [7], max_tokens=5))
    batch.step()
    assert batch.end("live", FinishReason.CANCELLED)
    assert batch.end("waiting", FinishReason.CANCELLED)
    done = batch.step()
    assert {each.row_id: each.token_ids for each in done} == {"live": continuation([7], 1), "waiting": []}
    assert {each.finish for each in done} == {Finish(reason=FinishReason.CANCELLED)}
    assert [each.token_ids for each in drain(batch)] == [continuation([7], 5)]
    assert model.passes == [(1, 1)] * (1 + 5)  # the one that waited never reached the model


def test_only_a_row_that_is_here_and_not_done_can_be_ended() -> None:
    batch = engine(HistoryModel())
    batch.submit(row("a"))
    assert not batch.end("b", FinishReason.CANCELLED)
    assert batch.end("a", FinishReason.TIMEOUT)
    assert not batch.end("a", FinishReason.CANCELLED)
    assert [each.finish for each in batch.step()] == [Finish(reason=FinishReason.TIMEOUT)]
    assert not batch.end("a", FinishReason.CANCELLED)


def test_a_row_past_its_deadline_ends_with_what_it_has_live_or_waiting(clock: FakeClock) -> None:
    batch = engine(HistoryModel(), slots=2)
    for name, deadline_s in (("late", 5.0), ("in time", 50.0), ("waits", 5.0), ("free", None)):
        at = None if deadline_s is None else clock.now_s + deadline_s
        batch.submit(row(name, [9], max_tokens=6, deadline_s=at))
    assert batch.step() == []
    clock.advance(5.0)
    assert batch.step() == []  # at the deadline it is not past it
    clock.advance(0.1)
    done = {each.row_id: each for each in batch.step()}
    assert {name: each.finish for name, each in done.items()} == {
        name: Finish(reason=FinishReason.TIMEOUT) for name in ("late", "waits")
    }
    assert {name: each.token_ids for name, each in done.items()} == {"late": continuation([9], 2), "waits": []}
    assert {each.row_id: each.token_ids for each in drain(batch)} == dict.fromkeys(
        ("in time", "free"), continuation([9], 6)
    )


def test_a_row_knows_when_it_was_admitted_got_its_first_token_and_ended(clock: FakeClock) -> None:
    batch = engine(HistoryModel(fail_at=lambda number: clock.advance(2.0 if number in (1, 5) else 1.0)), slots=1)
    first, second = row("a", max_tokens=4), row("b", max_tokens=1)
    run(batch, [first, second])
    assert (first.admitted_at_s, first.first_token_at_s, first.finished_at_s) == (1000.0, 1002.0, 1005.0)
    assert (second.admitted_at_s, second.first_token_at_s, second.finished_at_s) == (1005.0, 1007.0, 1007.0)


def test_a_long_prompts_first_token_is_that_of_its_last_part(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 10)
    batch = engine(HistoryModel(fail_at=lambda number: clock.advance(1.0)))
    long = row("a", [1] * 25, max_tokens=2)
    run(batch, [long])
    assert (long.admitted_at_s, long.first_token_at_s, long.finished_at_s) == (1000.0, 1003.0, 1004.0)


# Dropping


@pytest.mark.parametrize("dropped", ["0", "1", "2", "5"])
def test_a_dropped_row_is_not_returned_and_the_others_go_on(dropped: str) -> None:
    batch = engine(HistoryModel(), slots=3)
    rows = [row(str(i), [i], max_tokens=6) for i in range(7)]
    for each in rows:
        batch.submit(each)
    batch.step()
    batch.drop(dropped)
    batch.drop("unknown")
    assert batch.num_rows == 6
    found = {each.row_id: each.token_ids for each in drain(batch)}
    assert found == {str(i): continuation([i], 6) for i in range(7) if str(i) != dropped}


@pytest.mark.parametrize("cancelled", ["0", "3"])
def test_dropping_a_row_does_not_lose_one_that_was_cancelled(cancelled: str) -> None:
    batch = engine(HistoryModel(), slots=2)
    for number in range(4):
        batch.submit(row(str(number), [number]))
    batch.step()
    batch.end(cancelled, FinishReason.CANCELLED)
    batch.drop("1")
    assert [each.row_id for each in batch.step()] == [cancelled]


def test_waiting_rows_can_be_taken_back_while_the_live_ones_go_on() -> None:
    batch = engine(HistoryModel(), slots=2)
    for number in range(5):
        batch.submit(row(str(number), [number]))
    batch.step()
    assert [each.row_id for each in batch.drop_waiting()] == ["2", "3", "4"]
    assert sorted(each.row_id for each in drain(batch)) == ["0", "1"]


def test_all_rows_can_be_taken_back_and_the_engine_used_again() -> None:
    batch = engine(HistoryModel(), slots=2)
    for number in range(5):
        batch.submit(row(str(number), [number]))
    batch.step()
    assert sorted(each.row_id for each in batch.drop_all()) == ["0", "1", "2", "3", "4"]
    assert batch.num_rows == 0
    assert batch.step() == []
    assert run(batch, [row("again", [8], max_tokens=9)]) == {"again": continuation([8], 9)}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_step_that_fails_loses_no_row(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 30)
    cache = kv_cache(slots=6)
    batch = Engine(HistoryModel(poison=[VOCAB], fail_at=fails_at(number)), cache)
    rows = {
        "short": row("short", [1], max_tokens=9),
        "long": row("long", [1] * 40, max_tokens=9),
        "ends with its prompt": row("ends with its prompt", [2], max_tokens=1),
        "bad": row("bad", [VOCAB]),
        "cancelled": row("cancelled", [3]),
        "more": row("more", [4]),
        "waits": row("waits", [5]),
        "waits too": row("waits too", [1] * 41),
    }
    for each in rows.values():
        batch.submit(each)
    batch.end("cancelled", FinishReason.CANCELLED)
    done = [each.row_id for _ in range(number - 1) for each in batch.step()]
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.step()
    assert batch.num_rows == len(rows) - len(done)
    assert sorted([*done, *(each.row_id for each in batch.drop_all())]) == sorted(rows)
    assert batch.num_rows == 0
    assert cache.values.isfinite().all()
    again = {str(i): [1] * (30 + i) for i in range(6)}  # begin as "long" did, whose slot is not to be used
    found = run(batch, [row(key, prompt, max_tokens=20) for key, prompt in again.items()])
    assert found == {key: continuation(prompt, 20) for key, prompt in again.items()}


def test_a_step_that_fails_keeps_the_rows_that_it_has_taken_out() -> None:
    batch = engine(HistoryModel(fail_at=fails_at(2)), slots=2)
    for name in ("done", "goes on"):
        batch.submit(row(name))
    batch.step()
    batch.end("done", FinishReason.CANCELLED)
    with pytest.raises(RuntimeError):
        batch.step()
    assert batch.num_rows == 2
    assert sorted(each.row_id for each in batch.drop_all()) == ["done", "goes on"]


def test_a_later_step_that_fails_loses_no_row() -> None:
    batch = engine(HistoryModel(fail_at=fails_at(4)), slots=2)
    for number, length in enumerate((3, 9, 9)):
        batch.submit(row(str(number), [number], max_tokens=length))
    done = batch.step() + batch.step() + batch.step()
    assert [each.row_id for each in done] == ["0"]
    with pytest.raises(RuntimeError):
        batch.step()
    assert sorted(each.row_id for each in batch.drop_all()) == ["1", "2"]


def test_a_row_of_a_lower_rank_is_admitted_first_but_none_is_overtaken_for_ever() -> None:
    batch = engine(HistoryModel(), slots=1)
    waiting = row("waiting", rank=1, max_tokens=1)
    batch.submit(waiting)
    urgent = [row(str(number), rank=0, max_tokens=1) for number in range(MAX_OVERTAKEN + 3)]
    for each in urgent:
        batch.submit(each)
    order = [done.row_id for done in drain(batch)]
    first, last = urgent[:MAX_OVERTAKEN], urgent[MAX_OVERTAKEN:]
    assert order == [each.row_id for each in (*first, waiting, *last)]


def test_rows_of_one_rank_are_admitted_in_order() -> None:
    batch = engine(HistoryModel(), slots=1)
    rows = [row(name, rank=rank, max_tokens=1) for name, rank in zip("abcde", (1, 0, 2, 1, 0), strict=True)]
    for each in rows:
        batch.submit(each)
    assert [done.row_id for done in drain(batch)] == ["b", "e", "a", "d", "c"]
