"""Tiny models made in the tests: a GGUF file as llama.cpp's converter writes it, and folders with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "l l", "Ã ©"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The names of the layers' parts, from llama.cpp's documentation of the format.
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Every test has a cache folder of its own, except those on the demo model."""
    folder = tmp_path / "cache"
    if "model" not in request.keywords:
        monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder


def byte_level_vocabulary() -> list[str]:
    return [*SPECIAL, *pre_tokenizers.ByteLevel.alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def interleave(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Q or K as the format wants it: in each head, row i of the first half beside row i of the second."""
    head_dim = len(weight) // num_heads
    rows = []
    for head in range(num_heads):
        for i in range(head_dim // 2):
            rows += [head * head_dim + i, head * head_dim + i + head_dim // 2]
    return weight[rows]


def gguf_tensors(model: LlamaForCausalLM) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", values
        elif name == "model.norm.weight":
            yield "output_norm.weight", values
        elif name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                yield "output.weight", values
        else:
            _, _, layer, rest = name.split(".", 3)
            part, _, suffix = rest.rpartition(".")
            part = PARTS[part]
            yield f"blk.{layer}.{part}.{suffix}", interleave(values, heads[part]) if part in heads else values


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama with grouped queries and a head size of its own; its weights are exact in bfloat16."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": len(byte_level_vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


Edit = Callable[[dict[str, Any], dict[str, np.ndarray[Any, Any]]], None]


def keep(settings: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """Change nothing."""


class GgufMaker:
    """Writes a model as a GGUF file; `edit` may change the settings and the tensors before they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def settings(self, model: LlamaForCausalLM) -> dict[str, Any]:
        config = model.config
        tokens = byte_level_vocabulary()
        return {
            "llama.context_length": config.max_position_embeddings,
            "llama.embedding_length": config.hidden_size,
            "llama.block_count": config.num_hidden_layers,
            "llama.feed_forward_length": config.intermediate_size,
            "llama.attention.head_count": config.num_attention_heads,
            "llama.attention.head_count_kv": config.num_key_value_heads,
            "llama.attention.key_length": config.head_dim,
            "llama.attention.value_length": config.head_dim,
            "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "llama.rope.dimension_count": config.head_dim,
            "llama.rope.freq_base": config.rope_parameters["rope_theta"],
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }

    def write(
        self,
        model: LlamaForCausalLM,
        *,
        name: str = "tiny.gguf",
        architecture: str = "llama",
        matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        edit: Edit = keep,
    ) -> Path:
        settings, tensors = self.settings(model), dict(gguf_tensors(model))
        edit(settings, tensors)
        path = self._folder / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in settings.items():
            _add(writer, key, value)
        for tensor, values in tensors.items():
            kind = matrices if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            if values.dtype == np.float32:
                writer.add_tensor(tensor, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
            else:
                writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


@pytest.fixture
def gguf_maker(tmp_path: Path) -> GgufMaker:
    return GgufMaker(tmp_path)


@pytest.fixture(scope="session")
def llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


class FolderMaker:
    """Writes folders in the Hugging Face layout, with a tokenizer and no real weights."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def byte_level(self) -> Tokenizer:
        vocabulary = {token: index for index, token in enumerate(byte_level_vocabulary())}
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
        return tokenizer

    def write(
        self, tokenizer: Tokenizer | None = None, *, name: str = "model", template: str | None = TEMPLATE, **files: Any
    ) -> Path:
        folder = self._folder / name
        folder.mkdir()
        (tokenizer or self.byte_level()).save(str(folder / "tokenizer.json"))
        contents = {
            "config": {"model_type": "llama", "eos_token_id": 2},
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"},
        }
        for file, content in (contents | files).items():
            (folder / f"{file}.json").write_text(json.dumps(content))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        (folder / "model.safetensors").write_bytes(b"")
        return folder


@pytest.fixture
def folder_maker(tmp_path: Path) -> FolderMaker:
    return FolderMaker(tmp_path)
