"""When a worker looks after others: not just after a time in which it could not beat itself."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from fakes import FakeClock

from headrace.worker import keeper as keeper_module
from headrace.worker.keeper import Keeper

LEASE_S = 6.0


class Surroundings:
    """All that a keeper talks to. `held`: the lease could be renewed in time; `error`: what RQ's beat meets; `stall_s`:
    how long the server stands still before it says who is dead."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.held = True
        self.error: redis.RedisError | None = None
        self.stall_s = 0.0
        self.num_renewals = 0
        self.num_takeovers = 0

    def renew(self) -> bool:
        self.num_renewals += 1
        return self.held

    def dead_workers(self) -> list[str]:
        self.clock.advance(self.stall_s)
        return ["dead"]

    def take_over(self, workers: list[str]) -> int:
        assert workers == ["dead"]
        self.num_takeovers += 1
        return 0

    def beat(self, running: Any) -> None:
        if self.error is not None:
            raise self.error

    def nothing(self, *arguments: Any) -> list[Any]:
        return []

    in_hand = lost = cancelled = tidy = take_over_expired = announce_lanes = nothing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(keeper_module, "now_s", made)
    return made


@pytest.fixture
def around(clock: FakeClock) -> Surroundings:
    return Surroundings(clock)


@pytest.fixture
def keeper(around: Any, clock: FakeClock) -> Keeper:
    return Keeper(around, around, around, around, lease_s=LEASE_S, on_lost=around.nothing, on_cancel=around.nothing)


def test_others_are_looked_after_at_each_beat(keeper: Keeper, around: Surroundings, clock: FakeClock) -> None:
    for _ in range(3):
        keeper.look()
        clock.advance(LEASE_S / 3)
    assert around.num_takeovers == 3


def test_after_its_own_lease_had_run_out_others_have_a_lease_to_renew_theirs(
    keeper: Keeper, around: Surroundings, clock: FakeClock
) -> None:
    around.held = False
    keeper.look()
    around.held = True
    for _ in range(2):
        clock.advance(LEASE_S / 3)
        keeper.look()
    assert around.num_takeovers == 0
    clock.advance(LEASE_S / 3)
    keeper.look()
    assert around.num_takeovers == 1


@pytest.mark.parametrize(
    ("error", "spared"),
    [
        (redis.ConnectionError("gone"), True),
        (redis.exceptions.OutOfMemoryError("command not allowed"), True),
        (redis.exceptions.NoPermissionError("that won't pass"), False),
    ],
)
def test_after_a_beat_that_failed_too(
    keeper: Keeper, around: Surroundings, clock: FakeClock, error: redis.RedisError, spared: bool
) -> None:
    around.error = error
    keeper.try_to_look()
    before, around.error = around.num_takeovers, None
    for _ in range(2):
        clock.advance(LEASE_S / 3)
        keeper.try_to_look()
    assert (around.num_takeovers == before) == spared
    clock.advance(LEASE_S / 3)
    keeper.try_to_look()
    assert around.num_takeovers > before


@pytest.mark.parametrize("within_a_beat", [True, False])
def test_after_a_beat_that_was_held_up_too(
    keeper: Keeper, around: Surroundings, clock: FakeClock, within_a_beat: bool
) -> None:
    """The server, or the machine, has stood still for less than a lease: ours still holds, that of others may not."""
    keeper.look()
    assert around.num_takeovers == 1
    clock.advance(LEASE_S / 3)
    if within_a_beat:
        around.stall_s = LEASE_S * 2 / 3
    else:
        clock.advance(LEASE_S * 2 / 3)
    keeper.look()
    spared_until_s, around.stall_s = clock() + LEASE_S, 0.0
    while clock() < spared_until_s:
        keeper.look()
        assert around.num_takeovers == 1
        clock.advance(LEASE_S / 12)
    clock.advance(LEASE_S / 3)
    keeper.look()
    assert around.num_takeovers == 2


@pytest.mark.parametrize("lease_s", [2.0, 30.0])
def test_it_beats_three_times_a_lease_whatever_the_looks_between(around: Any, clock: FakeClock, lease_s: float) -> None:
    keeper = Keeper(around, around, around, around, lease_s=lease_s, on_lost=around.nothing, on_cancel=around.nothing)
    began_s = clock()
    while clock() < began_s + 10 * lease_s - lease_s / 6:
        keeper.look()
        clock.advance(keeper._pause_s() + 1e-9)
    assert around.num_renewals == 30
