"""The choice among lanes, script by script, against a model of it that is written anew here."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.shared import keys
from headrace.shared.lanes import PRIORITIES, Lane, Priority
from headrace.worker.fence import Fences
from headrace.worker.lanes import MAX_PASSES, UNSEEN_JOB_TOKENS, Claims, Receipt

QUEUE = "headrace-m"
WORKER = "w"
PLAIN = Lane(QUEUE)


class Server:
    """A queue with its lanes on a server, as a worker and producers use it."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.fences = Fences(client)
        self._numbers = count()
        client.flushall()
        client.set(keys.lease(WORKER), 1)

    def push(self, lane: Lane) -> str:
        job_id = f"{lane.tenant or 'x'}-{next(self._numbers)}"
        self.client.rpush(keys.rq_queue(lane.name), job_id)
        if lane != PLAIN:
            self.client.sadd(keys.arrivals(QUEUE), lane.name)
        return job_id

    def claim(self, num_jobs: int = 1) -> Claims:
        """Claim so many jobs, as if they started at once."""
        claims = self.fences.claim(QUEUE, WORKER, num_jobs)
        self.client.delete(keys.claims(WORKER))
        return claims

    def claim_ids(self, num_jobs: int = 1) -> list[str]:
        return [raw.decode() for raw in self.claim(num_jobs).raw_ids]

    def run(self, commands: list[Any]) -> None:
        for command in commands:
            self.client.execute_command(*command)


@pytest.fixture
def server(redis_client: redis.Redis) -> Server:
    return Server(redis_client)


@pytest.fixture
def real_server(redis_url: str) -> Iterator[Server]:
    with redis.Redis.from_url(redis_url) as client:
        yield Server(client)


def tenants(*names: str) -> list[Lane]:
    return [Lane(QUEUE, "normal", name) for name in names]


def settle(server: Server, claims: Claims, tokens: int) -> None:
    for raw, receipt in claims.receipts.items():
        server.run(receipt.settle(raw.decode(), tokens))


@dataclass
class Model:
    """The rules of headrace.worker.lanes, in the plainest way: each claim looks through every lane there ever was."""

    jobs: dict[Lane, deque[str]] = field(default_factory=dict)
    time: dict[Lane, int] = field(default_factory=dict)
    seen: dict[Lane, list[int]] = field(default_factory=dict)
    clock: Counter[str] = field(default_factory=Counter)
    passes: Counter[str] = field(default_factory=Counter)
    charged: dict[str, tuple[Lane, int]] = field(default_factory=dict)
    new: set[Lane] = field(default_factory=set)  # since the last claim

    def waiting(self, priority: str) -> list[Lane]:
        return [lane for lane, ids in self.jobs.items() if lane.priority == priority and ids and lane not in self.new]

    def push(self, lane: Lane, job_id: str) -> None:
        if not self.jobs.setdefault(lane, deque()):
            self.new.add(lane)
        self.jobs[lane].append(job_id)

    def _let_in(self) -> None:
        for priority in PRIORITIES:
            coming = [lane for lane in self.new if lane.priority == priority]
            if coming and not self.waiting(priority):
                # Nobody waited: nobody owes anything to anybody.
                own = [self.time[lane] for lane in self.time if lane.priority == priority]
                self.clock[priority] = max([self.clock[priority], *own])
            for lane in coming:
                self.time[lane] = max(self.clock[priority], self.time.get(lane, 0))
        self.new.clear()

    def claim(self) -> str | None:
        self._let_in()
        waiting = [priority for priority in PRIORITIES if self.waiting(priority)]
        if not waiting:
            return None
        due = [priority for priority in waiting[1:] if self.passes[priority] >= MAX_PASSES]
        priority = max(due, key=lambda each: self.passes[each]) if due else waiting[0]
        lane = min(self.waiting(priority), key=lambda each: (self.time[each], each.name))
        job_id = self.jobs[lane].popleft()
        tokens = self.seen.get(lane, [])
        charge = max(1, int(Fraction(sum(tokens), len(tokens)) + Fraction(1, 2))) if tokens else UNSEEN_JOB_TOKENS
        self.charged[job_id] = lane, charge
        self.clock[priority] = max(self.clock[priority], self.time[lane])
        self.time[lane] += charge
        for each in PRIORITIES:
            still = each in waiting
            self.passes[each] = self.passes[each] + 1 if still and each != priority else 0
        return job_id

    def settle(self, job_id: str, tokens: int) -> None:
        lane, charge = self.charged.pop(job_id)
        self.time[lane] += tokens - charge
        self.seen.setdefault(lane, []).append(tokens)


