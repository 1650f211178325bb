"""A row's logits are the same to the bit however its tokens have come into the cache: with the whole prompt at once, in
parts, copied from another row, or anew after an interruption."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import Outcome, decoder, kv_cache, packed, record, row
from transformers import LlamaForCausalLM

from headrace.worker.engine import generate
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.rows import Row

Make = Callable[..., tuple[LlamaForCausalLM, Path]]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.2, "top_p": 0.95, "top_k": 40, "seed": 5},
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest, checkpoint: Make) -> Decoder:
    return decoder(checkpoint(hidden_size=64, intermediate_size=1700)[1], dtype=request.param)


def random_tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1, 97) for _ in range(count)]


def random_rows() -> list[Row]:
    """Short and long prompts, half of them greedy; none begins as another."""
    lengths = [1, 2, 15, 63, 64, 65, 100, 127, 128, 129, 170]
    return [
        row(
            str(number),
            random_tokens(length, number),
            max_tokens=3 + number % 4,
            **list(SAMPLINGS.values())[number % 2],
        )
        for number, length in enumerate(lengths)
    ]


# In parts


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_a_prompt_in_parts_gives_the_bits_of_the_whole_at_once(
    model: Decoder, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = record(model, random_rows(), slots=11, kind=kind)
    assert whole.counts.steps == 6  # everything fits into the first pass
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", at_once)
    parts = record(model, random_rows(), slots=4, kind=kind)
    assert parts.counts.steps > (whole.counts.prompt_tokens - len(parts.tokens)) // at_once
    for each in random_rows():
        parts.assert_same(whole, each.row_id)


def test_a_pass_that_completes_no_row_gives_no_logits_and_stores_its_tokens(model: Decoder, kind: str) -> None:
    prompt = random_tokens(90, 1)
    dtype = model.embedding.weight.dtype
    caches = [kv_cache(model.config, dtype=dtype, kind=kind) for _ in range(2)]
    whole = model.forward(packed([prompt]), caches[0])
    for start, stop in ((0, 1), (1, 70), (70, 89)):
        part = packed([prompt[start:stop]], starts=[start])
        logits = model.forward(replace(part, last=torch.empty(0, dtype=torch.int64)), caches[1])
        assert (logits.shape, logits.dtype) == ((0, 97), dtype)
    assert torch.equal(model.forward(packed([prompt[89:]], starts=[89]), caches[1]), whole)
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)


def test_every_position_of_a_prompt_gives_the_bits_of_step_by_step_decoding(model: Decoder, kind: str) -> None:
    prompt = random_tokens(140, 2)
    dtype = model.embedding.weight.dtype
    whole = packed([prompt])
    logits = model.forward(replace(whole, last=torch.arange(140)), kv_cache(model.config, dtype=dtype, kind=kind))
    cache = kv_cache(model.config, dtype=dtype, kind=kind)
    for position, token_id in enumerate(prompt):
        step = model.forward(packed([[token_id]], slots=[2], starts=[position]), cache)
        assert torch.equal(step[0], logits[position]), position


# Copied


def with_common_beginning(beginning: Sequence[int], count: int = 9) -> list[Row]:
    return [
        row(
            str(number),
            [*beginning, *random_tokens(1 + 7 * number, number)],
            max_tokens=4,
            **list(SAMPLINGS.values())[number % 2],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 2, 9])
@pytest.mark.parametrize("length", [16, 63, 64, 65, 131])
def test_a_copied_beginning_gives_the_bits_of_a_computed_one(
    model: Decoder, kind: str, slots: int, length: int
) -> None:
    beginning = random_tokens(length, 99)
    together = record(model, with_common_beginning(beginning), slots=slots, kind=kind)
    assert together.counts.reused_tokens >= 8 * length
    for each in with_common_beginning(beginning):
        alone = record(model, [each], slots=1, kind=kind)
        assert alone.counts.reused_tokens == 0
        together.assert_same(alone, each.row_id)


def test_copied_in_parts_and_in_passing_the_bits_are_the_same(
    model: Decoder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning = random_tokens(150, 98)
    rows = [*with_common_beginning(beginning), *with_common_beginning(beginning[:90], 3)]
    for number, each in enumerate(rows):
        each.row_id = str(number)
    alone = {each.row_id: record(model, [fresh(each)], slots=1, kind=kind) for each in rows}
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 37)
    together = record(model, rows, slots=5, kind=kind)
    assert together.counts.reused_tokens > 5 * 90
    for row_id, outcome in alone.items():
        together.assert_same(outcome, row_id)


def fresh(each: Row, **changes: Any) -> Row:
    return Row(
        row_id=each.row_id, prompt_ids=each.prompt_ids, sampling=each.sampling, stopping=each.stopping, **changes
    )


# Interrupted


def assert_resumes(whole: Outcome, rest: Outcome, row_id: str, at: int) -> None:
    """The rest has the same tokens as the whole, and from token `at` on the same logits to the last bit."""
    assert rest.tokens[row_id] == whole.tokens[row_id]
    assert rest.finishes == whole.finishes
    assert len(rest.logits[row_id]) == len(whole.logits[row_id]) - at
    for ours, theirs in zip(rest.logits[row_id], whole.logits[row_id][at:], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("length", [1, 60, 126])
@pytest.mark.parametrize("at", [1, 2, 9, 11])
def test_a_row_resumed_from_its_tokens_goes_on_to_the_bit(
    model: Decoder, kind: str, sampling: dict[str, Any], length: int, at: int
) -> None:
    prompt = random_tokens(length, 3)
    whole = record(model, [row("a", prompt, max_tokens=12, **sampling)], slots=1, kind=kind)
    assert len(whole.tokens["a"]) == 12
    rest = record(
        model, [row("a", prompt, max_tokens=12, token_ids=whole.tokens["a"][:at], **sampling)], slots=2, kind=kind
    )
    assert_resumes(whole, rest, "a", at)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_row_resumed_in_company_in_parts_and_on_a_copied_beginning_goes_on_to_the_bit(
    model: Decoder, kind: str, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(80, 4)
    whole = record(model, [row("a", prompt, max_tokens=20, **sampling)], slots=1, kind=kind)
    monkeypatch.setattr(generate, "MAX_PROMPT_TOKENS", 7)
    resumed = row("a", prompt, max_tokens=20, token_ids=whole.tokens["a"][:16], **sampling)
    rest = record(model, [row("other", [*prompt, 5], max_tokens=30), resumed], slots=2, kind=kind)
    assert resumed.num_reused >= 60
    assert len(rest.tokens["other"]) == 30
    del rest.finishes["other"]
    assert_resumes(whole, rest, "a", 16)
