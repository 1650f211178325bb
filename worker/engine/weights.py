"""Loading a checkpoint in the Hugging Face layout: safetensors only, nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.shared.errors import ModelError
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.model import Decoder

_UNUSED = ("rotary_emb.inv_freq",)  # older checkpoints store what follows from the configuration


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, Path] = {}
        for path in _weight_files(folder):
            try:
                with safe_open(path, framework="pt") as tensors:
                    self._file_of.update(dict.fromkeys(tensors.keys(), path))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"can't read {path}: {error}") from None
        self._unread = {name for name in self._file_of if not name.endswith(_UNUSED)}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor, converted. Raises ModelError if the checkpoint has none of that name."""
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"the checkpoint in {self._folder} has no tensor {name}")
        self._unread.discard(name)
        with safe_open(path, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor.to(dtype)

    def join(self, names: list[str], dtype: torch.dtype) -> Tensor:
        """Several tensors stacked along their first dimension."""
        return torch.cat([self.read(name, dtype) for name in names])

    def ignore(self, name: str) -> None:
        """Leave a tensor unread on purpose."""
        self._unread.discard(name)

    def check_all_read(self) -> None:
        """Raise ModelError if a tensor was not asked for: a model that we would run wrongly must not run."""
        if self._unread:
            some = ", ".join(sorted(self._unread)[:5])
            raise ModelError(f"the checkpoint in {self._folder} has {len(self._unread)} unknown tensors: {some}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"can't read {index}: {error}") from None
        # Only names of files in this folder: an index must not lead anywhere else.
        return [folder / Path(str(name)).name for name in sorted(names)]
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{folder} has no model.safetensors; only safetensors and GGUF checkpoints are read")
    return [single]


def load_decoder(
    folder: Path, config: ModelConfig, *, max_context: int, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Build the decoder with a checkpoint's weights. Raises ModelError if they are missing, unknown or misshapen."""
    checkpoint = Checkpoint(folder)
    with torch.device("meta"):
        decoder = Decoder(config, max_context)
    state = {name: tensor.to(device) for name, tensor in _state(checkpoint, config, dtype)}
    if config.tied_head:
        state["head.weight"] = state["embedding.weight"]
    checkpoint.check_all_read()
    try:
        decoder.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ModelError(f"the checkpoint in {folder} does not fit its config.json: {error}") from None
    decoder.place(device, dtype)
    return decoder.requires_grad_(False).eval()


def _state(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Our parameter names with the tensors that make them up."""
    yield "embedding.weight", checkpoint.read("model.embed_tokens.weight", dtype)
    yield "norm.weight", checkpoint.read("model.norm.weight", dtype)
    if config.tied_head:
        checkpoint.ignore("lm_head.weight")
    else:
        yield "head.weight", checkpoint.read("lm_head.weight", dtype)
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        yield f"{ours}attention_norm.weight", checkpoint.read(f"{theirs}input_layernorm.weight", dtype)
        yield f"{ours}feed_forward_norm.weight", checkpoint.read(f"{theirs}post_attention_layernorm.weight", dtype)
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            projections = [f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"]
            yield f"{ours}attention.qkv.{kind}", checkpoint.join(projections, dtype)
            yield f"{ours}attention.output.{kind}", checkpoint.read(f"{theirs}self_attn.o_proj.{kind}", dtype)
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            projections = [f"{theirs}mlp.{part}_proj.{kind}" for part in ("gate", "up")]
            yield f"{ours}feed_forward.gate_up.{kind}", checkpoint.join(projections, dtype)
            yield f"{ours}feed_forward.down.{kind}", checkpoint.read(f"{theirs}mlp.down_proj.{kind}", dtype)
