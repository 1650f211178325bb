from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import decoder, kv_cache, packed
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.shared.errors import ModelError

Make = Callable[..., tuple[LlamaForCausalLM, Path]]
LAYER = "model.layers.1."


def copy(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The checkpoint with changed tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def logits(folder: Path) -> Tensor:
    ours = decoder(folder)
    return ours.forward(packed([[5, 6, 7, 8]]), kv_cache(ours.config))


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Make, tmp_path: Path) -> None:
    model, folder = checkpoint()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path), logits(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_weights_have_the_asked_type_and_the_checkpoints_values(checkpoint: Make, dtype: torch.dtype) -> None:
    model, folder = checkpoint()
    ours = decoder(folder, dtype=dtype)
    assert {parameter.dtype for parameter in ours.parameters() if parameter.numel()} == {dtype}
    assert ours.rotations.dtype == dtype
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    attention = model.model.layers[1].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(dtype)
    # What a product with the rows of the unit matrix gives is the weight itself.
    assert torch.equal(ours.layers[1].attention.qkv(torch.eye(32, dtype=dtype)), joined.T)


def test_a_tied_head_is_one_tensor_in_memory_even_if_the_checkpoint_stores_it(checkpoint: Make, tmp_path: Path) -> None:
    _, folder = checkpoint(tie_word_embeddings=True)
    stored = copy(folder, tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(97, 32)}))
    for each in (folder, stored):
        ours = decoder(each)
        assert ours.head.weight.data_ptr() == ours.embedding.weight.data_ptr()
    assert torch.equal(logits(stored), logits(folder))


def test_stored_rotary_frequencies_are_not_needed(checkpoint: Make, tmp_path: Path) -> None:
    _, folder = checkpoint()
    stored = copy(folder, tmp_path, lambda t: t.update({f"{LAYER}self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert torch.equal(logits(stored), logits(folder))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{LAYER}self_attn.k_proj.weight",
        f"{LAYER}self_attn.k_proj.bias",
        f"{LAYER}self_attn.o_proj.bias",
        f"{LAYER}mlp.up_proj.weight",
        f"{LAYER}mlp.down_proj.bias",
        f"{LAYER}input_layernorm.weight",
        f"{LAYER}post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(checkpoint: Make, tmp_path: Path, name: str) -> None:
    _, folder = checkpoint(attention_bias=True, mlp_bias=True)
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        decoder(copy(folder, tmp_path, lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.input_layernorm.weight", f"{LAYER}self_attn.q_proj.bias", f"{LAYER}self_attn.q_norm.weight", "x"],
)
def test_a_tensor_that_would_be_left_unused_is_refused(checkpoint: Make, tmp_path: Path, name: str) -> None:
    _, folder = checkpoint()
    with pytest.raises(ModelError, match=f"has 1 unknown tensors: {name}"):
        decoder(copy(folder, tmp_path, lambda tensors: tensors.update({name: torch.zeros(32)})))


def narrower(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][..., :-1]})


def shifted(first: str, second: str) -> Callable[[dict[str, Tensor]], object]:
    """A row moves from one tensor to another, so that both together still have the right shape."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[second] = torch.cat((tensors[second], tensors[first][-1:]))
        tensors[first] = tensors[first][:-1]

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (narrower("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (narrower("lm_head.weight"), "lm_head.weight"),
        (narrower("model.norm.weight"), "model.norm.weight"),
        (narrower(f"{LAYER}self_attn.k_proj.weight"), f"{LAYER}self_attn.k_proj.weight"),
        (narrower(f"{LAYER}self_attn.v_proj.bias"), f"{LAYER}self_attn.v_proj.bias"),
        (narrower(f"{LAYER}self_attn.o_proj.weight"), f"{LAYER}self_attn.o_proj.weight"),
        (narrower(f"{LAYER}mlp.down_proj.weight"), f"{LAYER}mlp.down_proj.weight"),
        (narrower(f"{LAYER}mlp.down_proj.bias"), f"{LAYER}mlp.down_proj.bias"),
        (
            shifted(f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.k_proj.weight"),
            f"{LAYER}self_attn.q_proj.weight",
        ),
        (shifted(f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"), f"{LAYER}mlp.gate_proj.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(
    checkpoint: Make, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], named: str
) -> None:
    _, folder = checkpoint(attention_bias=True, mlp_bias=True)
    with pytest.raises(ModelError, match=f"{named} in .* has the shape"):
        decoder(copy(folder, tmp_path, change))


def test_a_folder_without_safetensors_is_refused(checkpoint: Make, tmp_path: Path) -> None:
    _, folder = checkpoint()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors and GGUF checkpoints are read"):
        decoder(tmp_path)


def test_a_broken_file_is_a_model_error(checkpoint: Make, tmp_path: Path) -> None:
    _, folder = checkpoint()
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for broken in (b"", b"\xff" * 100, whole[: len(whole) // 2]):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ModelError, match=r"can't read .*model\.safetensors"):
            decoder(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "absent.safetensors"}}',
        '{"weight_map": {"a": "x", "b": 1}}',
        '{"weight_map": {"a": "\\ud800"}}',
        "[" * 100_000,
    ],
    ids=lambda index: index[:40],
)
def test_a_broken_index_is_a_model_error(checkpoint: Make, tmp_path: Path, index: str) -> None:
    _, folder = checkpoint()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="can't read"):
        decoder(tmp_path)


def test_an_index_does_not_lead_out_of_its_folder(checkpoint: Make, tmp_path: Path) -> None:
    _, folder = checkpoint()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    names: dict[str, Any] = dict.fromkeys(load_file(folder / "model.safetensors"), str(folder / "model.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=f"can't read {tmp_path}/model.safetensors"):
        decoder(tmp_path)
