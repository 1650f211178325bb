"""A decoder's shape, read from a checkpoint's config.json and checked once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.shared.errors import ModelError

SUPPORTED_MODEL_TYPES = ("llama",)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies: long waves are slowed by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder's sizes. Shape letters: V vocabulary, E width, L layers, H query heads, K key/value heads, D head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float = 1.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_position(self, bytes_per_value: int) -> int:
        """Bytes that one position of one row takes in the KV cache: 2 x L x K x D x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder`/config.json. Raises ModelError if it is missing, broken or of a kind not supported."""
        path = folder / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"can't read {path}: {error}") from None
        if not isinstance(fields, dict):
            raise ModelError(f"{path} is not a JSON object")
        try:
            return cls.from_fields(fields)
        except KeyError as error:
            raise ModelError(f"{path} lacks the field {error}") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """From config.json's fields, as transformers 4 or 5 writes them. Raises KeyError, ValueError or ModelError."""
        _check_supported(fields)
        heads = _size(fields, "num_attention_heads")
        hidden = _size(fields, "hidden_size")
        rope = _rope_fields(fields)
        config = cls(
            vocab_size=_size(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(fields, "intermediate_size"),
            num_layers=_size(fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_size(fields, "num_key_value_heads", if_none=heads),
            head_dim=_size(fields, "head_dim", if_none=hidden // heads),
            max_positions=_size(fields, "max_position_embeddings"),
            norm_eps=float(fields["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0))),
            rope_factor=float(rope["factor"]) if _rope_type(rope) == "linear" else 1.0,
            rope_scaling=_llama3_scaling(rope) if _rope_type(rope) == "llama3" else None,
            tied_head=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bool(fields.get("attention_bias", False)),
            mlp_bias=bool(fields.get("mlp_bias", False)),
        )
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {config.num_heads}, not a multiple of num_key_value_heads, "
                f"which is {config.num_kv_heads}"
            )
        if config.head_dim < 2 or config.head_dim % 2:
            raise ValueError(f"head_dim is {config.head_dim}; rotary embeddings turn pairs, so it must be even")
        return config


def _size(fields: Mapping[str, Any], name: str, *, if_none: int | None = None) -> int:
    """A field that counts something. Without `if_none` it has to be there."""
    value = fields[name] if if_none is None else fields.get(name)
    if value is None and if_none is not None:
        return if_none
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0")
    return value


def _check_supported(fields: Mapping[str, Any]) -> None:
    kind = fields.get("model_type")
    if kind not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ModelError(f"model_type {kind!r} is not supported by this version; supported: {supported}")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {fields['hidden_act']!r} is not supported by this version; supported: silu")
    if fields.get("quantization_config"):
        raise ModelError(
            "quantized checkpoints are not supported by this version; use the unquantized weights or a GGUF"
        )


def _rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """transformers 5 writes rope_parameters, 4 wrote rope_scaling (or null) with rope_theta beside it."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"the rotary embeddings are described by {rope!r}, not by an object")
    if _rope_type(rope) not in ("default", "linear", "llama3"):
        raise ModelError(f"rope type {_rope_type(rope)!r} is not supported; supported: default, linear, llama3")
    return rope


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _llama3_scaling(rope: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )
