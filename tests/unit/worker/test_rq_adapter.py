"""How a claimed job is read from its hash, against RQ's own reading of it."""

from __future__ import annotations

from datetime import UTC, datetime

import fakeredis
import pytest
from rq.job import Job

from headrace.shared.job import job_hash
from headrace.shared.schema import Request
from headrace.worker.fence import Fences
from headrace.worker.rq_adapter.jobs import MalformedJob
from headrace.worker.rq_adapter.worker import RqWorker

QUEUE = "headrace-fake"


@pytest.fixture
def rq_worker() -> RqWorker:
    client = fakeredis.FakeRedis()
    return RqWorker(QUEUE, "w", client, Fences(client), on_stop=print, on_shutdown=print)


def stored(**changes: object) -> dict[bytes, bytes]:
    fields = {**job_hash(Request(prompt="a"), queue=QUEUE, batch=None), **changes}
    return {name.encode(): value if isinstance(value, bytes) else str(value).encode() for name, value in fields.items()}


@pytest.mark.parametrize("enqueued_at", ["2026-05-04T03:02:01.987654Z", "2026-05-04T03:02:01Z", ""])
def test_a_job_is_read_as_rq_reads_it(rq_worker: RqWorker, enqueued_at: str) -> None:
    fields = stored(enqueued_at=enqueued_at, timeout=30, failure_ttl=40, rate_limit_key="k", rate_limit_concurrency=2)
    rqs = Job("j", connection=fakeredis.FakeRedis(), serializer="json")
    rqs.restore(fields)
    read = rq_worker.jobs.read("j", fields).job
    not_read = {"_data", "created_at", "connection", "_success_callback_name"}
    assert {name: value for name, value in vars(read).items() if name not in not_read} == {
        name: value for name, value in vars(rqs).items() if name not in not_read
    }


def test_a_time_without_a_zone_is_utc_as_all_of_rqs_are(rq_worker: RqWorker) -> None:
    job = rq_worker.jobs.read("j", stored(enqueued_at="2026-05-04T03:02:01")).job
    assert job.enqueued_at == datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


def test_jobs_share_nothing_that_one_of_them_could_change(rq_worker: RqWorker) -> None:
    first, second = (rq_worker.jobs.read(job_id, stored()).job for job_id in ("a", "b"))
    first.meta["k"] = 1
    first._dependency_ids.append("x")
    assert (first.id, second.id, second.meta, second._dependency_ids) == ("a", "b", {}, [])


@pytest.mark.parametrize("changes", [{"enqueued_at": "yesterday"}, {"timeout": "soon"}, {"result_ttl": "x"}])
def test_what_can_not_be_read_is_a_malformed_job(rq_worker: RqWorker, changes: dict[str, object]) -> None:
    with pytest.raises(MalformedJob):
        rq_worker.jobs.read("j", stored(**changes))


def test_an_id_that_no_job_can_have_is_a_malformed_job(rq_worker: RqWorker) -> None:
    with pytest.raises(MalformedJob, match="Job ID"):
        rq_worker.jobs.read("a b", stored())
