"""Our decoder against transformers' LlamaForCausalLM, which computes every sequence anew, alone and unpadded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import decoder, kv_cache, packed, row, run
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.generate import Engine
from headrace.worker.engine.kv_cache import KVCache
from headrace.worker.engine.model import Decoder

TOLERANCE = 1e-4
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "a key head a query head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "feed-forward bias": {"mlp_bias": True},
    "all biases, tied, no groups": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA_3},
    "a head size of its own": {"head_dim": 24},
    "three layers, odd sizes": {"num_hidden_layers": 3, "intermediate_size": 51, "vocab_size": 101},
    "another epsilon": {"rms_norm_eps": 0.05},
}
Make = Callable[..., tuple[LlamaForCausalLM, Path]]


@pytest.fixture(params=FAMILY.values(), ids=FAMILY)
def pair(request: pytest.FixtureRequest, checkpoint: Make) -> tuple[LlamaForCausalLM, Decoder]:
    model, folder = checkpoint(**request.param)
    return model, decoder(folder)


def reference(model: LlamaForCausalLM, sequence: Sequence[int]) -> Tensor:
    """The logits after each token: (T, V)."""
    with torch.inference_mode():
        return model(torch.tensor([list(sequence)]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.5, "logits so small would hide an error"
    assert (ours - theirs).abs().max() < TOLERANCE


def sequences(lengths: Sequence[int], seed: int = 0, vocab: int = 97) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


def test_prompts_of_mixed_lengths_side_by_side(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, ours = pair
    prompts = sequences([1, 2, 31, 32, 64, 77, 96])
    logits = ours.forward(packed(prompts, slots=range(1, 8)), kv_cache(ours.config, slots=9))
    assert logits.shape == (7, ours.config.vocab_size)
    for found, prompt in zip(logits, prompts, strict=True):
        assert_close(found, reference(model, prompt)[-1])


def test_step_by_step_decoding_across_the_borders_of_blocks(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, ours = pair
    prompt_lengths, steps = [1, 60, 125, 127, 128, 129], 6
    wholes = sequences([length + steps for length in prompt_lengths], seed=1)
    found = prompt_and_steps(ours, kv_cache(ours.config, slots=8), wholes, steps)
    for logits, whole in zip(found, wholes, strict=True):
        assert_close(logits, reference(model, whole)[-steps - 1 :])


def prompt_and_steps(ours: Decoder, cache: KVCache, wholes: Sequence[Sequence[int]], steps: int) -> Tensor:
    """The logits after all but the last `steps` tokens, given at once, and after each of those: (B, steps + 1, V)."""
    logits = [ours.forward(packed([whole[:-steps] for whole in wholes]), cache)]
    for step in range(steps):
        tokens, starts = [whole[step - steps] for whole in wholes], [len(whole) - steps + step for whole in wholes]
        logits.append(ours.forward(packed([[token] for token in tokens], starts=starts), cache))
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_go_and_copy_with_steps_and_parts_of_prompts_in_one_pass(
    checkpoint: Make, kind: str, seed: int
) -> None:
    model, folder = checkpoint(hidden_size=64)
    ours = decoder(folder)
    generator = random.Random(seed)
    cache = kv_cache(ours.config, slots=5, kind=kind)
    rows: dict[int, list[int]] = {}  # by slot: what is in the cache
    coming: dict[int, list[int]] = {}  # by slot: what of the prompt is not
    seen = {"left": 0, "copied": 0, "mixed": 0}
    for _ in range(60):
        if rows and generator.random() < 0.25:
            slot = generator.choice(list(rows))
            coming.pop(slot, None)
            del rows[slot]
            seen["left"] += 1
        free = [slot for slot in range(5) if slot not in rows]
        if free and generator.random() < 0.6:
            slot, begun = generator.choice(free), []
            if rows and generator.random() < 0.5:
                source = generator.choice(list(rows))
                begun = rows[source][: generator.randrange(200)]
                cache.copy_prefix(source, slot, len(begun))
                seen["copied"] += bool(begun)
            length = generator.choice([1, 30, 90, 150]) if len(begun) < 100 else 1
            (coming[slot],) = sequences([length], seed=generator.randrange(10**6))
            rows[slot] = begun
        if not rows:
            continue
        parts = {slot: coming.get(slot) or [generator.randrange(97)] for slot in rows if len(rows[slot]) < 255}
        parts = {slot: part[: generator.choice([1, 20, 200])] for slot, part in parts.items()}
        tokens = packed(list(parts.values()), slots=list(parts), starts=[len(rows[slot]) for slot in parts])
        seen["mixed"] += len({len(part) for part in parts.values()}) > 1
        for slot, found in zip(parts, ours.forward(tokens, cache), strict=True):
            rows[slot] = rows[slot] + parts[slot]
            if slot in coming:
                coming[slot] = coming[slot][len(parts[slot]) :]
            assert_close(found, reference(model, rows[slot])[-1])
    assert min(seen.values()) > 5, seen


def test_cached_decoding_equals_full_recomputation_token_for_token(checkpoint: Make, kind: str) -> None:
    model, folder = checkpoint(hidden_size=64)
    ours = decoder(folder)
    prompts = sequences([1, 5, 33, 60, 80, 100, 31, 2, 9], seed=5)
    batch = Engine(ours, kv_cache(ours.config, slots=4, kind=kind))
    found = run(batch, [row(str(i), prompt, max_tokens=40 + 5 * i) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        whole = [*prompt, *found[str(i)]]
        assert len(found[str(i)]) == 40 + 5 * i
        choices = reference(model, whole[:-1])[len(prompt) - 1 :].argmax(dim=-1)
        # Each token is what the model, run anew on all that came before, finds likeliest.
        assert found[str(i)] == choices.tolist()
    assert len({tuple(tokens[-20:]) for tokens in found.values()}) > 5, "the texts are too alike to tell rows apart"


def test_generate_of_transformers_writes_the_same_text(checkpoint: Make) -> None:
    model, folder = checkpoint(tie_word_embeddings=True)
    prompts = sequences([3, 17, 40], seed=6)
    found = run(engine_of(folder), [row(str(i), prompt, max_tokens=50) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found[str(i)] == theirs[0, len(prompt) :].tolist()


def engine_of(folder: Path) -> Engine:
    ours = decoder(folder)
    return Engine(ours, kv_cache(ours.config, slots=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 64])  # heads of 8, which have no kernel, and of 16
def test_half_precision_stays_near_the_full_one(checkpoint: Make, kind: str, dtype: torch.dtype, width: int) -> None:
    model, folder = checkpoint(hidden_size=width)
    ours = decoder(folder, dtype=dtype)
    wholes = sequences([60, 131], seed=8)
    cache = kv_cache(ours.config, slots=2, dtype=dtype, kind=kind)
    found = prompt_and_steps(ours, cache, wholes, 4)[:, 1:]
    assert found.dtype == dtype
    theirs = torch.stack([reference(model, whole)[-4:] for whole in wholes])
    model_in_half = torch.stack([reference(half(model, dtype), whole)[-4:] for whole in wholes])
    error, usual = (found.float() - theirs).abs().mean(), (model_in_half.float() - theirs).abs().mean()
    assert error < 1.5 * usual, "further from the exact logits than transformers in the same type"


def half(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    copy = LlamaForCausalLM(model.config).to(dtype).eval()
    copy.load_state_dict(model.state_dict())
    return copy


OLD_STYLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"rope_theta": 500.0, "rope_scaling": None}, FAMILY["another theta"]),
    "linear, by its first name": (
        {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        FAMILY["linear rope"],
    ),
    "linear": (
        {"rope_theta": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        FAMILY["linear rope"],
    ),
    "llama3": (
        {"rope_theta": 10_000.0, "rope_scaling": {k: v for k, v in LLAMA_3.items() if k != "rope_theta"}},
        FAMILY["llama3 rope"],
    ),
    "no theta": ({"rope_scaling": None}, {}),
}


@pytest.mark.parametrize(("old", "new"), OLD_STYLE.values(), ids=OLD_STYLE)
def test_a_configuration_of_transformers_4_means_the_same(
    checkpoint: Make, tmp_path: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    model, folder = checkpoint(**new)
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(fields | old))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_folder(folder)
    prompts = sequences([90], seed=9)
    ours = decoder(tmp_path)
    logits = ours.forward(packed(prompts), kv_cache(ours.config))
    assert_close(logits[0], reference(model, prompts[0])[-1])
