"""Producer, Job and Batch, on fakeredis and on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from fake_worker import settle, settle_all, settle_next

from headrace.producer import (
    BatchExists,
    BatchNotFound,
    DuplicateIds,
    InvalidRequest,
    JobNotFound,
    Producer,
    Request,
    ResultTimeout,
    ServerUnavailable,
    SettingsError,
)
from headrace.producer.batches import Collector
from headrace.shared import keys
from headrace.shared.job import decode_payload

QUEUE = "headrace-m"


@pytest.fixture
def producer(redis_client: redis.Redis) -> Iterator[Producer]:
    with Producer(connection=redis_client, model="m") as producer:
        yield producer


def test_a_submitted_job_waits_on_the_queue_of_its_model(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello", max_tokens=3)
    assert job.status() == "queued"
    assert redis_client.lrange("rq:queue:headrace-m", 0, -1) == [job.id.encode()]
    assert redis_client.smembers("rq:queues") == {b"rq:queue:headrace-m"}
    payload = decode_payload(redis_client.hget(keys.rq_job(job.id), "data"))
    assert payload.request == {"prompt": "hello", "max_tokens": 3}
    assert payload.batch is None


def test_a_request_that_names_a_model_goes_to_that_models_queue(producer: Producer, redis_client: redis.Redis) -> None:
    producer.submit("hello", model="Other/Model")
    assert redis_client.llen("rq:queue:headrace-other-model") == 1


def test_an_explicit_queue_takes_every_request(redis_client: redis.Redis) -> None:
    producer = Producer(connection=redis_client, queue="q")
    producer.submit("hello", model="Other/Model")
    assert redis_client.llen("rq:queue:q") == 1


def test_an_invalid_request_is_refused_and_nothing_is_sent(producer: Producer, redis_client: redis.Redis) -> None:
    with pytest.raises(InvalidRequest, match="temprature: unknown field"):
        producer.submit("hello", temprature=1.0)
    assert redis_client.dbsize() == 0


def test_the_result_comes_when_the_job_is_settled(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit(messages=[{"role": "user", "content": "hi"}])
    waiter = threading.Timer(0.05, settle_all, (redis_client, QUEUE))
    waiter.start()
    assert job.result(timeout=10).text == '<[{"role": "user", "content": "hi"}]>'
    waiter.join()
    assert job.result().ok


def test_waiting_ends_with_a_timeout_that_says_what_the_job_does(producer: Producer) -> None:
    job = producer.submit("hello")
    with pytest.raises(ResultTimeout, match=r"no result after 0\.05 s; it is queued"):
        job.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        job.result(timeout=0)


def test_an_unknown_job_is_not_found(producer: Producer) -> None:
    job = producer.job("nope")
    for ask in (job.status, job.result, job.cancel):
        with pytest.raises(JobNotFound, match="no job 'nope'"):
            ask()


def test_a_job_that_rq_cancelled_has_an_error_result(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello")
    redis_client.hset(keys.rq_job(job.id), "status", "canceled")
    assert job.result(timeout=5).error.code == "cancelled"


def test_an_entry_of_a_retried_attempt_does_not_end_the_wait(producer: Producer, redis_client: redis.Redis) -> None:
    job = producer.submit("hello")
    redis_client.xadd(keys.rq_results(job.id), {"type": 4, "worker_name": "w"})
    waiter = threading.Timer(0.05, settle_all, (redis_client, QUEUE))
    waiter.start()
    assert job.result(timeout=10).ok
    waiter.join()


def test_a_batch_gives_one_result_an_item_in_the_order_of_finishing(
    producer: Producer, redis_client: redis.Redis
) -> None:
    items = ["one", {"id": "mine", "prompt": "two", "seed": 5}, Request(prompt="three")]
    batch = producer.submit_many(items, batch="b", temperature=0.0)
    last = redis_client.rpop(keys.rq_queue(QUEUE)).decode()
    settle(redis_client, last)
    settle_all(redis_client, QUEUE)
    assert [(result.id, result.text) for result in batch.results(timeout=5)] == [
        ("2", "<three>"),
        ("0", "<one>"),
        ("mine", "<two>"),
    ]
    progress = batch.progress()
    assert (progress.total, progress.completed, progress.done, progress.finished) == (3, 3, 3, True)
    assert (progress.prompt_tokens, progress.completion_tokens) == (9, 6)


def test_defaults_fill_only_what_an_item_does_not_say(producer: Producer, redis_client: redis.Redis) -> None:
    items = [{"prompt": "a", "temperature": 0.5}, Request(prompt="b", temperature=1.0), Request(prompt="c")]
    producer.submit_many(items, batch="b", temperature=0.0)
    ids = redis_client.lrange(keys.batch_jobs("b"), 0, -1)
    bodies = [decode_payload(redis_client.hget(f"rq:job:{i.decode()}", "data")).request for i in ids]
    assert [body.get("temperature", 1.0) for body in bodies] == [0.5, 1.0, 0.0]


def test_a_malformed_item_is_an_error_result_and_the_others_go_on(
    producer: Producer, redis_client: redis.Redis
) -> None:
    batch = producer.submit_many(["good", {"prompt": 5}, {"prompt": "x", "top_p": 2.0}, 7, {"id": "\ud800"}], batch="b")
    settle_all(redis_client, QUEUE)
    results = {result.id: result for result in batch.results(timeout=5)}
    assert results["0"].ok
    assert [results[i].error.code for i in "1234"] == ["invalid_request"] * 4
    assert results["2"].error.param == "top_p"
    assert batch.progress().failed == 4


def test_a_wrong_default_is_refused_before_anything_is_sent(producer: Producer, redis_client: redis.Redis) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        producer.submit_many(["a"], temperature=-1.0)
    with pytest.raises(InvalidRequest, match="can't be a default"):
        producer.submit_many(["a"], prompt="x")
    assert redis_client.dbsize() == 0


def test_duplicate_ids_of_a_sequence_are_refused_before_anything_is_sent(
    producer: Producer, redis_client: redis.Redis
) -> None:
    items = [{"id": "a", "prompt": "1"}, {"prompt": "2"}, {"id": "a", "prompt": "3"}, {"id": "1", "prompt": "4"}]
    with pytest.raises(DuplicateIds, match="id 'a' is on items 0 and 2; id '1' is on items 1 and 3"):
        producer.submit_many(items, batch="b")
    assert redis_client.dbsize() == 0


def test_duplicate_ids_of_a_generator_end_the_batch_where_they_are_met(
    producer: Producer, redis_client: redis.Redis
) -> None:
    with pytest.raises(DuplicateIds, match="items 0 and 1"):
        producer.submit_many(({"id": "a", "prompt": str(i)} for i in range(2)), batch="b")
    assert producer.batch("b").progress().submitted
    assert list(producer.batch("b").results(timeout=1)) == []


def test_a_batch_name_can_be_used_once(producer: Producer) -> None:
    producer.submit_many(["a"], batch="b")
    with pytest.raises(BatchExists, match="there is a batch 'b' already"):
        producer.submit_many(["a"], batch="b")
    assert producer.batch("b").progress().total == 1


@pytest.mark.parametrize("name", ["a:b", "x" * 129, "a b"])
def test_a_batch_name_is_fit_for_a_key(producer: Producer, name: str) -> None:
    with pytest.raises(SettingsError, match="batch name"):
        producer.submit_many(["a"], batch=name)


def test_an_unknown_batch_is_not_found(producer: Producer) -> None:
    batch = producer.batch("nope")
    for ask in (batch.progress, batch.cancel, lambda: list(batch.results()), batch.wait):
        with pytest.raises(BatchNotFound, match="no batch 'nope'"):
            ask()


def test_results_time_out_with_the_counts(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many(["a", "b"], batch="b")
    settle_next(redis_client, QUEUE)
    results = batch.results(timeout=0.2)
    assert next(results).text == "<a>"
    with pytest.raises(ResultTimeout, match="1 of 2 jobs have their result"):
        next(results)


def test_a_wait_of_less_than_a_millisecond_does_not_block_for_ever(producer: Producer) -> None:
    collector = Collector(producer.submit_many(["a"]).name)
    assert producer._run(collector.take(0.0001)) == []


def test_an_empty_batch_is_finished(producer: Producer) -> None:
    batch = producer.submit_many([])
    assert list(batch.results(timeout=5)) == []
    assert batch.wait(timeout=5).total == 0


def test_an_expired_result_is_reported_and_not_waited_for(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many(["a"])
    job_id = settle_next(redis_client, QUEUE)
    redis_client.delete(keys.result(job_id))
    (result,) = batch.results(timeout=5)
    assert (result.job_id, result.error.code) == (job_id, "internal_error")


def test_thousands_of_jobs_go_in_chunks(producer: Producer, redis_client: redis.Redis) -> None:
    batch = producer.submit_many((f"p{i}" for i in range(1_201)), batch="b")
    assert batch.progress().total == 1_201
    assert redis_client.llen(keys.rq_queue(QUEUE)) == 1_201
    settle_all(redis_client, QUEUE)
    assert {int(result.id) for result in batch.results(timeout=30)} == set(range(1_201))


def test_every_key_of_a_batch_expires(producer: Producer, redis_client: redis.Redis) -> None:
    producer.submit_many(["a", {}], batch="b")
    for key in (keys.batch("b"), keys.batch_done("b"), keys.batch_jobs("b")):
        assert 0 < redis_client.ttl(key) <= 7 * 24 * 3600


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(ServerUnavailable, match=r"no answer from Redis at redis://u:\*\*\*@localhost:1/0"):
        Producer("redis://u:secret@localhost:1/0")


def test_a_refused_command_is_readable(producer: Producer, redis_client: redis.Redis) -> None:
    redis_client.set(keys.batch("b"), "not a hash")
    with pytest.raises(ServerUnavailable, match="refused a command"):
        producer.batch("b").progress()


def test_a_connection_that_decodes_is_refused() -> None:
    client = redis.Redis(decode_responses=True)
    with pytest.raises(SettingsError, match="decode_responses"):
        Producer(connection=client)


def test_a_result_ttl_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RESULT_TTL", "a week")
    with pytest.raises(SettingsError, match="HEADRACE_RESULT_TTL"):
        Producer()


def test_the_status_counts_queues_and_batches(producer: Producer, redis_client: redis.Redis) -> None:
    producer.submit_many(["a", "b"], batch="b")
    settle_next(redis_client, QUEUE)
    redis_client.sadd("rq:workers", "rq:worker:w1")
    redis_client.hset("rq:worker:w1", mapping={"state": "busy", "queues": QUEUE, "successful_job_count": 1})
    status = producer.status()
    assert [(queue.name, queue.waiting) for queue in status.queues] == [(QUEUE, 1)]
    assert [(worker.name, worker.state, worker.finished) for worker in status.workers] == [("w1", "busy", 1)]
    assert [(batch.name, batch.progress.completed) for batch in status.batches] == [("b", 1)]
    redis_client.delete(keys.batch("b"))
    assert producer.status().batches == []
    assert redis_client.zcard(keys.BATCHES) == 0
