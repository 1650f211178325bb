"""From a GGUF file's tensors to model.safetensors: other names, bfloat16, and the rotary layout undone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from headrace.worker.models.gguf_config import LlamaShape
from headrace.worker.models.gguf_file import GgufFile
from headrace.worker.models.safetensors_file import PendingTensor, write_safetensors

# Not weights: factors for the rotary frequencies, which config.json states in its own way.
_NOT_WEIGHTS = {"rope_freqs.weight"}
_BLOCK_ELEMENTS = 2**22
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_weights(file: GgufFile, shape: LlamaShape, path: Path) -> None:
    """Write all weights to a safetensors file at `path`.

    Raises ModelError if a tensor is missing, unknown, of the wrong shape, or stored in a type that can't be read.
    """
    shapes = _expected_shapes(shape)
    _check_tensors(file, shapes)
    write_safetensors(path, [_pending(file.tensors[name], shapes[name], shape) for name in shapes])


def hugging_face_name(name: str) -> str:
    """The name in a Hugging Face checkpoint: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def rotary_order(num_heads: int, head_dim: int) -> np.ndarray[Any, Any]:
    """Which row of a GGUF's Q or K comes where: llama.cpp rotates neighbours, Hugging Face the halves of a head.

    A head's rows are stored as 0, h, 1, h + 1, … (h is half a head) and wanted as 0, 1, 2, …: (num_heads × head_dim,)
    """
    rows = np.arange(num_heads * head_dim)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _expected_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model has, by its name in the GGUF, with its shape as (out, in)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    matrices = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{norm}.weight"] = (hidden,)
        for part, size in matrices.items():
            shapes[f"blk.{layer}.{part}.weight"] = size
            if shape.attention_bias if part.startswith("attn") else shape.mlp_bias:
                shapes[f"blk.{layer}.{part}.bias"] = (size[0],)
    shapes["output_norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["output.weight"] = (shape.vocab_size, hidden)
    return shapes


def _check_tensors(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in shapes if name not in file.tensors]
    if missing:
        raise file.error(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    unknown = sorted(set(file.tensors) - set(shapes) - _NOT_WEIGHTS)
    if unknown:
        raise file.error(f"{len(unknown)} tensors have no place in this architecture, the first is {unknown[0]}")
    readable: set[object] = set()
    for name, wanted in shapes.items():
        tensor = file.tensors[name]
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != wanted:
            raise file.error(f"the tensor {name} has the shape {found}; {wanted} follows from the file's settings")
        if tensor.tensor_type not in readable:
            _check_readable(file, tensor)
            readable.add(tensor.tensor_type)


def _check_readable(file: GgufFile, tensor: Any) -> None:
    try:
        gguf.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise file.error(f"the tensor {tensor.name} is stored as {kind}, a type that can't be read") from None


def _pending(tensor: Any, size: tuple[int, ...], shape: LlamaShape) -> PendingTensor:
    return PendingTensor(
        name=hugging_face_name(tensor.name),
        shape=size,
        chunks=_bfloat16_chunks(tensor, size, _row_order(tensor.name, shape)),
    )


def _row_order(name: str, shape: LlamaShape) -> np.ndarray[Any, Any] | None:
    if ".attn_q." in name:
        return rotary_order(shape.num_heads, shape.head_dim)
    if ".attn_k." in name:
        return rotary_order(shape.num_kv_heads, shape.head_dim)
    return None


def _bfloat16_chunks(tensor: Any, size: tuple[int, ...], order: np.ndarray[Any, Any] | None) -> Iterator[bytes]:
    """The tensor's bytes, some rows at a time; rows are put in order before they are dequantized."""
    elements_a_row = size[1] if len(size) == 2 else 1
    step = max(1, _BLOCK_ELEMENTS // elements_a_row)
    for start in range(0, size[0], step):
        stop = min(start + step, size[0])
        rows = tensor.data[start:stop] if order is None else tensor.data[order[start:stop]]
        values = np.ascontiguousarray(gguf.dequantize(rows, tensor.tensor_type), dtype=np.float32)
        yield torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
