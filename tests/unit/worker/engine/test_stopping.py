from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from factories import stop_strings
from fakes import ByteStream

from headrace.shared.schema import FinishReason
from headrace.worker.engine.stopping import Finish, StopParams, StopStrings, finish_of


def watch(strings: Sequence[str], pieces: Sequence[str], min_tokens: int = 0) -> tuple[str, str | None, int]:
    """The text, the stop string and the number of tokens after which a row of these pieces of text ends."""
    watched = stop_strings(*strings, pieces=pieces, min_tokens=min_tokens)
    for token_id in range(len(pieces)):
        if (found := watched.match(token_id)) is not None:
            return watched.text, found, token_id + 1
    return watched.text, None, len(pieces)


@pytest.mark.parametrize(
    ("strings", "pieces", "expected"),
    [
        pytest.param(["END"], ["a", "bENDc", "d"], ("ab", "END", 2), id="inside a token"),
        pytest.param(["END"], ["aE", "N", "Db"], ("a", "END", 3), id="across three tokens"),
        pytest.param(["END"], ["END", "x"], ("", "END", 1), id="at the beginning"),
        pytest.param(["END"], ["x", "END"], ("x", "END", 2), id="a token of its own"),
        pytest.param(["END"], ["E", "N", "d", "EN", "EN", "D"], ("ENdEN", "END", 6), id="after false starts"),
        pytest.param(["END"], ["EN", "", "D"], ("", "END", 3), id="across a token without text"),
        pytest.param(["END"], ["E", "N"], ("EN", None, 2), id="never whole"),
        pytest.param(["aab"], ["a", "a", "a", "b"], ("a", "aab", 4), id="overlapping itself"),
        pytest.param(["\n\n"], ["a\n", "\nb"], ("a", "\n\n", 2), id="line breaks"),
        pytest.param(["\n\n", "\n"], ["a\n", "\nb"], ("a", "\n", 1), id="the shorter is whole first"),
        pytest.param(["cd", "bc"], ["abcd"], ("a", "bc", 1), id="the earlier of two in one token"),
        pytest.param(["bcd", "c"], ["a", "b", "cd"], ("a", "bcd", 3), id="the one that begins earlier"),
        pytest.param(["b", "bc"], ["abc"], ("a", "b", 1), id="one that begins another"),
        pytest.param(["日本"], ["x日", "本y"], ("x", "日本", 2), id="multi-byte characters"),
        pytest.param(["🙂"], ["a", "🙂!"], ("a", "🙂", 2), id="outside the basic plane"),
        pytest.param(["END"], ["aend", "End"], ("aendEnd", None, 2), id="letters' case counts"),
        pytest.param([".*"], ["abc", ".*"], ("abc", ".*", 2), id="no pattern"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(
    strings: list[str], pieces: list[str], expected: tuple[str, str | None, int]
) -> None:
    assert watch(strings, pieces) == expected


def test_a_stop_string_is_found_in_a_character_that_comes_byte_by_byte() -> None:
    watched = StopStrings(("é!",), ByteStream().push, 0)
    found = [watched.match(byte) for byte in "caffé! più".encode()[:7]]
    assert found == [None] * 6 + ["é!"]
    assert watched.text == "caff"


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("", "X", 1)), (1, ("X", "X", 2)), (2, ("XX", "X", 3)), (3, ("XXXa", "X", 5)), (5, ("XXXaX", None, 5))],
)
def test_stop_strings_count_only_after_min_tokens(min_tokens: int, expected: tuple[str, str | None, int]) -> None:
    assert watch(["X"], ["X", "X", "X", "a", "X"], min_tokens) == expected


def test_a_stop_string_that_begins_before_min_tokens_does_not_count() -> None:
    assert watch(["END"], ["E", "ND", "END"], min_tokens=1) == ("END", "END", 3)


def brute_force(strings: Sequence[str], pieces: Sequence[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Looks through the whole text after each token."""
    text, free_from = "", 0
    for number, piece in enumerate(pieces, 1):
        text += piece
        if number <= min_tokens:
            free_from = len(text)
            continue
        for at in range(free_from, len(text)):
            for string in sorted(strings):
                if text.startswith(string, at):
                    return text[:at], string, number
    return text, None, len(pieces)


def test_random_texts_end_where_a_search_of_the_whole_text_says() -> None:
    generator = random.Random(11)
    stopped = 0
    for _ in range(3000):
        strings = ["".join(generator.choices("ab", k=generator.randint(1, 6))) for _ in range(generator.randint(1, 3))]
        pieces = ["".join(generator.choices("abc", [5, 5, 1], k=generator.randint(0, 4))) for _ in range(8)]
        min_tokens = generator.choice([0, 0, 1, 3])
        expected = brute_force(strings, pieces, min_tokens)
        assert watch(strings, pieces, min_tokens) == expected, (strings, pieces, min_tokens)
        stopped += expected[1] is not None
    assert 1000 < stopped < 2900


def params(**changes: object) -> StopParams:
    return StopParams(**({"max_tokens": 10, "eos_ids": frozenset({1, 2}), "stop_ids": frozenset({3, 2})} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token_id", "expected"),
    [
        (0, None),
        (1, Finish(reason=FinishReason.STOP)),
        (2, Finish(reason=FinishReason.STOP)),  # EOS goes before a stop id
        (3, Finish(reason=FinishReason.STOP, stopped_by=3)),
    ],
)
def test_any_eos_and_any_stop_id_ends_a_row(token_id: int, expected: Finish | None) -> None:
    assert finish_of(params(), 1, token_id, None) == expected
    assert finish_of(params(), 9, token_id, None) == expected


def test_a_row_ends_at_max_tokens() -> None:
    assert finish_of(params(), 9, 0, None) is None
    assert finish_of(params(), 10, 0, None) == Finish(reason=FinishReason.LENGTH)
    assert finish_of(params(max_tokens=1), 1, 0, None) == Finish(reason=FinishReason.LENGTH)


def test_a_stop_that_falls_on_the_last_token_is_a_stop() -> None:
    assert finish_of(params(max_tokens=1), 1, 3, None) == Finish(reason=FinishReason.STOP, stopped_by=3)
    watched = stop_strings("X", pieces=["X"])
    assert finish_of(params(max_tokens=1), 1, 0, watched) == Finish(reason=FinishReason.STOP, stopped_by="X")


def test_min_tokens_holds_off_eos_and_stop_ids() -> None:
    held = params(min_tokens=3)
    assert [finish_of(held, number, 1, None) for number in (1, 2, 3)] == [None] * 3
    assert [finish_of(held, number, 3, None) for number in (1, 2, 3)] == [None] * 3
    assert finish_of(held, 4, 1, None) == Finish(reason=FinishReason.STOP)


def test_min_tokens_above_max_tokens_ends_at_max_tokens() -> None:
    assert finish_of(params(min_tokens=99), 10, 1, None) == Finish(reason=FinishReason.LENGTH)


def test_the_text_of_an_eos_is_no_part_of_what_is_searched() -> None:
    watched = stop_strings("X", pieces=["a", "X"])
    assert finish_of(params(), 1, 0, watched) is None
    assert finish_of(params(), 2, 1, watched) == Finish(reason=FinishReason.STOP)
    assert watched.text == "a"


def test_only_a_row_with_min_tokens_suppresses_its_stop_tokens() -> None:
    assert params().suppressed_ids == frozenset()
    assert params(min_tokens=1).suppressed_ids == {1, 2, 3}
