from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.shared.errors import ModelError
from headrace.worker.models.convert import convert_gguf

Kind = gguf.GGMLQuantizationType
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ],
    ids=["tied", "untied", "no GQA", "biases", "theta"],
)
def test_the_converted_model_gives_the_logits_of_the_original(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], changes: dict[str, Any]
) -> None:
    original = llama(**changes)
    folder = convert(gguf_maker.write(original))
    converted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(converted), logits(original))


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Kind.F16, 0.005), (Kind.BF16, 0.0), (Kind.Q8_0, 0.01), (Kind.Q4_1, 0.08), (Kind.Q4_0, 0.13), (Kind.Q5_1, 0.04)],
)
def test_quantized_tensors_come_back_within_the_error_of_their_type(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], kind: Kind, tolerance: float
) -> None:
    original = llama()
    converted = tensors_of(convert(gguf_maker.write(original, matrices=kind)))
    for name, tensor in converted.items():
        wanted = original.state_dict()[name]
        largest = wanted.abs().max()
        assert tensor.dtype == torch.bfloat16
        assert (tensor.float() - wanted).abs().max() <= tolerance * largest, name


def test_large_tensors_are_converted_in_parts_that_fit_together(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.worker.models.gguf_weights._BLOCK_ELEMENTS", 300)
    original = llama()
    converted = tensors_of(convert(gguf_maker.write(original)))
    for name, tensor in converted.items():
        assert torch.equal(tensor.float(), original.state_dict()[name]), name


def test_the_configuration_says_what_the_original_said(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> None:
    original = llama().config
    folder = convert(gguf_maker.write(llama()))
    read = AutoConfig.from_pretrained(folder)
    for name in (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
        "max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings bos_token_id eos_token_id"
    ).split():
        assert getattr(read, name) == getattr(original, name), name
    raw = json.loads((folder / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
    assert raw["torch_dtype"] == raw["dtype"] == "bfloat16"


def test_all_tokens_that_end_an_answer_are_in_the_generation_config(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.eos_token_id"] = 0
        settings["tokenizer.ggml.eot_token_id"] = 5

    folder = convert(gguf_maker.write(llama(), edit=edit))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    # 2 is <|im_end|>, which ends an answer whatever the file calls EOS.
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2, 5]


def test_llama_3_rotary_scaling_is_recovered_from_its_factors(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    original = llama(rope_parameters=LLAMA3, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](original.config, device=torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, 32, 2) / 32)

    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)

    folder = convert(gguf_maker.write(original, edit=edit))
    assert AutoConfig.from_pretrained(folder).rope_parameters == LLAMA3
    converted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(converted), logits(original))


def test_linear_rotary_scaling_is_kept(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    original = llama(rope_parameters=linear)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = convert(gguf_maker.write(original, edit=lambda settings, tensors: settings.update(scaling)))
    converted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(converted), logits(original))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split.count": 3}, "one of several parts"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.rope.dimension_count": 16}, "16 of a head's 32 dimensions"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads can't share 3"),
        ({"llama.attention.head_count": "four"}, "should be a whole number, not 'four'"),
        ({"llama.feed_forward_length": 128}, r"ffn_gate.weight has the shape \(96, 64\); \(128, 64\)"),
        ({"llama.block_count": 3}, "9 tensors are missing, the first is blk.2.attn_norm.weight"),
        ({"tokenizer.ggml.pre": "falcon"}, "splitting text 'falcon'"),
        ({"tokenizer.ggml.model": "t5"}, "the tokenizer 't5'"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "vocabulary can't be used"),
        ({"tokenizer.ggml.merges": ["qq"]}, "'qq' is not a pair"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
    ],
)
def test_settings_that_can_not_be_converted_are_named(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], change: dict[str, Any], message: str
) -> None:
    path = gguf_maker.write(llama(), edit=lambda settings, tensors: settings.update(change))
    with pytest.raises(ModelError, match=message) as raised:
        convert(path)
    assert "tiny.gguf" in str(raised.value)


@pytest.mark.parametrize("key", ["llama.embedding_length", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_setting_is_named(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], key: str) -> None:
    path = gguf_maker.write(llama(), edit=lambda settings, tensors: settings.pop(key))
    with pytest.raises(ModelError, match=f"{key} is missing"):
        convert(path)


def test_another_architecture_is_refused_by_name(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> None:
    with pytest.raises(ModelError, match="'mamba' is not supported"):
        convert(gguf_maker.write(llama(), architecture="mamba"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("blk.0.attn_sinks.weight", np.zeros(4, np.float32), "no place in this architecture"),
        ("output_norm.weight", np.zeros(64, np.int32), "stored as I32, a type that can't be read"),
        ("rope_freqs.weight", np.linspace(1, 9, 16, dtype=np.float32), "is not Llama 3's"),
    ],
)
def test_tensors_that_can_not_be_converted_are_named(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], name: str, values: Any, message: str
) -> None:
    path = gguf_maker.write(llama(), edit=lambda settings, tensors: tensors.update({name: values}))
    with pytest.raises(ModelError, match=message) as raised:
        convert(path)
    assert name in str(raised.value)


def test_a_file_cut_short_anywhere_is_a_readable_error(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    whole = gguf_maker.write(llama()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for num_bytes in [0, 3, 4, 7, 20, 60, *range(100, len(whole) - 1, len(whole) // 25)]:
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            convert_gguf(cut, tmp_path)


def test_random_damage_never_shows_as_another_kind_of_error(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM], tmp_path: Path
) -> None:
    whole = gguf_maker.write(llama()).read_bytes()
    damaged = tmp_path / "damaged.gguf"
    random = np.random.default_rng(7)
    outcomes: list[str] = []
    for _ in range(60):
        content = bytearray(whole)
        for position in random.integers(4, 6000, size=4):
            content[position] = random.integers(0, 256)
        damaged.write_bytes(content)
        with contextlib.suppress(ModelError):
            convert_gguf(damaged, tmp_path)
            outcomes.append("converted all the same")
    assert len(outcomes) < 60
