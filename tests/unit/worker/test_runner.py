from __future__ import annotations

from typing import Any

import pytest
from factories import engine, row, run
from fakes import EOS, ByteCodec, ConstantModel

from headrace.shared.errors import InvalidRequest
from headrace.shared.schema import ErrorCode, FinishReason, Output, parse_request
from headrace.worker.engine.rows import Row
from headrace.worker.engine.sampling import SamplingParams, noise_key
from headrace.worker.engine.stopping import Finish, StopParams, finish_of
from headrace.worker.runner import Codec, Rejected, Runner, timing, usage

CONTEXT = 64


def runner(codec: Codec | None = None) -> Runner:
    return Runner(codec or ByteCodec(), model_name="tiny", max_context=CONTEXT)


def row_of(job_id: str = "job", **body: Any) -> Row:
    if "messages" not in body:
        body.setdefault("prompt", "hello")
    return runner().row(parse_request(body), job_id)


def rejection(**body: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        row_of(**body)
    assert str(caught.value) == caught.value.error.message
    return caught.value


def finished(text: str | bytes, finish: Finish, **body: Any) -> Output:
    """The output of a row that got these bytes, and the finish with which it ended unless it ended itself."""
    made = row_of(**body)
    for token_id in text.encode() if isinstance(text, str) else text:
        made.token_ids.append(token_id)
        made.finish = finish_of(made.stopping, len(made.token_ids), token_id, made.strings)
        if made.finish is not None:
            break
    else:
        made.finish = finish
    return runner().output(made)


LENGTH = Finish(reason=FinishReason.LENGTH)


# From request to row


def test_a_row_has_what_the_request_asks_for() -> None:
    made = row_of(
        "job 7",
        prompt="abc",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=3,
        stop_token_ids=[5, 6],
    )
    assert made.row_id == "job 7"
    assert made.prompt_ids == list(b"abc")
    assert made.sampling == SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, noise_key=noise_key(3))
    assert made.stopping == StopParams(max_tokens=9, min_tokens=2, eos_ids=frozenset({EOS}), stop_ids=frozenset({5, 6}))
    assert made.strings is None
    assert made.deadline_s is None


def test_a_row_has_its_deadline() -> None:
    assert runner().row(parse_request({"prompt": "a"}), "job", deadline_s=12.5).deadline_s == 12.5


def test_ignore_eos_leaves_no_eos_to_end_the_row() -> None:
    assert row_of(ignore_eos=True).stopping.eos_ids == frozenset()
    assert row_of(ignore_eos=True, stop_token_ids=[EOS]).stopping.stop_ids == {EOS}


def test_the_noise_follows_the_seed_or_else_the_job() -> None:
    assert row_of("a", seed=1).sampling.noise_key == row_of("b", seed=1).sampling.noise_key
    assert row_of("a", seed=0).sampling.noise_key != row_of("a").sampling.noise_key
    assert row_of("a").sampling.noise_key == row_of("a").sampling.noise_key
    assert row_of("a").sampling.noise_key != row_of("b").sampling.noise_key


@pytest.mark.parametrize(
    ("length", "asked", "expected"), [(10, 20, 20), (10, 54, 54), (10, 55, 54), (10, 2**63 - 1, 54), (63, 9, 1)]
)
def test_max_tokens_is_cut_to_what_the_context_leaves(length: int, asked: int, expected: int) -> None:
    assert row_of(prompt="x" * length, max_tokens=asked).stopping.max_tokens == expected


def test_a_prompt_may_be_text_token_ids_or_a_chat() -> None:
    assert row_of(prompt="é").prompt_ids == [0xC3, 0xA9]
    assert row_of(prompt=[7, EOS, 9]).prompt_ids == [7, EOS, 9]
    assert row_of(messages=[{"role": "user", "content": "hi"}]).prompt_ids == [EOS, *b"hi"]


# What is turned away


def test_a_request_for_another_model_is_turned_away() -> None:
    error = rejection(model="big").error
    assert (error.code, error.param) == (ErrorCode.MODEL_MISMATCH, "model")
    assert error.message == "the request asks for model 'big'; this worker serves 'tiny'"
    assert row_of(model="tiny").prompt_ids == row_of(model=None).prompt_ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 64}, "prompt"),
        ({"prompt": [1] * 64}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 63}]}, "messages"),
    ],
)
def test_a_prompt_that_fills_the_context_is_turned_away_with_both_numbers(body: dict[str, Any], param: str) -> None:
    error = rejection(**body).error
    assert (error.code, error.param) == (ErrorCode.PROMPT_TOO_LONG, param)
    assert error.message == "the prompt has 64 tokens; the context holds 64 and needs one free to generate"


def test_large_numbers_are_written_to_be_read() -> None:
    big = Runner(ByteCodec(), model_name="tiny", max_context=8192)
    with pytest.raises(Rejected, match=r"9,001 tokens; the context holds 8,192"):
        big.row(parse_request({"prompt": "x" * 9001}), "job")


@pytest.mark.parametrize("ids", [[EOS + 1], [1, 2, 2**31 - 1]])
def test_a_token_id_beyond_the_vocabulary_is_turned_away(ids: list[int]) -> None:
    error = rejection(prompt=ids).error
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "prompt")
    assert error.message == f"prompt has the token id {max(ids)}; the model's vocabulary ends at {EOS}"