lanes = st.sampled_from([*tenants("a", "b", "c"), Lane(QUEUE, "high"), Lane(QUEUE, "high", "a"), Lane(QUEUE, "low")])
actions = st.lists(
    st.tuples(st.just("push"), lanes, st.integers(1, 3))
    | st.tuples(st.just("claim"), st.integers(1, 4))
    | st.tuples(st.just("settle"), st.integers(0, 30), st.integers(1, 2_000)),
    min_size=40,
    max_size=100,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions)
def test_the_script_claims_what_the_model_claims(real_server: Server, steps: list[tuple[Any, ...]]) -> None:
    server, model = Server(real_server.client), Model()
    receipts: dict[str, Receipt] = {}
    for step in steps:
        if step[0] == "push":
            for _ in range(step[2]):
                model.push(step[1], server.push(step[1]))
        elif step[0] == "claim":
            expected = [job_id for _ in range(step[1]) if (job_id := model.claim()) is not None]
            claims = server.claim(step[1])
            assert [raw.decode() for raw in claims.raw_ids] == expected
            receipts |= {raw.decode(): receipt for raw, receipt in claims.receipts.items()}
        elif receipts:
            job_id = sorted(receipts)[step[1] % len(receipts)]
            server.run(receipts.pop(job_id).settle(job_id, step[2]))
            model.settle(job_id, step[2])


sizes = st.integers(1, 1_000)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(sizes, min_size=2, max_size=6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_lanes_that_wait_throughout_get_equal_shares_of_the_tokens(
    real_server: Server, largest: list[int], num_running: int, random: Any
) -> None:
    """Of two such lanes, neither is ahead by more than what a lane's claims in flight can be wrong by, and a job."""
    server = Server(real_server.client)
    own = tenants(*(f"t{number}" for number in range(len(largest))))
    for lane in own:
        server.client.rpush(keys.rq_queue(lane.name), *(f"{lane.tenant}-{number}" for number in range(100)))
        server.client.sadd(keys.arrivals(QUEUE), lane.name)
    served: Counter[Lane] = Counter()
    running: list[tuple[str, Receipt]] = []
    bound = (num_running + 2) * max(*largest, UNSEEN_JOB_TOKENS)
    for _ in range(80):
        claims = server.claim(1)
        running += [(raw.decode(), receipt) for raw, receipt in claims.receipts.items()]
        if len(running) > num_running:
            job_id, receipt = running.pop(random.randrange(len(running)))
            tokens = random.randint(1, largest[own.index(receipt.lane)])
            served[receipt.lane] += tokens
            server.run(receipt.settle(job_id, tokens))
        assert max(served[lane] for lane in own) - min(served[lane] for lane in own) <= bound


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.sampled_from(PRIORITIES), min_size=1), st.integers(1, 4), st.integers(20, 60))
def test_the_highest_priority_is_first_and_none_is_passed_over_for_long(
    real_server: Server, waiting: set[Priority], num_at_once: int, num_claims: int
) -> None:
    server = Server(real_server.client)
    for priority in waiting:
        for _ in range(num_claims * num_at_once):
            server.push(Lane(QUEUE, priority, "t"))
    order = [
        receipt.lane.priority for _ in range(num_claims) for receipt in server.claim(num_at_once).receipts.values()
    ]
    highest = next(priority for priority in PRIORITIES if priority in waiting)
    assert order[:MAX_PASSES] == [highest] * MAX_PASSES
    for priority in waiting:
        passed = 0
        for each in order:
            passed = 0 if each == priority else passed + 1
            assert passed <= MAX_PASSES + 1  # one more where two are due at once


def test_a_queue_without_lanes_is_first_in_first_out_and_leaves_nothing_behind(server: Server) -> None:
    pushed = [server.push(PLAIN) for _ in range(5)]
    assert server.claim_ids(3) + server.claim_ids(3) == pushed
    assert {key.decode() for key in server.client.keys()} == {keys.lease(WORKER)}


