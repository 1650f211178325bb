"""OpenAI Batch lines in and out."""

from __future__ import annotations

import json

import pytest

from headrace.producer import ErrorInfo, FinishReason, Output, Result, Usage
from headrace.producer.openai_batch import CHAT_URL, COMPLETIONS_URL, output_line, parse_openai_line
from headrace.producer.writers import open_writer
from headrace.shared.schema import ErrorCode

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(custom_id: object = "a", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": {"messages": MESSAGES, **body}}


def parse(line: object, url: str = CHAT_URL, **defaults: object):
    return parse_openai_line(line, 7, defaults, url)


def test_a_chat_line_becomes_a_request() -> None:
    line = parse(chat(model="m", max_completion_tokens=5, temperature=0, stop="x", user="me", stream=False, n=1))
    assert line.error is None
    assert (line.id, line.request.id, line.request.max_tokens, line.request.stop) == ("a", "a", 5, ["x"])
    assert (line.request.model, line.request.temperature) == ("m", 0.0)


def test_a_completion_line_becomes_a_request() -> None:
    body = {"prompt": "x", "echo": False, "best_of": 1, "suffix": None}
    line = parse({"custom_id": "a", "method": "POST", "url": COMPLETIONS_URL, "body": body}, COMPLETIONS_URL, seed=3)
    assert (line.request.prompt, line.request.seed) == ("x", 3)


def test_null_means_that_a_field_is_left_out() -> None:
    assert parse(chat(temperature=None, tools=None, logit_bias=None)).error is None


@pytest.mark.parametrize(
    ("line", "param", "text"),
    [
        ([], None, "line 7: not an object with custom_id"),
        (chat(custom_id=5), "custom_id", "line 7: custom_id is a string"),
        (chat(custom_id=""), "custom_id", "line 7: custom_id is a string"),
        (chat(custom_id="\ud800"), "custom_id", "line 7: custom_id is a string"),
        ({**chat(), "method": "GET"}, "method", 'line 7: method is "GET"; it must be "POST"'),
        ({**chat(), "url": "/v1/embeddings"}, "url", 'line 7: url is "/v1/embeddings"; it must be "/v1/chat'),
        ({**chat(), "url": COMPLETIONS_URL}, "url", "all lines of a file have one"),
        ({**chat(), "body": "x"}, "body", 'line 7: body is "x"; it must be an object'),
        ({**chat(), "extra": 1}, "extra", "line 7: 'extra': unknown field"),
        (chat(stream=True), "stream", "line 7: stream=true is not supported; leave it out or use false"),
        (chat(tools=[{}]), "tools", "line 7: tools=[{}] is not supported"),
        (chat(prompt="x"), "prompt", "line 7: prompt does not belong to this url"),
        (chat(user=5), "user", "line 7: user is 5; it must be a string"),
        (chat(id="x"), "id", "line 7: id: unknown field"),
        (chat(max_tokens=5, max_completion_tokens=6), "max_tokens", "give one"),
        (chat(temprature=1), "temprature", "line 7: temprature: unknown field"),
        (chat(n=2), None, "n=2 is not supported"),
    ],
)
def test_a_wrong_line_says_what_is_allowed(line: object, param: str | None, text: str) -> None:
    found = parse(line)
    assert found.request is None
    assert text in str(found.error)
    assert found.error.param == param
    assert found.id in ("a", "line-7")


def done(finish: FinishReason = FinishReason.STOP) -> Result:
    output = Output(text="hello", token_ids=[1, 2], finish_reason=finish)
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return Result(id="a", job_id="j", model="m", outputs=[output], usage=usage)


def failed(code: ErrorCode) -> Result:
    return Result(id="a", job_id="j", error=ErrorInfo(code=code, message="why", param="top_p"))


def test_an_answer_has_the_shape_of_a_chat_completion() -> None:
    assert json.loads(output_line(done(FinishReason.LENGTH), chat=True, created=12)) == {
        "id": "batch_req_j",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_j",
            "body": {
                "id": "chatcmpl-j",
                "object": "chat.completion",
                "created": 12,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hello"},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {
                    "prompt_tokens": 3,
                    "completion_tokens": 2,
                    "total_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 1},
                },
            },
        },
        "error": None,
    }


def test_an_answer_to_a_prompt_has_the_shape_of_a_text_completion() -> None:
    body = json.loads(output_line(done(), chat=False))["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "hello")
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_fault_of_the_request_has_a_status_and_any_other_has_none() -> None:
    line = json.loads(output_line(failed(ErrorCode.INVALID_REQUEST), chat=True))
    assert (line["response"]["status_code"], line["error"]) == (400, None)
    assert line["response"]["body"]["error"]["param"] == "top_p"
    line = json.loads(output_line(failed(ErrorCode.WORKER_LOST), chat=True))
    assert (line["response"], line["error"]) == (None, {"code": "worker_lost", "message": "why"})


def test_failures_go_to_a_file_of_their_own(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.errors.jsonl").write_text("of an earlier run")
    with open_writer(str(path), "openai") as writer:
        writer.write([done()])
        assert not (tmp_path / "out.errors.jsonl").exists()
        writer.write([failed(ErrorCode.TIMEOUT), done()])
        assert len(path.read_text().splitlines()) == 2
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 1


def test_a_result_without_an_id_is_no_other_requests(tmp_path) -> None:
    path = tmp_path / "out.jsonl"
    lost = failed(ErrorCode.TIMEOUT).model_copy(update={"id": None})
    with open_writer(str(path), "requests") as writer:
        writer.write([lost])
    with open_writer(str(path), "requests", anew=False) as writer:
        assert (writer.num_kept, writer.has("None")) == (0, False)


def test_both_files_are_gone_on_with_up_to_their_last_whole_line(tmp_path) -> None:
    path, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    made = [done(), failed(ErrorCode.INVALID_REQUEST), done(), failed(ErrorCode.TIMEOUT)]
    results = [result.model_copy(update={"id": name}) for result, name in zip(made, "abcd", strict=True)]
    with open_writer(str(path), "openai") as writer:
        assert writer.write(results[:2]) == results[:2]
    before = [path.read_text(), errors.read_text()]
    for each in (path, errors):
        with each.open("a") as file:
            file.write('{"id": "batch_req')
    with open_writer(str(path), "openai", anew=False) as writer:
        assert (writer.num_kept, writer.num_kept_failed) == (2, 1)
        assert [writer.has(name) for name in "abcd"] == [True, True, False, False]
        assert writer.write(results) == results[2:]
    for each, kept in zip((path, errors), before, strict=True):
        assert each.read_text().startswith(kept)
        assert each.read_text().count("\n") == 2
