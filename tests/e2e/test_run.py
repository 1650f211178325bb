"""`headrace run` and its relatives as a person uses them: real processes, the real model, real servers."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from worker_harness import wait_until

from headrace.producer import Producer
from headrace.worker.models import TextCodec, resolve

pytestmark = pytest.mark.model

HEADRACE = Path(sys.executable).with_name("headrace")
MODEL = "smollm2-135m"
PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
LIMIT_S = 240.0


def headrace(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HEADRACE, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({result["id"] for result in results}) == len(results)
    return {result["id"]: result for result in results}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(resolve(MODEL).folder)


def test_a_file_of_prompts_becomes_a_file_of_answers(tmp_path: Path, codec: TextCodec) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            {
                "id": f"n{i}",
                "messages": [{"role": "user", "content": f"Name a town on a river. ({i})"}],
                "max_tokens": 5 + i,
                "metadata": {"n": i},
            }
            for i in range(20)
        ],
    )
    outcome = headrace("run", source, "-o", tmp_path / "out.jsonl", "--slots", "6", "--temperature", "0")
    assert outcome.returncode == 0, outcome.stderr
    results = read_results(tmp_path / "out.jsonl")
    assert set(results) == {f"n{i}" for i in range(20)}
    for i in range(20):
        result = results[f"n{i}"]
        (output,) = result["outputs"]
        assert result["metadata"] == {"n": i}
        assert result["error"] is None
        assert result["usage"]["completion_tokens"] == len(output["token_ids"]) <= 5 + i
        ended = output["finish_reason"] == "stop"
        assert ended or len(output["token_ids"]) == 5 + i
        assert output["text"] == codec.decode(output["token_ids"][:-1] if ended else output["token_ids"])
    for word in ("20", "tokens per second", "seconds"):
        assert word in outcome.stderr


def test_one_bad_line_costs_one_answer(tmp_path: Path, codec: TextCodec) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "good", "prompt": "The capital of France is", "max_tokens": 4},
            "{not json\n",
            {"id": "typo", "prompt": "a", "max_token": 4},
            {"id": "long", "prompt": "word " * 400, "max_tokens": 4},
            {"id": "hot", "prompt": "a", "temperature": -1},
            {"id": "other", "prompt": "a", "model": "gpt-4o", "max_tokens": 4},
        ],
    )
    outcome = headrace(
        "run", source, "-o", tmp_path / "out.jsonl", "--slots", "2", "--max-context", "128", "--temperature", "0"
    )
    assert outcome.returncode == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    results = read_results(tmp_path / "out.jsonl")
    assert "Paris" in results["good"]["outputs"][0]["text"]
    errors = {name: result["error"] for name, result in results.items() if result["error"]}
    assert {name: error["code"] for name, error in errors.items() if name != "other"} == {
        "line-2": "invalid_request",
        "typo": "invalid_request",
        "long": "prompt_too_long",
        "hot": "invalid_request",
    }
    assert "max_token" in errors["typo"]["message"]
    assert "line 3" in errors["typo"]["message"]
    assert f"{len(codec.encode_prompt('word ' * 400))} tokens" in errors["long"]["message"]
    assert "128" in errors["long"]["message"]
    assert "temperature" in errors["hot"]["message"]
    assert errors["other"]["code"] == "model_mismatch"


def test_the_same_run_gives_the_same_answers_whatever_the_slots(tmp_path: Path) -> None:
    lines = PROMPTS.read_text().splitlines()[:10]
    texts = []
    for slots in ("1", "7"):
        source = write_lines(tmp_path / "in.jsonl", [line + "\n" for line in lines])
        output = tmp_path / f"out{slots}.jsonl"
        options = ("--slots", slots, "--temperature", "0.8", "--top-k", "40", "--seed", "3", "--max-tokens", "24")
        assert headrace("run", source, "-o", output, *options).returncode == 0
        texts.append({name: result["outputs"] for name, result in read_results(output).items()})
    assert texts[0] == texts[1]


def test_gzipped_text_on_standard_input_is_read(tmp_path: Path) -> None:
    outcome = subprocess.run(
        [HEADRACE, "run", "-", "-o", tmp_path / "out.jsonl", "--slots", "2", "--max-tokens", "3"],
        input=gzip.compress("One prompt\n\nAnother, with ümläuts\n".encode()),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert set(read_results(tmp_path / "out.jsonl")) == {"line-1", "line-3"}


def test_openai_batch_lines_give_openai_batch_output(tmp_path: Path) -> None:
    def line(name: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Say hello."}]
        request = {"model": MODEL, "messages": messages, "max_completion_tokens": 5, **body}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": request}

    source = write_lines(tmp_path / "in.jsonl", [line("a"), line("b", temperature=9e99), line("c", n=3)])
    outcome = headrace("run", source, "-o", tmp_path / "out.jsonl", "--slots", "2")
    assert outcome.returncode == 1, outcome.stderr
    good = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    bad = [json.loads(text) for text in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    answered = {entry["custom_id"] for entry in good}
    assert "a" in answered
    assert "c" in {entry["custom_id"] for entry in bad}
    first = next(entry for entry in good if entry["custom_id"] == "a")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_a_run_that_can_not_be_done_says_why_in_one_line(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", [{"prompt": "a"}])
    twice = write_lines(tmp_path / "twice.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}] * 2)
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        ((tmp_path / "absent.jsonl",), "absent.jsonl"),
        ((tmp_path,), str(tmp_path)),
        ((twice,), "lines 1 and 3"),
        ((good, "--model", "no-such-model"), "no-such-model"),
        ((good, "--redis", "redis://127.0.0.1:1"), "no answer from Redis"),
        ((good, "--temperature", "-3"), "temperature"),
        ((good, "--slots", "0"), "--slots is 0"),
    ]
    for arguments, says in cases:
        outcome = headrace("run", *arguments, "-o", tmp_path / "out.jsonl")
        assert outcome.returncode == 2, (arguments, outcome.stderr)
        assert says in outcome.stderr, (arguments, outcome.stderr)
        assert outcome.stderr.startswith("headrace: error: "), (arguments, outcome.stderr)
        assert outcome.stderr.count("\n") == 1, (arguments, outcome.stderr)


def test_ctrl_c_keeps_the_answers_so_far_and_the_same_command_goes_on(tmp_path: Path) -> None:
    items = [{"prompt": f"Count to {number}:", "max_tokens": 40, "ignore_eos": True} for number in range(60)]
    source = write_lines(tmp_path / "in.jsonl", items)
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [HEADRACE, "run", source, "-o", output, "--slots", "4", "--batch", "b"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: output.exists() and output.read_text().count("\n") >= 4, "some answers", LIMIT_S)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert 4 <= len(read_results(output)) < 60
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    begun = output.read_text()
    # With more slots: that changes no text.
    outcome = headrace("run", source, "-o", output, "--slots", "60", "--batch", "b")
    assert outcome.returncode == 0, outcome.stderr
    assert output.read_text().startswith(begun)
    assert output.read_text().count("\n") == 60
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert headrace("run", source, "-o", undisturbed, "--slots", "60", "--batch", "b").returncode == 0
    texts = [{name: result["outputs"] for name, result in read_results(path).items()} for path in (output, undisturbed)]
    assert texts[0] == texts[1]


@pytest.fixture
def worker(redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([HEADRACE, "worker", "--redis", redis_url, "--slots", "4"])
    yield process
    process.terminate()
    assert process.wait(60) == 0


def test_submit_collect_status_and_cancel_work_on_a_server(
    worker: subprocess.Popen[bytes], redis_url: str, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"id": f"{i}", "prompt": "A mill", "max_tokens": 6} for i in range(9)])
    submitted = headrace("submit", source, "--batch", "mills", "--redis", redis_url)
    assert submitted.returncode == 0, submitted.stderr
    assert "mills" in submitted.stdout
    again = headrace("submit", source, "--batch", "mills", "--redis", redis_url)
    assert again.returncode == 2
    assert "mills" in again.stderr
    collected = headrace("collect", "mills", "-o", tmp_path / "out.jsonl", "--redis", redis_url)
    assert collected.returncode == 0, collected.stderr
    assert set(read_results(tmp_path / "out.jsonl")) == {str(i) for i in range(9)}
    shown = json.loads(headrace("status", "mills", "--json", "--redis", redis_url).stdout)
    assert (shown["total"], shown["completed"]) == (9, 9)
    assert "headrace-smollm2-135m" in headrace("status", "--redis", redis_url).stdout

    long = write_lines(tmp_path / "long.jsonl", [{"prompt": "A", "max_tokens": 900, "ignore_eos": True}] * 12)
    assert headrace("submit", long, "--batch", "slow", "--redis", redis_url).returncode == 0
    with Producer(redis_url) as producer, redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: client.zcard("rq:wip:headrace-smollm2-135m") >= 4, "the slow batch to run", LIMIT_S)
        cancelled = headrace("cancel", "slow", "--redis", redis_url)
        assert cancelled.returncode == 0, cancelled.stderr
        results = list(producer.batch("slow").results(timeout=60))
    assert {result.error.code for result in results if result.error} == {"cancelled"}
    assert len(results) == 12
    assert any(result.text for result in results)  # what ran has kept its text so far


def test_a_killed_run_leaves_no_server_and_no_worker_behind(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "Count:", "max_tokens": 40, "ignore_eos": True}] * 60)
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen([HEADRACE, "run", source, "-o", output, "--slots", "4"], stderr=subprocess.DEVNULL)
    wait_until(lambda: output.exists() and output.read_text().count("\n") >= 1, "an answer", LIMIT_S)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    started = [int(line) for line in children.stdout.split()]
    assert len(started) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(_is_running(pid) for pid in started), "the server and the worker to end", LIMIT_S)


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter while it ends
        return False