def test_what_is_claimed_already_comes_again_with_its_receipt(server: Server) -> None:
    (lane,) = tenants("acme")
    server.push(lane)
    first = server.fences.claim(QUEUE, WORKER, 4)
    assert server.fences.claim(QUEUE, WORKER, 4) == first
    assert first.receipts == {b"acme-0": Receipt(lane=lane, charge=UNSEEN_JOB_TOKENS, worker=WORKER)}


@pytest.mark.parametrize("key", [keys.RQ_SUSPENDED, None])
def test_nothing_is_claimed_while_work_is_suspended_or_the_lease_is_lost(server: Server, key: str | None) -> None:
    server.push(Lane(QUEUE, "high"))
    if key is None:
        server.client.delete(keys.lease(WORKER))
    else:
        server.client.set(key, 1)
    assert server.claim_ids() == []
    assert server.client.llen(keys.rq_queue(f"{QUEUE}~high")) == 1


def test_jobs_without_a_tenant_have_their_share_as_one_of_them(server: Server) -> None:
    (acme,) = tenants("acme")
    for _ in range(20):
        server.push(PLAIN)
        server.push(acme)
    whose: Counter[str] = Counter()
    for _ in range(10):
        claims = server.claim(2)
        whose += Counter(receipt.lane.name for receipt in claims.receipts.values())
        settle(server, claims, 100)
    assert whose == {PLAIN.name: 10, acme.name: 10}


def test_who_sends_one_large_job_after_the_other_gets_no_more_than_its_share(server: Server) -> None:
    """The queue, without a tenant, has small jobs waiting at all times; the tenant only one at a time."""
    (acme,) = tenants("acme")
    tokens: Counter[str] = Counter()
    waiting: str | None = None
    for _ in range(3):
        server.push(PLAIN)
    for number in range(400):
        server.push(PLAIN)
        if number % 5 == 0:  # after a while in which the queue was alone
            waiting = waiting or server.push(acme)
        claims = server.claim(1)
        (job_id,) = (raw.decode() for raw in claims.raw_ids)
        size = 1_000 if job_id == waiting else 10
        tokens[acme.name if job_id == waiting else PLAIN.name] += size
        waiting = None if job_id == waiting else waiting
        settle(server, claims, size)
    assert tokens[acme.name] <= tokens[PLAIN.name] + 2 * 1_000
    assert tokens[PLAIN.name] > 2_000


def test_who_was_idle_has_saved_nothing_up_and_a_newcomer_is_not_punished(server: Server) -> None:
    early, late = tenants("early", "late")
    for _ in range(300):
        server.push(early)
    server.push(late)
    settle(server, server.claim(2), 100)
    for _ in range(100):
        settle(server, server.claim(1), 100)  # of the early one alone
    for lane in (late, *tenants("new")):
        for _ in range(50):
            server.push(lane)
    whose: Counter[str] = Counter()
    for _ in range(30):
        claims = server.claim(1)
        whose += Counter(str(receipt.lane.tenant) for receipt in claims.receipts.values())
        settle(server, claims, 100)
    # The newcomer's first is charged more than it takes, until it has ended.
    assert all(9 <= whose[name] <= 11 for name in ("early", "late", "new")), whose


def test_what_was_taken_while_nobody_waited_is_owed_to_nobody(server: Server) -> None:
    alone, new = tenants("alone", "new")
    for _ in range(5):
        server.push(alone)
    settle(server, server.claim(5), 5_000)
    for _ in range(10):
        server.push(alone)
        server.push(new)
    whose: Counter[str] = Counter()
    for _ in range(6):
        claims = server.claim(1)
        whose += Counter(str(receipt.lane.tenant) for receipt in claims.receipts.values())
        settle(server, claims, 5_000)
    assert all(2 <= whose[name] <= 4 for name in ("alone", "new")), whose


def test_a_lane_that_a_stock_tool_has_emptied_holds_nobody_up(server: Server) -> None:
    gone, there = tenants("gone", "there")
    for lane in (gone, there):
        for _ in range(3):
            server.push(lane)
    server.claim(1)
    server.client.delete(keys.rq_queue(gone.name))
    assert [job_id.partition("-")[0] for job_id in server.claim_ids(5)] == ["there"] * 3