def test_a_token_that_only_the_tokenizer_has_is_turned_away() -> None:
    # The embedding would fail on it, and with it the whole batch.
    smaller = Runner(ByteCodec(), model_name="tiny", max_context=CONTEXT, vocab_size=EOS)
    assert smaller.row(parse_request({"prompt": [EOS - 1]}), "job").prompt_ids == [EOS - 1]
    for body in ({"prompt": [EOS]}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(Rejected, match=f"has the token id {EOS}; the model's vocabulary ends at {EOS - 1}"):
            smaller.row(parse_request(body), "job")
    larger = Runner(ByteCodec(), model_name="tiny", max_context=CONTEXT, vocab_size=1000)
    with pytest.raises(Rejected):
        larger.row(parse_request({"prompt": [EOS + 1]}), "job")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": "\0"}, "prompt"), ({"messages": [{"role": "user", "content": ""}]}, "messages")]
)
def test_a_prompt_without_tokens_is_turned_away(body: dict[str, Any], param: str) -> None:
    error = rejection(**body).error
    assert (error.code, error.param, error.message) == (ErrorCode.INVALID_REQUEST, param, f"{param} has no tokens")


def test_what_the_codec_refuses_is_turned_away_in_its_words() -> None:
    error = rejection(messages=[{"role": "user", "content": "refuse"}]).error
    assert (error.code, error.param, error.message) == (ErrorCode.INVALID_REQUEST, "messages", "the template refuses")


def test_a_refusal_without_a_field_stays_without_one() -> None:
    class Refusing(ByteCodec):
        def encode_prompt(self, text: str) -> list[int]:
            raise InvalidRequest("not this text")

    with pytest.raises(Rejected) as caught:
        runner(Refusing()).row(parse_request({"prompt": "a"}), "job")
    assert caught.value.error.param is None


# From row to output


def test_a_row_that_ran_out_of_tokens_has_all_its_text() -> None:
    output = finished("héllo", LENGTH)
    assert (output.text, output.finish_reason, output.stop_reason) == ("héllo", FinishReason.LENGTH, None)
    assert output.token_ids == list("héllo".encode())


def test_a_row_ended_by_eos_has_the_text_before_it_and_no_stop_reason() -> None:
    made = row_of()
    made.token_ids = [*b"hi", EOS]
    made.finish = finish_of(made.stopping, 3, EOS, None)
    output = runner().output(made)
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi", FinishReason.STOP, None)
    assert output.token_ids == [*b"hi", EOS]


def test_a_row_ended_by_a_stop_id_has_the_text_before_it_and_the_id_as_stop_reason() -> None:
    output = finished("hi!x", LENGTH, stop_token_ids=[ord("!")])
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi", FinishReason.STOP, ord("!"))
    assert output.token_ids == list(b"hi!")


def test_a_row_ended_by_a_stop_string_has_the_text_before_it() -> None:
    output = finished("caffè END more", LENGTH, stop=["END", "xyz"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("caffè ", FinishReason.STOP, "END")
    assert output.token_ids == list("caffè END".encode())


def test_the_text_is_the_same_whether_or_not_stop_strings_are_looked_for() -> None:
    text = "naïve 日本語 🙂"
    for data in (text.encode(), text.encode()[:-1], b"a\xffb\xc3"):
        assert finished(data, LENGTH, stop=["END"]).text == finished(data, LENGTH).text


def test_a_stop_string_before_min_tokens_stays_in_the_text() -> None:
    output = finished("XaXbX", LENGTH, stop=["X"], min_tokens=3)
    assert (output.text, output.stop_reason) == ("XaXb", "X")


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR])
@pytest.mark.parametrize("stop", [[], ["END"]])
def test_a_row_that_was_ended_keeps_the_text_it_had(reason: FinishReason, stop: list[str]) -> None:
    output = finished("part", Finish(reason=reason), stop=stop)
    assert (output.text, output.finish_reason, output.stop_reason) == ("part", reason, None)
    assert output.token_ids == list(b"part")


def test_a_row_that_was_ended_before_it_began_has_no_text() -> None:
    output = finished("", Finish(reason=FinishReason.CANCELLED))
    assert (output.text, output.token_ids) == ("", [])


def test_an_incomplete_character_at_the_end_is_left_out() -> None:
    assert finished("é".encode()[:1], LENGTH).text == ""


def test_a_request_goes_through_the_engine_and_back() -> None:
    made = row_of("job", prompt="ab", max_tokens=3, temperature=0.0)
    batch = engine(ConstantModel([0.0] * ord("z") + [1.0]))
    batch.submit(made)
    done = batch.step() + batch.step() + batch.step()
    assert [runner().output(each).text for each in done] == ["zzz"]
    counts = {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0, "resumed_tokens": 0}
    assert usage(made).model_dump() == counts


def test_usage_says_how_much_of_the_prompt_was_computed_for_another_row() -> None:
    batch = engine(ConstantModel([0.0] * ord("z") + [1.0]))
    first, second = row_of("first", prompt="x" * 40 + "a"), row_of("second", prompt="x" * 40 + "b")
    run(batch, [first, second])
    assert (usage(first).cached_tokens, usage(second).cached_tokens) == (0, 40)
    assert usage(second).prompt_tokens == 41


# Timing


def test_the_times_add_up() -> None:
    made = row("a")
    made.admitted_at_s, made.first_token_at_s, made.finished_at_s = 100.0, 100.25, 103.5
    found = timing(made, 1.5)
    assert (found.queued_s, found.prefill_s, found.decode_s) == (1.5, 0.25, 3.25)


def test_a_row_that_never_began_took_no_time_and_clocks_that_differ_give_no_negative_wait() -> None:
    made = row("a")
    made.finished_at_s = 5.0
    found = timing(made, -0.5)
    assert (found.queued_s, found.prefill_s, found.decode_s) == (0.0, 0.0, 0.0)
