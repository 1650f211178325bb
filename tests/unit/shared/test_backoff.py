from __future__ import annotations

import random

from headrace.shared.backoff import FIRST_PAUSE_S, MAX_PAUSE_S, Backoff


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_success() -> None:
    backoff = Backoff()
    assert backoff.is_first
    for number in range(10):
        longest = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**number)
        assert longest / 2 <= backoff.next_s() <= longest
    assert not backoff.is_first
    assert backoff.reset()
    assert not backoff.reset()
    assert backoff.next_s() <= FIRST_PAUSE_S


def test_the_programs_random_numbers_are_not_drawn() -> None:
    before = random.getstate()
    Backoff().next_s()
    assert random.getstate() == before
