"""Failovers behind Redis Sentinel: a planned one, and the primary killed, while jobs run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.real_workers import MODEL, RealWorkers, all_good, submit, texts, wait_for_progress
from faults.sentinel_cluster import PASSWORD, SENTINEL_PASSWORD, SentinelCluster
from tiny_model import save_tiny_model

from headrace.producer import AsyncProducer, Producer, ServerUnavailable
from headrace.shared import keys
from headrace.shared.connection import connect


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SentinelCluster]:
    made = SentinelCluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[RealWorkers]:
    made = RealWorkers(save_tiny_model(tmp_path / MODEL, max_positions=2048), tmp_path)
    yield made
    made.stop()


async def test_all_jobs_end_once_and_well_though_the_primary_changes_and_dies(
    cluster: SentinelCluster, workers: RealWorkers
) -> None:
    with Producer(cluster.url, model=MODEL, patience_s=60) as producer:
        for _ in range(2):
            workers.start(cluster.url)
        expected = texts(all_good(submit(producer, "undisturbed", 80, 150)))
        batch = submit(producer, "disturbed", 80, 150)
        wait_for_progress(batch, 5)
        assert batch.progress().completed < 60
        cluster.fail_over()  # the old primary answers READONLY from now on
        completed = batch.progress().completed
        wait_for_progress(batch, completed + 5)
        assert completed < 70
        cluster.kill_primary()
        results = all_good(batch)
        assert texts(results) == expected
        with cluster.primary() as primary:
            assert primary.xlen(keys.batch_done("disturbed")) == 80
        async with AsyncProducer(cluster.url, model=MODEL) as asynchronous:
            job = await asynchronous.submit("prompt 0", max_tokens=150, top_k=20, seed=0, ignore_eos=True)
            assert (await job.result(timeout=60)).text == expected["0"]
    assert workers.all_live()


def test_the_commands_take_the_url(cluster: SentinelCluster) -> None:
    with Producer(cluster.url, model=MODEL) as producer:
        producer.submit_many(["a"], batch="night")
    code = "import sys; from headrace.shared.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "status", "night", "--redis", cluster.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "night" in shown.stdout


def test_what_is_wrong_is_said_in_one_line_without_passwords(cluster: SentinelCluster) -> None:
    cases = [
        (cluster.url.replace("/headrace/", "/other/"), "No master found for 'other'"),
        (cluster.url.replace(SENTINEL_PASSWORD, "wrong-one"), "password"),
        (cluster.url.replace(PASSWORD, "wrong-one"), "password"),
        (cluster.url.partition("?")[0], "uthentication"),
    ]
    for url, says in cases:
        with pytest.raises(ServerUnavailable, match=says) as raised:
            connect(url)
        text = str(raised.value)
        assert "\n" not in text
        assert not any(secret in text for secret in (PASSWORD, SENTINEL_PASSWORD, "wrong-one"))
