"""From a GGUF file's settings to config.json, as transformers writes it for a Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.worker.models.gguf_file import GgufFile

_ARCHITECTURE = "llama"
_ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's scaling of the rotary frequencies. A GGUF has only the factors that follow from these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_MAX_SIZE = 2**24


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes and switches of a Llama that decide which tensors it has, and their shapes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def check_supported(file: GgufFile) -> None:
    """Raise ModelError if the file is not a whole model of the Llama architecture as config.json can describe it."""
    architecture = file.get("general.architecture", str)
    if architecture != _ARCHITECTURE:
        raise file.error(
            f"the architecture {architecture!r} is not supported; of GGUF files, {_ARCHITECTURE!r} is. "
            "A folder in the Hugging Face layout is the other way in."
        )
    if file.get("split.count", int, 1) > 1:
        raise file.error("this is one of several parts; join them first (llama-gguf-split --merge)")
    if file.get("llama.expert_count", int, 0) > 0:
        raise file.error("models with several experts (mixture of experts) are not supported")


def read_shape(file: GgufFile) -> LlamaShape:
    """The model's sizes. Raises ModelError for what is missing or can't be."""
    hidden_size = _size(file, "llama.embedding_length")
    num_heads = _size(file, "llama.attention.head_count")
    head_dim = _size(file, "llama.attention.key_length", hidden_size // num_heads)
    num_kv_heads = _size(file, "llama.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise file.error(f"{num_heads} attention heads can't share {num_kv_heads} key/value heads evenly")
    rotary = _size(file, "llama.rope.dimension_count", head_dim)
    if rotary != head_dim or head_dim % 2:
        raise file.error(f"rotary embeddings over {rotary} of a head's {head_dim} dimensions are not supported")
    value_length = _size(file, "llama.attention.value_length", head_dim)
    if value_length != head_dim:
        raise file.error(f"values of {value_length} dimensions beside keys of {head_dim} are not supported")
    return LlamaShape(
        num_layers=_size(file, "llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=_size(file, "llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=len(file.get_list("tokenizer.ggml.tokens", str)),
        tied="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def build_config(file: GgufFile, shape: LlamaShape) -> dict[str, Any]:
    """What config.json holds, without the special tokens. Raises ModelError for a scaling that can't be expressed."""
    rope = _rope_parameters(file, shape)
    # The dtype and the rotary settings stand twice: as transformers 5 writes them, and as readers before it do.
    scaling = {} if rope["rope_type"] == "default" else {"rope_scaling": rope}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": shape.attention_bias,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": _size(file, "llama.context_length"),
        "mlp_bias": shape.mlp_bias,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": _decimal(file.get("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **scaling,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _rope_parameters(file: GgufFile, shape: LlamaShape) -> dict[str, Any]:
    theta = _decimal(file.get("llama.rope.freq_base", float, 10000.0))
    kind = file.get("llama.rope.scaling.type", str, "none")
    if kind == "linear":
        factor = file.get("llama.rope.scaling.factor", float)
        return {"rope_type": "linear", "rope_theta": theta, "factor": _decimal(factor)}
    if kind != "none":
        raise file.error(f"rotary scaling of the type {kind!r} is not supported; none, linear and Llama 3's are")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_parameters(file, shape, theta)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_parameters(file: GgufFile, shape: LlamaShape, theta: float) -> dict[str, Any]:
    """Recover Llama 3's settings from the factors in the file, and check that they give these factors again."""
    found = np.asarray(file.tensors[_ROPE_FACTORS].data, dtype=np.float64).reshape(-1)
    if np.all(found == 1.0):
        return {"rope_type": "default", "rope_theta": theta}
    factor = _decimal(float(found.max()))
    context = file.get("llama.rope.scaling.original_context_length", int, _LLAMA3_CONTEXT)
    expected = _llama3_factors(shape.head_dim, theta, factor, context)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
        raise file.error(f"the rotary scaling in {_ROPE_FACTORS} is not Llama 3's, the only one of its kind supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }


def _llama3_factors(head_dim: int, theta: float, factor: float, context: int) -> np.ndarray[Any, Any]:
    """What each rotary frequency is divided by, from 1 for short wavelengths to `factor` for long: (head_dim / 2,)."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = (context / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    share = np.clip(share, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.get(key, int, default)
    if not 0 < value <= _MAX_SIZE:
        raise file.error(f"the setting {key} is {value}; it should be between 1 and {_MAX_SIZE:,}")
    return value


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32, as it stood in the model's own config: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))
