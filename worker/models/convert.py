"""Converting a GGUF file to a folder in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.worker.models.gguf_config import build_config, check_supported, read_shape
from headrace.worker.models.gguf_file import GgufFile
from headrace.worker.models.gguf_tokenizer import SpecialTokens, read_special_tokens, write_tokenizer
from headrace.worker.models.gguf_weights import write_weights


def convert_gguf(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16), the tokenizer and generation_config.json to `folder`.

    The memory needed does not grow with the model. Raises ModelError, which names the file and what it is in it, if
    the file is damaged or holds something that can't be converted; `folder` is then not fit for use.
    """
    file = GgufFile(path)
    check_supported(file)
    shape = read_shape(file)
    special = read_special_tokens(file)
    config = build_config(file, shape) | _token_ids(special)
    write_tokenizer(file, special, folder)
    write_weights(file, shape, folder / "model.safetensors")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _token_ids(special) | {"eos_token_id": _endings(special)})


def _token_ids(special: SpecialTokens) -> dict[str, object]:
    ids = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.padding}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _endings(special: SpecialTokens) -> int | list[int] | None:
    return special.endings[0] if len(special.endings) == 1 else list(special.endings) or None


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
