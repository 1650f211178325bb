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
    """All that a keeper talks to. `held`: the lease could be renewed in time; `error`: what RQ's beat meets."""

    def __init__(self) -> None:
        self.held = True
        self.error: redis.RedisError | None = None
        self.num_takeovers = 0

    def renew(self) -> bool:
        return self.held

    def take_over_dead_workers(self) -> int:
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
def around() -> Surroundings:
    return Surroundings()


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
    clock.advance(LEASE_S - 1)
    keeper.try_to_look()
    assert (around.num_takeovers == before) == spared
    clock.advance(LEASE_S)
    keeper.try_to_look()
    assert around.num_takeovers > before
