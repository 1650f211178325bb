"""Input: formats, compression, malformed lines, duplicates, and flat memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from headrace.producer import DuplicateIds, InputError, InvalidRequest, files
from headrace.producer.files import readable_twice
from headrace.producer.formats import Format, detect_format, preflight, read_lines
from headrace.producer.lines import Chat, Line, check_defaults


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def read(path: str, **defaults: object) -> list[Line]:
    return list(read_lines(path, detect_format(path), defaults))


def test_text_is_one_prompt_a_line_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", "first", "", "  ", " second\r")
    lines = read(path, max_tokens=3)
    assert [(line.id, line.request.prompt, line.request.max_tokens) for line in lines] == [
        ("line-1", "first", 3),
        ("line-4", " second", 3),
    ]


def test_json_lines_carry_fields_and_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p", "", {"id": "a", "prompt": "x", "top_k": 5}, {"messages": [{"role": "user", "content": "y"}]}
    )
    first, second = read(path, top_k=9, temperature=0.0)
    assert (first.id, first.request.top_k, first.request.temperature) == ("a", 5, 0.0)
    assert (second.id, second.request.id, second.request.top_k) == ("line-3", "line-3", 9)


@pytest.mark.parametrize(
    ("first", "format"),
    [
        ('{"prompt": "x"}', Format.JSONL),
        ("{broken", Format.JSONL),
        ("Tell me {this}", Format.TEXT),
        ('["a"]', Format.TEXT),
        ('{"custom_id": "a", "body": {}}', Format.OPENAI_CHAT),
        ('{"custom_id": "a", "url": "/v1/completions"}', Format.OPENAI_COMPLETIONS),
    ],
)
def test_the_first_line_speaks_for_the_format(tmp_path: Path, first: str, format: Format) -> None:
    assert detect_format(write(tmp_path / "p", "", first)) is format


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    path = write(tmp_path / "p", '{"prompt": "x"}')
    assert preflight(path, "text").format is Format.TEXT
    assert preflight(path, "openai").bad == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{oops", "line 2: not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'"text"', "line 2: a request is a JSON object, not a string"),
        (b'{"prompt": "\xff"}', "line 2: not UTF-8: byte 0xff at position 13"),
        (b'{"prompt": "x", "temprature": 1}', "line 2: temprature: unknown field"),
        (b'{"prompt": "x", "top_p": "high"}', "line 2: top_p: input should be a valid number"),
        (b'{"prompt": "x", "top_p": NaN}', "line 2: not JSON: NaN is no JSON number"),
        (b'{"prompt": "\\ud800"}', "line 2: the text has a lone surrogate"),
        (b'{"\\ud800": 1}', "line 2: the text has a lone surrogate"),
        (b'{"id": 5, "prompt": "x"}', "line 2: id: input should be a valid string"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "line 2: "),
        (b'{"prompt": ' + b"[" * 100_000 + b"}", "line 2: not JSON that can be read: nested too deeply"),
        (b"\x00\x01\x02", "line 2: not JSON"),
    ],
)
def test_a_malformed_line_is_its_own_error_and_the_others_go_on(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "p"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    first, bad, last = read(str(path))
    assert first.request
    assert last.request
    assert bad.id == "line-2"
    assert str(bad.error).startswith(text)
    str(bad.error).encode()


def test_random_bytes_never_crash(tmp_path: Path) -> None:
    noise = random.Random(0)
    path = tmp_path / "p"
    for format in ("auto", "jsonl", "text", "openai"):
        for _ in range(50):
            path.write_bytes(b"x" + noise.randbytes(2_000))
            assert preflight(str(path), format).count > 0


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compression_is_seen_by_its_magic_bytes(tmp_path: Path, compress) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(compress(b'{"prompt": "a"}\n') + compress(b'{"prompt": "b"}\n'))
    assert [line.request.prompt for line in read(str(path))] == ["a", "b"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_damaged_compression_is_refused_as_a_whole(tmp_path: Path, compress) -> None:
    data = compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(20_000)))
    path = tmp_path / "p"
    for damaged in (data[: len(data) // 2], data[:100] + bytes(200) + data[300:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="can't read"):
            preflight(str(path))


def test_a_line_over_the_limit_is_an_error_and_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10_000)
    path = tmp_path / "p"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n')
        for _ in range(200):
            file.write(b"x" * 100_000)
        file.write(b'\n{"prompt": "b"}\n')
    tracemalloc.start()
    first, bad, last = read(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.request.prompt, last.request.prompt) == ("a", "b")
    assert "line 2: longer than" in str(bad.error)
    assert peak < 5_000_000


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}')
    assert read(str(path))[0].request.prompt == "a"


def test_preflight_counts_requests_and_malformed_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "p", {"prompt": "a"}, {"prompt": 1}, {})
    found = preflight(path)
    assert (found.count, found.bad, found.source) == (3, 2, "requests")
    assert found.first_error.startswith("line 2: ")


def test_duplicates_are_named_with_both_lines(tmp_path: Path) -> None:
    lines = [{"id": f"i{n % 10}", "prompt": "x"} for n in range(30)]
    with pytest.raises(DuplicateIds) as caught:
        preflight(write(tmp_path / "p", *lines))
    assert "id 'i0' is on lines 1 and 11; id 'i1' is on lines 2 and 12" in str(caught.value)
    assert str(caught.value).count("is on lines") == 5
    assert "and more" in str(caught.value)


def test_an_explicit_id_may_not_be_one_that_another_line_gets(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIds, match="'line-2' is on lines 1 and 2"):
        preflight(write(tmp_path / "p", {"id": "line-2", "prompt": "x"}, {"prompt": "y"}))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_input_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no request"):
        preflight(str(path))


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't read .*nope: no such file"):
        preflight(str(tmp_path / "nope"))
    with pytest.raises(InputError, match="it is a folder"):
        preflight(str(tmp_path))


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    with readable_twice("-") as path:
        assert preflight(path).count == 2
        assert len(read(path)) == 2
    assert not Path(path).exists()


def test_a_pipe_can_be_read_twice() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a\nb\n")
    os.close(writer)
    with readable_twice(f"/dev/fd/{reader}") as path:
        assert (preflight(path).count, len(read(path))) == (2, 2)
    os.close(reader)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        for i in range(30_000):
            file.write(f"prompt {i} {'x' * 300}\n")
    tracemalloc.start()
    assert preflight(str(path)).count == 30_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_defaults_are_checked_as_any_request(tmp_path: Path) -> None:
    assert check_defaults({"max_tokens": None, "top_k": 3}) == {"top_k": 3}
    with pytest.raises(InvalidRequest, match="top_p"):
        check_defaults({"top_p": 7.0})


SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(("system", "messages"), [(None, [HELLO]), ("Be brief.", [SYSTEM, HELLO])])
@pytest.mark.parametrize("line", [b"hello", b'{"prompt": "hello"}'])
def test_a_prompt_becomes_a_users_message(
    tmp_path: Path, system: str | None, messages: list[dict[str, str]], line: bytes
) -> None:
    path = tmp_path / "in"
    path.write_bytes(line)
    found = preflight(str(path), chat=Chat(system))
    (only,) = read_lines(str(path), found.format, {}, found.chat)
    assert only.request is not None
    assert only.request.prompt is None
    assert [message.model_dump(exclude_unset=True) for message in only.request.messages or ()] == messages


def test_lines_with_messages_keep_theirs_and_token_ids_can_not_be_said(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(
        '{"messages": [{"role": "user", "content": "hello"}]}\n{"prompt": [1, 2], "id": "ids"}\n'
        '{"prompt": "a", "messages": [{"role": "user", "content": "hello"}]}\n{"id": "none"}\n'
    )
    chat, ids, both, none = read_lines(str(path), Format.JSONL, {}, Chat("Be brief."))
    assert chat.request is not None
    assert len(chat.request.messages or ()) == 1
    assert (ids.id, both.request, none.request) == ("ids", None, None)
    assert str(ids.error).startswith("line 2: with --chat a prompt is text")


def test_openai_lines_are_not_made_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"}}')
    with pytest.raises(InputError, match="leave --chat out"):
        preflight(str(path), chat=Chat())
