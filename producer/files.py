"""Reading input: a stream of lines out of a plain, gzip or zstd file, in memory that does not grow with it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from headrace.shared.errors import InputError

MAX_LINE_BYTES = 64 * 2**20
STDIN = "-"
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f
# A kilobyte of zstd can hold megabytes; what one step gives is held at once.
_ZSTD_STEP_BYTES = 1024
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawLine:
    """A line's bytes without its end; None if it is over MAX_LINE_BYTES. Lines count from 1."""

    number: int
    data: bytes | None


def raw_lines(path: str) -> Generator[RawLine, None, None]:
    """The lines of a file that are not blank. Raises InputError if it can't be read, or its compression is damaged."""
    number = 0
    try:
        with _open(path) as stream:
            for number, data in enumerate(_split(stream), 1):
                if data is None or not data.isspace():
                    yield RawLine(number, data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"can't read {path}{f' after line {number}' if number else ''}: {_reason(error)}") from error


@contextlib.contextmanager
def readable_twice(path: str) -> Iterator[str]:
    """A path that can be read more than once: standard input ("-") and pipes are copied to a temporary file."""
    if path != STDIN and (Path(path).is_file() or Path(path).is_dir() or not Path(path).exists()):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="headrace-input-") as spool:
        try:
            with contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb") as source:
                shutil.copyfileobj(source, spool)
            spool.flush()
        except OSError as error:
            raise InputError(f"can't copy {path} to {spool.name}: {_reason(error)}") from error
        yield spool.name


def fingerprint(path: str, settings: Mapping[str, Any]) -> str:
    """The same for the same bytes and settings, and for no others. Raises InputError."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise InputError(f"can't read {path}: {_reason(error)}") from error
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _split(stream: IO[bytes]) -> Iterator[bytes | None]:
    first = True
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if first:
            line, first = line.removeprefix(_BOM), False
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            _skip_line(stream)
            yield None
        else:
            yield line.rstrip(b"\r\n") or b"\n"


def _skip_line(stream: IO[bytes]) -> None:
    while (part := stream.readline(2**20)) and not part.endswith(b"\n"):
        pass


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    if Path(path).is_dir():
        raise InputError(f"can't read {path}: it is a folder; name a file")
    with open(path, "rb") as file:
        magic = file.peek(4)[:4]
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield cast("IO[bytes]", unzipped)
        elif magic == _ZSTD or (magic[1:] == _ZSTD_SKIPPABLE and magic[0] >> 4 == 5):
            with _zstd(file) as unzipped:
                yield unzipped
        else:
            yield file


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a file of zstd frames. Unlike zstandard's own reader, it notices a file that was cut."""

    def __init__(self, file: IO[bytes]) -> None:
        from zstandard import ZstdDecompressor

        self._file = file
        self._new_frame = ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._in_frame = False
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            part = self._frame.unused_data if self._frame.eof else b""
            part = part or self._file.read(_ZSTD_STEP_BYTES)
            if not part:
                if self._in_frame:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            self._pending = memoryview(self._frame.decompress(part))
            self._in_frame = not self._frame.eof
        size = min(len(buffer), len(self._pending))
        buffer[:size], self._pending = self._pending[:size], self._pending[size:]
        return size


@contextlib.contextmanager
def _zstd(file: IO[bytes]) -> Iterator[IO[bytes]]:
    from zstandard import ZstdError

    try:
        with io.BufferedReader(_ZstdReader(file), 2**16) as reader:
            yield cast("IO[bytes]", reader)
    except ZstdError as error:
        raise EOFError(f"zstd: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"it is damaged ({error})"
