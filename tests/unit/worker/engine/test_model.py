"""Our decoder against transformers' LlamaForCausalLM, which computes every sequence anew, alone and unpadded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import decoder, kv_cache, padded, row, run
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.worker.engine.config import ModelConfig
from headrace.worker.engine.generate import Engine
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


def step(ours: Decoder, cache: Any, tokens: Sequence[int]) -> Tensor:
    """Append one token to each of the first rows, as the loop does."""
    rows = len(tokens)
    positions = cache.lengths[:rows].clone()
    logits = ours.decode_step(torch.tensor(tokens), positions, int(positions.max()) + 1, cache)
    cache.advance(rows)
    return logits


def test_a_padded_batch_of_prompts_of_mixed_lengths(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, ours = pair
    prompts = sequences([1, 2, 31, 32, 64, 77, 96])
    token_ids, lengths = padded(prompts, 96)
    logits = ours.prefill(token_ids, lengths, kv_cache(ours.config, slots=9), 1)
    for found, prompt in zip(logits, prompts, strict=True):
        assert_close(found, reference(model, prompt)[-1])


def test_step_by_step_decoding_across_the_borders_of_blocks(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    model, ours = pair
    prompt_lengths, steps = [1, 60, 125, 127, 128, 129], 6
    wholes = sequences([length + steps for length in prompt_lengths], seed=1)
    cache = kv_cache(ours.config, slots=8)
    ours.prefill(*padded([whole[:-steps] for whole in wholes], 160), cache, 0)
    for slot, length in enumerate(prompt_lengths):
        cache.commit(slot, length)
    found = torch.stack([step(ours, cache, [whole[i - steps] for whole in wholes]) for i in range(steps)], dim=1)
    for logits, whole in zip(found, wholes, strict=True):
        assert_close(logits, reference(model, whole)[-steps:])


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_leave_move_and_are_replaced(checkpoint: Make, kind: str, seed: int) -> None:
    model, folder = checkpoint(hidden_size=64)
    ours = decoder(folder)
    generator = random.Random(seed)
    cache = kv_cache(ours.config, slots=5, kind=kind)
    rows: list[list[int]] = []
    leaves = 0
    for _ in range(60):
        if len(rows) == 5 or (rows and generator.random() < 0.3):
            gone = generator.randrange(len(rows))
            last = rows.pop()
            leaves += 1
            if gone < len(rows):
                rows[gone] = last
                cache.move(len(rows), gone)
        elif not rows or generator.random() < 0.4:
            prompts = sequences([generator.choice([1, 30, 126, 150])], seed=generator.randrange(10**6))
            logits = ours.prefill(*padded(prompts, 160), cache, len(rows))
            cache.commit(len(rows), len(prompts[0]))
            rows += prompts
            assert_close(logits[0], reference(model, prompts[0])[-1])
        else:
            tokens = [generator.randrange(97) for _ in rows]
            for each, token in zip(rows, tokens, strict=True):
                each.append(token)
            for found, each in zip(step(ours, cache, tokens), rows, strict=True):
                assert_close(found, reference(model, each)[-1])
    assert leaves > 8


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


def test_padding_that_overflows_does_no_harm(checkpoint: Make) -> None:
    model, folder = checkpoint()
    ours = decoder(folder)
    ours.embedding.weight.data[0] = torch.nan  # padding is token 0; no prompt has it here
    prompts = [[token or 1 for token in prompt] for prompt in sequences([3, 40], seed=7)]
    found = run(
        Engine(ours, kv_cache(ours.config, slots=2)),
        [row(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)],
    )
    assert [len(tokens) for tokens in found.values()] == [20, 20]
    for i, prompt in enumerate(prompts):
        choices = reference(model, [*prompt, *found[str(i)]][:-1])[len(prompt) - 1 :].argmax(dim=-1)
        assert found[str(i)] == choices.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_the_full_one(checkpoint: Make, dtype: torch.dtype) -> None:
    model, folder = checkpoint()
    ours = decoder(folder, dtype=dtype)
    wholes = sequences([60, 131], seed=8)
    cache = kv_cache(ours.config, slots=2, dtype=dtype)
    ours.prefill(*padded([whole[:-4] for whole in wholes], 160), cache, 0)
    for slot, whole in enumerate(wholes):
        cache.commit(slot, len(whole) - 4)
    found = torch.stack([step(ours, cache, [whole[i - 4] for whole in wholes]) for i in range(4)], dim=1)
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
    logits = ours.prefill(*padded(prompts, 96), kv_cache(ours.config), 0)
    assert_close(logits[0], reference(model, prompts[0])[-1])
