from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from headrace.worker.engine.threads import Threads

TIMEOUT_S = 30.0


def test_calls_run_at_the_same_time_and_their_results_keep_their_order() -> None:
    meeting = threading.Barrier(2, timeout=TIMEOUT_S)

    def call(number: int) -> int:
        meeting.wait()  # one after the other, the first would wait in vain
        return number

    assert Threads().run([partial(call, number) for number in range(2)]) == [0, 1]


def test_a_single_call_runs_where_it_is_made() -> None:
    assert Threads().run([threading.get_ident]) == [threading.get_ident()]


@pytest.mark.parametrize(("calls", "each"), [(1, 8), (2, 4), (3, 2), (8, 1), (9, 1)])
def test_the_cores_are_divided_and_the_caller_keeps_its_own(calls: int, each: int) -> None:
    torch.set_num_threads(8)
    assert Threads().run([torch.get_num_threads] * calls) == [each] * calls
    assert torch.get_num_threads() == 8


def test_the_compiled_kernels_get_as_many_cores_as_torch() -> None:
    numba = pytest.importorskip("numba")
    before = numba.get_num_threads()
    torch.set_num_threads(8)
    assert Threads().run([numba.get_num_threads] * 8) == [1] * 8
    assert numba.get_num_threads() == before


def test_a_failure_is_raised_when_all_calls_have_ended() -> None:
    has_failed, ended = threading.Event(), threading.Event()

    def fail() -> None:
        has_failed.set()
        raise ValueError("no")

    def go_on() -> None:
        assert has_failed.wait(TIMEOUT_S)
        ended.set()

    threads = Threads()
    calls: list[Callable[[], None]] = [fail, go_on]
    with pytest.raises(ValueError, match="no"):
        threads.run(calls)
    assert ended.is_set()
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]
