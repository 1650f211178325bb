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

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One tensor, converted. Raises ModelError if the checkpoint has none of that name and shape."""
        path = self._file_of.get(name)
        if path is None:
            raise ModelError(f"the checkpoint in {self._folder} has no tensor {name}")
        self._unread.discard(name)
        with safe_open(path, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        if tensor.shape != shape:
            raise ModelError(
                f"{name} in {path} has the shape {list(tensor.shape)}; by config.json it should be {list(shape)}"
            )
        return tensor.to(dtype)

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
            "".join(names).encode()  # raises for what is no text, or none that a file's name can be
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"can't read {index}: {error}") from None
        # Only names of files in this folder: an index must not lead anywhere else.
        return [folder / Path(name).name for name in sorted(names)]
    single = folder / "model.safetensors"
    if not single.exists():
        raise ModelError(f"{folder} has no model.safetensors; only safetensors and GGUF checkpoints are read")
    return [single]


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    int8: bool = False,
) -> Decoder:
    """Build the decoder with a checkpoint's weights, for products in eight bits with `int8`.

    Raises ModelError if the weights are missing, unknown or misshapen.
    """
    checkpoint = Checkpoint(folder)
    with torch.device("meta"):
        decoder = Decoder(config, max_context)
    state = {name: tensor.to(device) for name, tensor in _state(checkpoint, config, dtype)}
    if config.tied_head:
        state["head.weight"] = state["embedding.weight"]
    checkpoint.check_all_read()
    decoder.load_state_dict(state, assign=True)
    decoder.place(device, dtype, int8=int8)
    return decoder.requires_grad_(False).eval()


def _state(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Our parameter names with the tensors that make them up."""
    vocab, width, inner = config.vocab_size, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def read(name: str, *shape: int) -> Tensor:
        return checkpoint.read(name, shape, dtype)

    yield "embedding.weight", read("model.embed_tokens.weight", vocab, width)
    yield "norm.weight", read("model.norm.weight", width)
    if config.tied_head:
        checkpoint.ignore("lm_head.weight")
    else:
        yield "head.weight", read("lm_head.weight", vocab, width)
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        yield f"{ours}attention_norm.weight", read(f"{theirs}input_layernorm.weight", width)
        yield f"{ours}feed_forward_norm.weight", read(f"{theirs}post_attention_layernorm.weight", width)
        for kind, columns in _kinds(width, biased=config.attention_bias):
            parts = {"q": heads, "k": kv_heads, "v": kv_heads}
            joined = [read(f"{theirs}self_attn.{part}_proj.{kind}", rows, *columns) for part, rows in parts.items()]
            yield f"{ours}attention.qkv.{kind}", torch.cat(joined)
        for kind, columns in _kinds(heads, biased=config.attention_bias):
            yield f"{ours}attention.output.{kind}", read(f"{theirs}self_attn.o_proj.{kind}", width, *columns)
        for kind, columns in _kinds(width, biased=config.mlp_bias):
            joined = [read(f"{theirs}mlp.{part}_proj.{kind}", inner, *columns) for part in ("gate", "up")]
            yield f"{ours}feed_forward.gate_up.{kind}", torch.cat(joined)
        for kind, columns in _kinds(inner, biased=config.mlp_bias):
            yield f"{ours}feed_forward.down.{kind}", read(f"{theirs}mlp.down_proj.{kind}", width, *columns)


def _kinds(columns: int, *, biased: bool) -> list[tuple[str, tuple[int, ...]]]:
    """What a projection consists of, each with its dimensions after the first."""
    return [("weight", (columns,)), ("bias", ())] if biased else [("weight", (columns,))]
