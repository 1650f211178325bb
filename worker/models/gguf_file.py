"""Reading a GGUF file: its settings with their types checked, and its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader

from headrace.shared.errors import ModelError

_MAGIC = b"GGUF"
_Scalar = TypeVar("_Scalar", bool, int, float, str)
_Item = TypeVar("_Item", int, float, str)
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class GgufFile:
    """An open GGUF file. Raises ModelError, which names the file, for whatever is missing or malformed in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, self.tensors = _read(path)
        self._read: dict[str, Any] = {}

    def error(self, message: str) -> ModelError:
        """An error about this file, to be raised by whoever found it."""
        return ModelError(f"{self.path.name}: {message}")

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, kind: type[_Scalar], default: _Scalar | None = None) -> _Scalar:
        """The setting `key`; without a default it must be there."""
        if key not in self._fields:
            if default is None:
                raise self.error(f"the setting {key} is missing")
            return default
        value = self._contents(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"the setting {key} should be {_KINDS[kind]}, not {_shorten(value)}")
        checked: _Scalar = value
        return checked

    def get_list(self, key: str, kind: type[_Item]) -> list[_Item]:
        """The setting `key`, which must be there, as a list of which each item is of `kind`."""
        if key not in self._fields:
            raise self.error(f"the setting {key} is missing")
        values = self._contents(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self.error(f"the setting {key} should be a list of which each item is {_KINDS[kind]}")
        return values

    def _contents(self, key: str) -> Any:
        if key not in self._read:
            try:
                self._read[key] = self._fields[key].contents()
            except (ValueError, LookupError) as error:
                raise self.error(f"the setting {key} can't be read: {error}") from error
        return self._read[key]


class _Reader(GGUFReader):  # type: ignore[misc]
    """Stops at the end of the file. The library's own reads nothing from there on, for as long as a length says."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > self.data.size:
            raise ValueError(f"it should go on to byte {end:,}, but ends at {self.data.size:,}")
        return super()._get(offset, dtype, count, override_order)


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The file's settings and tensors, both by name; the tensors' data stay on the disk until they are used."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelError(f"{path.name} is not a GGUF file: it doesn't start with {_MAGIC.decode()}")
        reader = _Reader(path)
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror or error}") from error
    # A damaged file surfaces as whatever numpy happens to raise.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path.name} is damaged, incomplete, or of an unknown GGUF version: {error}") from error
    return reader.fields, {tensor.name: tensor for tensor in reader.tensors}


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
