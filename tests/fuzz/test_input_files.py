"""Input files: whatever the bytes, each line becomes a request or an error, or the file is refused with one."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from fuzz import strategies as hostile
from fuzz.settings import many
from hypothesis import given
from hypothesis import strategies as st

from headrace.producer.files import raw_lines
from headrace.producer.formats import AUTO, detect_format, preflight, read_lines
from headrace.shared.errors import HeadraceError

openai_lines = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": hostile.texts | st.just("a") | hostile.values,
        "method": st.just("POST") | hostile.values,
        "url": st.sampled_from(["/v1/chat/completions", "/v1/completions"]) | hostile.texts,
        "body": hostile.requests | hostile.values,
        "extra": hostile.values,
    },
)
lines = st.one_of(
    hostile.requests.map(hostile.as_json),
    openai_lines.map(hostile.as_json),
    hostile.values.map(hostile.as_json),
    hostile.hash_bytes,
    st.sampled_from(
        [b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "prompt": "b"}', b'{"a": NaN}']
    ),
)
contents = st.lists(lines, max_size=5).map(b"\n".join)
PACKERS: dict[str, Any] = {
    "plain": bytes,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zstd": zstandard.ZstdCompressor(1).compress,
    "two": lambda data: gzip.compress(data, 1, mtime=0) + zstandard.ZstdCompressor(1).compress(data),
}


def pack(data: bytes, how: str, cut: int | None, flip: int | None) -> bytes:
    packed = PACKERS[how](data)
    if cut is not None:
        packed = packed[: cut % (len(packed) + 1)]
    return packed if flip is None else hostile.damaged(packed, flip, flip % 256)


inputs = st.builds(
    pack,
    contents,
    st.sampled_from(sorted(PACKERS)),
    st.none() | st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
)


@many(1_500)
@given(data=inputs, format=st.sampled_from([AUTO, "jsonl", "text", "openai"]))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, format: str) -> None:
    path = tmp_path_factory.getbasetemp() / "input"
    path.write_bytes(data)
    with contextlib.suppress(HeadraceError):
        found = detect_format(str(path), format)
        for line in read_lines(str(path), found, {}):
            assert (line.request is None) != (line.error is None)
            json.dumps([line.id, str(line.error)], ensure_ascii=False).encode()
        preflight(str(path), format)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
@pytest.mark.timeout(60)
def test_a_zip_bomb_is_read_as_a_stream(tmp_path: Path, how: str) -> None:
    unpacked = 400 * 2**20
    path = tmp_path / "bomb"
    if how == "gzip":
        with gzip.open(path, "wb", 1) as file:
            for _ in range(unpacked // 2**20):
                file.write(b"0" * 2**20)
    else:
        with path.open("wb") as plain, zstandard.ZstdCompressor(1).stream_writer(plain) as writer:
            for _ in range(unpacked // 2**20):
                writer.write(b"0" * 2**20)
    assert path.stat().st_size < unpacked / 100
    assert [line.data for line in raw_lines(str(path))] == [None]  # one line, over the limit, never held as a whole


def test_a_number_of_too_many_digits_is_named(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text('{"prompt": ' + "9" * 5000 + "}")
    (line,) = read_lines(str(path), detect_format(str(path)), {})
    assert "a whole number of over 4,300 digits" in str(line.error)
