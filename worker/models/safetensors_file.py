"""Writing a safetensors file piece by piece, so that a model far larger than the memory can be converted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ALIGNMENT_BYTES = 8
_BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class PendingTensor:
    """A bfloat16 tensor that is yet to be written; `chunks` gives its bytes in order, little-endian."""

    name: str
    shape: tuple[int, ...]
    chunks: Iterator[bytes]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BFLOAT16_BYTES


def write_safetensors(path: Path, tensors: Sequence[PendingTensor]) -> None:
    """Write the tensors in the given order, and have them on the disk when this returns."""
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            written = sum(file.write(chunk) for chunk in tensor.chunks)
            assert written == tensor.num_bytes, f"{tensor.name}: {written} bytes, not {tensor.num_bytes}"
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Iterable[PendingTensor]) -> bytes:
    """The length of the description as 8 bytes, then the description as JSON, padded for alignment."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