def test_a_tenants_lane_gives_no_other_tenants_job(server: Server) -> None:
    (acme,) = tenants("acme")
    server.client.rpush(keys.rq_queue(acme.name), "bob-1", "acme2-1", b"\xff", "acme")
    mine = server.push(acme)
    claims = server.claim(9)
    assert [raw.decode() for raw in claims.raw_ids] == [mine]
    assert claims.dropped == [b"bob-1", b"acme2-1", b"\xff", b"acme"]
    assert server.client.exists(keys.rq_queue(acme.name)) == 0


def test_a_flood_of_such_entries_is_dropped_a_part_at_a_time(server: Server) -> None:
    (acme,) = tenants("acme")
    server.client.rpush(keys.rq_queue(acme.name), *(["bob-1"] * 2_500))
    mine = server.push(acme)
    claimed: list[list[str]] = [server.claim_ids(1) for _ in range(3)]
    assert claimed == [[], [], [mine]]


@pytest.mark.parametrize(
    "name",
    [
        "other~high",
        f"{QUEUE}x~high",
        f"{QUEUE}~normal",
        f"{QUEUE}~urgent",
        f"{QUEUE}~high~a~b",
        f"{QUEUE}~high~",
        f"{QUEUE}~low~a-b",
        f"{QUEUE}~high~{'a' * 65}",
        b"\xff\x00",
    ],
)
def test_a_name_that_is_no_lane_of_the_queue_is_ignored(server: Server, name: str | bytes) -> None:
    server.client.rpush("rq:queue:" + name if isinstance(name, str) else b"rq:queue:" + name, "a-1")
    server.client.sadd(keys.arrivals(QUEUE), name)
    mine = server.push(PLAIN)
    assert server.claim_ids(4) == [mine]


def test_a_lane_whose_key_is_no_list_is_ignored(server: Server) -> None:
    (acme,) = tenants("acme")
    server.push(acme)
    server.push(acme)
    assert len(server.claim_ids(1)) == 1
    server.client.set(keys.rq_queue(acme.name), "spoilt while it waits")
    server.client.set(keys.rq_queue(f"{QUEUE}~high~acme"), "spoilt before")
    server.client.sadd(keys.arrivals(QUEUE), f"{QUEUE}~high~acme")
    mine = server.push(PLAIN)
    assert server.claim_ids(4) == [mine]


def test_a_job_that_goes_back_is_charged_for_what_it_took_and_says_nothing_of_the_mean(server: Server) -> None:
    (acme,) = tenants("acme")
    job_id = server.push(acme)
    (receipt,) = server.claim(1).receipts.values()
    server.run(receipt.give_back(job_id, 30))
    idle = keys.idle_lanes(QUEUE, "normal")
    assert server.client.zscore(idle, acme.name) == 30
    assert server.client.hget(keys.lanes(QUEUE), f"jobs:{acme.name}") is None
    assert server.client.exists(keys.receipts(WORKER)) == 0


def test_dropping_a_claim_takes_its_charge_back_once(server: Server) -> None:
    (acme,) = tenants("acme")
    job_id = server.push(acme)
    (receipt,) = server.fences.claim(QUEUE, WORKER, 1).receipts.values()
    for _ in range(2):
        server.fences.drop(keys.claims(WORKER), job_id, receipt)
    assert server.client.zscore(keys.idle_lanes(QUEUE, "normal"), acme.name) == 0
    assert server.client.exists(keys.claims(WORKER), keys.receipts(WORKER)) == 0


def test_a_lanes_mean_follows_what_its_jobs_become(server: Server) -> None:
    (acme,) = tenants("acme")
    charges = []
    for size in [100] * 200 + [900] * 400:
        server.push(acme)
        claims = server.claim(1)
        charges += [receipt.charge for receipt in claims.receipts.values()]
        settle(server, claims, size)
    assert charges[0] == UNSEEN_JOB_TOKENS
    assert 95 <= charges[199] <= 105
    assert charges[-1] > 850


def test_only_lanes_of_which_nothing_is_left_are_forgotten(server: Server) -> None:
    lanes = tenants("waits", "lately", "failed", "nothing")
    server.client.sadd(keys.RQ_QUEUES, *(keys.rq_queue(lane.name) for lane in lanes))
    server.push(lanes[1])
    server.claim(1)
    server.push(lanes[0])
    server.client.zadd(f"rq:failed:{lanes[2].name}", {"failed-1": 1})
    server.fences.forget_lanes(lanes)
    left = server.client.smembers(keys.RQ_QUEUES)
    assert left == {keys.rq_queue(lane.name).encode() for lane in lanes[:3]}
