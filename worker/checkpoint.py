"""A running job's tokens so far, in the form in which they wait in Redis for the worker that goes on from them.

The form: a version byte, a digest of the model's name and the job's data, then each token id as 4 bytes, the lowest
first. Anyone who can write to Redis can have written it, so it is only read, compared and counted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_VERSION = b"\x01"
_DIGEST_BYTES = 16
_ID_BYTES = 4


class InvalidCheckpoint(Exception):
    """What was found is not a checkpoint of this job that a worker could go on from."""


def encode_checkpoint(token_ids: Sequence[int], *, model: str, data: bytes) -> bytes:
    """The checkpoint of a job with this `data`, run by this model."""
    return _VERSION + _digest(model, data) + struct.pack(f"<{len(token_ids)}I", *token_ids)


def decode_checkpoint(raw: bytes, *, model: str, data: bytes) -> list[int]:
    """The token ids of a checkpoint. Raises InvalidCheckpoint if it is not one of this job and this model."""
    head = _VERSION + _digest(model, data)
    if raw[: len(_VERSION)] != _VERSION:
        raise InvalidCheckpoint("it is not in this version's form")
    if raw[: len(head)] != head:
        raise InvalidCheckpoint("it belongs to another request or another model")
    num_ids, rest = divmod(len(raw) - len(head), _ID_BYTES)
    if rest:
        raise InvalidCheckpoint("it is cut off in the middle of a token id")
    return list(struct.unpack_from(f"<{num_ids}I", raw, len(head)))


def _digest(model: str, data: bytes) -> bytes:
    return hashlib.blake2b(model.encode() + b"\0" + data, digest_size=_DIGEST_BYTES).digest()
