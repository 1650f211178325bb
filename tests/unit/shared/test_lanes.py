from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.shared import keys
from headrace.shared.errors import InvalidRequest, SettingsError
from headrace.shared.job import new_job_id
from headrace.shared.lanes import (
    PRIORITIES,
    Lane,
    check_batch_of,
    check_queue_name,
    check_tenant_name,
    check_tenant_of,
    lane_of,
)
from headrace.shared.schema import parse_request

tenant_names = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=64)
lanes = st.builds(Lane, st.text(min_size=1).map(keys.queue_name), st.sampled_from(PRIORITIES), st.none() | tenant_names)


@given(lanes)
def test_a_lane_is_known_by_its_name(lane: Lane) -> None:
    assert lane_of(lane.name) == lane


@given(lanes, lanes)
def test_different_lanes_have_different_names(one: Lane, other: Lane) -> None:
    assert (one.name == other.name) == (one == other)


@given(st.text())
def test_no_models_queue_is_a_lane_of_another(model: str) -> None:
    queue = keys.queue_name(model)
    assert check_queue_name(queue) == queue
    assert lane_of(queue) == Lane(queue)


@pytest.mark.parametrize(
    "name", ["", "~high", "q~", "q~normal", "q~High", "q~high~", "q~high~a-b", "q~high~a~b", "q~x~a"]
)
def test_what_is_no_lane_is_not_taken_for_one(name: str) -> None:
    assert lane_of(name) is None


@pytest.mark.parametrize("name", ["", "a-b", "a.b", "a~b", "a:b", "a b", "*", "ä", "a" * 65, "a\n"])
def test_a_tenants_name_is_fit_for_prefixes_and_patterns(name: str) -> None:
    with pytest.raises(SettingsError, match="1 to 64 letters, digits or '_'"):
        check_tenant_name(name)
    with pytest.raises(InvalidRequest, match="tenant"):
        parse_request({"prompt": "a", "tenant": name})


def test_a_tenants_jobs_and_batches_bear_its_name() -> None:
    assert new_job_id(None, None, "acme").startswith("acme-")
    assert new_job_id("acme.b", "1", "acme") == "acme-" + new_job_id("acme.b", "1")
    check_batch_of("acme", "acme.b")
    check_batch_of("acme", None)
    check_batch_of(None, "acme.b")
    for batch in ("b", "bob.b", "acme", "acme2.b", ".acme."):
        with pytest.raises(InvalidRequest, match=r"must begin with 'acme\.'"):
            check_batch_of("acme", batch)


def test_the_lane_decides_whose_a_job_is() -> None:
    check_tenant_of("acme", None)
    check_tenant_of("acme", "acme")
    with pytest.raises(InvalidRequest, match="'bob', but it waited in a lane of the tenant 'acme'"):
        check_tenant_of("acme", "bob")
    with pytest.raises(InvalidRequest, match="'bob', but it waited in a lane of no tenant"):
        check_tenant_of(None, "bob")
