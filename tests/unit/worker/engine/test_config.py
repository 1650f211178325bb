from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import model_config

from headrace.shared.errors import ModelError
from headrace.worker.engine.config import ModelConfig, RopeScaling

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(tmp_path: Path, without: str = "", **changes: Any) -> ModelConfig:
    fields = {name: value for name, value in (FIELDS | changes).items() if name != without}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_folder(tmp_path)


def test_the_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config == model_config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=512,
        norm_eps=1e-5,
        rope_theta=10_000.0,
    )
    assert config.queries_per_kv == 2
    assert config.kv_bytes_per_position(2) == 2 * 2 * 2 * 16 * 2


def test_what_is_left_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, without="num_key_value_heads", head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.tied_head, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_is_read_in_both_styles(tmp_path: Path, name: str) -> None:
    linear = read(tmp_path, **{name: {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}})
    assert (linear.rope_factor, linear.rope_theta, linear.rope_scaling) == (4.0, 500.0, None)
    stretched = read(tmp_path, rope_theta=1e5, **{name: LLAMA_3})
    assert stretched.rope_theta == 1e5
    assert stretched.rope_factor == 1.0
    assert stretched.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    assert read(tmp_path, rope_theta=1e6, **{name: None}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported by this version; supported: llama"),
        ({"model_type": None}, r"model_type None"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantized checkpoints are not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"lacks the field 'factor'"),
        ({"rope_parameters": LLAMA_3 | {"factor": None}}, r"config.json: "),
        ({"rope_parameters": "llama3"}, r"'llama3', not by an object"),
        ({"num_key_value_heads": 3}, r"num_attention_heads is 4, not a multiple of num_key_value_heads, which is 3"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0; it must be a whole number above 0"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads is 0"),
        ({"num_hidden_layers": -2}, r"num_hidden_layers is -2"),
        ({"hidden_size": "64"}, r"hidden_size is '64'"),
        ({"vocab_size": 1e400}, r"vocab_size is inf"),
        ({"intermediate_size": 96.5}, r"intermediate_size is 96.5"),
        ({"head_dim": 15}, r"head_dim is 15"),
        ({"hidden_size": 2}, r"head_dim is 0"),
        ({"rms_norm_eps": "small"}, r"config.json: could not convert"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_run_is_refused_and_says_why(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"model_type", "hidden_act", "num_key_value_heads"}))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"lacks the field '{name}'"):
        read(tmp_path, without=name)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\udcff", "[" * 100_000], ids=lambda text: repr(text[:9]))
def test_a_broken_file_is_a_model_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't read .*config\.json"):
        ModelConfig.from_folder(tmp_path)
