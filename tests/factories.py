"""Short ways to the engine's objects, with values that tests don't care about filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.worker.engine import elementwise
from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.generate import Engine, Model, StepCounts
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.packing import PackedTokens
from headrace.worker.engine.placement import make_cache
from headrace.worker.engine.rows import Row
from headrace.worker.engine.sampling import SamplingParams, noise_key
from headrace.worker.engine.stopping import Finish, StopParams, StopStrings
from headrace.worker.engine.weights import load_decoder

CPU = torch.device("cpu")
KINDS = ("plain", "fastest")


def set_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model compute in "plain" torch, or with the "fastest" that this machine has."""
    if kind == "plain":
        monkeypatch.setattr(elementwise, "has_cpu_kernels", lambda device_type, dtype: False)


def model_config(**changes: Any) -> ModelConfig:
    """The shape of a model so small that it need not exist."""
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_positions": 4096,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    return ModelConfig(**(settings | changes))


def kv_cache(
    config: ModelConfig | None = None,
    *,
    slots: int = 4,
    max_context: int = 256,
    dtype: torch.dtype = torch.float32,
    kind: str = "plain",
) -> KVCache:
    """A cache: "plain" torch, or the "fastest" that this machine has."""
    make = KVCache if kind == "plain" else make_cache
    return make(config or model_config(), num_slots=slots, max_context=max_context, dtype=dtype, device=CPU)


def engine(model: Model, *, slots: int = 4, max_context: int = 256) -> Engine:
    """An engine on a model without weights."""
    return Engine(model, kv_cache(slots=slots, max_context=max_context))


def row(row_id: str, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> Row:
    """A row, greedy unless it has a `temperature`. Takes the fields of SamplingParams and StopParams, `strings`,
    `deadline_s`, `token_ids`, `rank`, and a `seed`."""
    stopping = {name: changes.pop(name) for name in tuple(changes) if name in StopParams.__dataclass_fields__}
    seed = changes.pop("seed", row_id)
    others = {name: changes.pop(name) for name in ("strings", "deadline_s", "token_ids", "rank") if name in changes}
    return Row(
        row_id=row_id,
        prompt_ids=list(prompt),
        sampling=SamplingParams(**({"temperature": 0.0, "noise_key": noise_key(seed)} | changes)),
        stopping=StopParams(**({"max_tokens": 8} | stopping)),
        **others,
    )


def stop_strings(*strings: str, pieces: Sequence[str] = (), min_tokens: int = 0) -> StopStrings:
    """Watches a text of which token i adds `pieces[i]`."""
    return StopStrings(strings, lambda token_id: pieces[token_id], min_tokens)


def run(batch: Engine, rows: Sequence[Row]) -> dict[str, list[int]]:
    """Submit rows, step until all are done, and return their tokens."""
    for each in rows:
        batch.submit(each)
    return {each.row_id: each.token_ids for each in drain(batch)}


def drain(batch: Engine) -> list[Row]:
    """Step until no row is left."""
    done: list[Row] = []
    while batch.num_rows:
        done += batch.step()
    return done


@dataclass
class Recorder:
    """A model that notes the logits that each row gets, by the row's id."""

    model: Decoder
    engine: Engine | None = None
    logits: dict[str, list[Tensor]] = field(default_factory=dict)

    def forward(self, tokens: PackedTokens, cache: KVCache) -> Tensor:
        logits = self.model.forward(tokens, cache)
        assert self.engine is not None
        row_in = {each.slot: each.row_id for each in self.engine._live.rows}
        for slot, values in zip(tokens.slots[tokens.last].tolist(), logits, strict=True):
            self.logits.setdefault(row_in[slot], []).append(values.clone())
        return logits


@dataclass
class Outcome:
    """What became of the rows of a run, by their ids."""

    tokens: dict[str, list[int]]
    logits: dict[str, list[Tensor]]
    finishes: dict[str, Finish | None]
    counts: StepCounts

    def assert_same(self, other: Outcome, row_id: str) -> None:
        """The row got the same tokens, and before each the same logits to the last bit."""
        assert self.tokens[row_id] == other.tokens[row_id], row_id
        for number, (ours, theirs) in enumerate(zip(self.logits[row_id], other.logits[row_id], strict=True)):
            assert torch.equal(ours, theirs), f"row {row_id}, token {number}: {(ours - theirs).abs().max()} apart"


def record(model: Decoder, rows: Sequence[Row], *, slots: int, max_context: int = 256, kind: str = "plain") -> Outcome:
    """Run rows through a new engine."""
    recorder = Recorder(model)
    cache = kv_cache(model.config, slots=slots, max_context=max_context, dtype=model.embedding.weight.dtype, kind=kind)
    recorder.engine = batch = Engine(recorder, cache)
    for each in rows:
        batch.submit(each)
    done = drain(batch)
    return Outcome(
        {each.row_id: each.token_ids for each in done},
        recorder.logits,
        {each.row_id: each.finish for each in done},
        batch.counts,
    )


def llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama of transformers, with logits of a few units so that an error in them shows."""
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Norms lie around one, as in real models; the rest, biases too, around zero.
        parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1 and bool((parameter == 1).all())))
    return model


def decoder(folder: Path, *, max_context: int = 256, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with a folder's weights."""
    return load_decoder(folder, ModelConfig.from_folder(folder), max_context=max_context, dtype=dtype, device=CPU)


def packed(
    parts: Sequence[Sequence[int]], *, slots: Sequence[int] | None = None, starts: Sequence[int] | None = None
) -> PackedTokens:
    """Tokens of several rows, each part from a position of its slot on; the logits after each part are wanted.

    The slots are the first ones and the positions begin at 0, unless said otherwise.
    """
    slots, starts = slots or range(len(parts)), starts or [0] * len(parts)
    positions = [start + i for part, start in zip(parts, starts, strict=True) for i in range(len(part))]
    return PackedTokens(
        token_ids=torch.tensor([token_id for part in parts for token_id in part]),
        slots=torch.tensor([slot for part, slot in zip(parts, slots, strict=True) for _ in part]),
        positions=torch.tensor(positions),
        last=torch.tensor([len(part) for part in parts]).cumsum(0) - 1,
        longest=max(positions) + 1,
    )


def attend(
    cache: KVCache, tokens: PackedTokens, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int = 0
) -> Tensor:
    """Store and attend without turning anything: (T, H, D), two of (T, K, D) -> (T, H, D)."""
    mixed = torch.cat((queries, keys, values), dim=1)
    unturned = torch.tensor([1.0, 0.0], dtype=mixed.dtype).view(1, 2, 1).repeat(len(mixed), 1, mixed.shape[2])
    return cache.attend(layer, mixed.flatten(1), unturned, tokens).view_as(queries)


def keys_of(cache: KVCache) -> Tensor:
    """Its keys by position, in whatever layout it keeps them: (L, slots, K, S, D)."""
    keys = cache.keys
    return keys if keys.ndim == 5 else keys.permute(0, 1, 2, 3, 5, 6, 4).flatten(5, 6).flatten(3, 4)


def values_of(cache: KVCache) -> Tensor:
    """Its values by position, as `keys_of`."""
    values = cache.values
    return values if values.ndim == 5 else values.permute(0, 1, 2, 3, 6, 4, 5).flatten(3, 5)
