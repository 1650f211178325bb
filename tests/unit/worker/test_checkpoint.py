from __future__ import annotations

import pytest
from fakes import EOS, ByteCodec

from headrace.shared.schema import parse_request
from headrace.worker.checkpoint import InvalidCheckpoint, decode_checkpoint, encode_checkpoint
from headrace.worker.engine.rows import Row
from headrace.worker.engine.stopping import finish_of
from headrace.worker.runner import Runner

DATA = b'["task", null, [], {}]'


def resumed(token_ids: list[int], **body: object) -> Row:
    runner = Runner(ByteCodec(), model_name="tiny", max_context=64)
    row = runner.row(parse_request({"prompt": "hello"} | body), "job")
    runner.resume(row, token_ids)
    return row


@pytest.mark.parametrize("token_ids", [[], [0], [1, 2**31 - 1, 2**32 - 1], list(range(5000))])
def test_what_is_encoded_comes_back(token_ids: list[int]) -> None:
    raw = encode_checkpoint(token_ids, model="tiny", data=DATA)
    assert decode_checkpoint(raw, model="tiny", data=DATA) == token_ids
    assert len(raw) == 17 + 4 * len(token_ids)


def test_token_ids_are_stored_as_four_bytes_the_lowest_first() -> None:
    assert encode_checkpoint([0x01020304], model="tiny", data=DATA).endswith(b"\x04\x03\x02\x01")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "form"),
        (b"\x02" + b"0" * 20, "form"),
        (b"[1, 2, 3]", "form"),
        (b"\x01", "another request"),
        (encode_checkpoint([1], model="tiny", data=DATA + b" "), "another request"),
        (encode_checkpoint([1], model="other", data=DATA), "another model"),
        (encode_checkpoint([1, 2], model="tiny", data=DATA)[:-1], "cut off"),
    ],
)
def test_what_is_not_this_jobs_checkpoint_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=says):
        decode_checkpoint(raw, model="tiny", data=DATA)


def test_a_row_goes_on_from_its_tokens() -> None:
    row = resumed([*b"abc"], max_tokens=4)
    assert row.token_ids == [*b"abc"]
    assert row.finish is None


@pytest.mark.parametrize(
    ("token_ids", "body", "says"),
    [
        ([EOS + 1], {}, "vocabulary"),
        ([2**32 - 1], {}, "vocabulary"),
        ([1, EOS, 1], {}, "ended at its token 2"),
        ([7, 8], {"stop_token_ids": [8]}, "ended at its token 2"),
        ([*b"abEND"], {"stop": "END"}, "ended at its token 5"),
        ([1, 2, 3], {"max_tokens": 3}, "ended at its token 3"),
        ([1] * 60, {}, "ended at its token 59"),  # the context holds 64, of which the prompt has 5
    ],
)
def test_tokens_that_the_row_could_not_have_come_to_are_refused(
    token_ids: list[int], body: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=says):
        resumed(token_ids, **body)


def test_a_stop_string_is_found_across_the_point_of_resuming() -> None:
    row = resumed([*b"ab EN"], stop="END")
    assert row.strings is not None
    finish = finish_of(row.stopping, 6, ord("D"), row.strings)
    assert finish is not None
    assert finish.stopped_by == "END"
    assert row.strings.text == "ab "
