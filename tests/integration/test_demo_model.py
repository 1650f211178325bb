"""The real model: our decoder against transformers', and a job's answer against itself in other company."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from factories import KINDS, Outcome, decoder, kv_cache, packed, record, set_kind
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.shared.schema import Request, parse_request
from headrace.worker.engine.model import Decoder
from headrace.worker.engine.rows import Row
from headrace.worker.models import TextCodec, resolve
from headrace.worker.runner import Runner

pytestmark = pytest.mark.model

PROMPTS_FILE = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
MAX_CONTEXT = 512
NUM_PROMPTS = 40
NUM_TOKENS = 64


@dataclass(frozen=True)
class Demo:
    """The model's folder, and the requests of the demo."""

    folder: Path
    codec: TextCodec
    requests: list[Request]

    def row(self, number: int, **changes: object) -> Row:
        """The row of one of the requests, always the same."""
        runner = Runner(self.codec, model_name="demo", max_context=MAX_CONTEXT)
        return runner.row(self.requests[number].model_copy(update=changes), str(number))


@pytest.fixture(scope="module")
def demo() -> Demo:
    folder = resolve("smollm2-135m").folder
    lines = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    return Demo(folder, TextCodec.load(folder), [parse_request(json.loads(line)) for line in lines])


@pytest.fixture(scope="module")
def reference(demo: Demo) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours(demo: Demo) -> Decoder:
    return decoder(demo.folder, max_context=MAX_CONTEXT, dtype=torch.float32)


def generate(model: LlamaForCausalLM, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy texts of transformers, in batches of like lengths padded on the left, to the first EOS."""
    texts: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), 20):
        chosen = order[start : start + 20]
        width = max(len(prompts[index]) for index in chosen)
        pads = [width - len(prompts[index]) for index in chosen]
        written = model.generate(
            torch.tensor([[0] * pad + prompts[index] for pad, index in zip(pads, chosen, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        eos = model.generation_config.eos_token_id
        for index, tokens in zip(chosen, written[:, width:].tolist(), strict=True):
            texts[index] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return [texts[index] for index in range(len(prompts))]


def test_logits_in_float32_are_those_of_transformers(demo: Demo, reference: LlamaForCausalLM, ours: Decoder) -> None:
    steps = 3
    wholes = [demo.row(number).prompt_ids for number in (0, 20, 36, 45)]
    wholes.append((wholes[2] * 2)[: 127 + steps])  # over the border of a block
    cache = kv_cache(ours.config, slots=len(wholes), max_context=MAX_CONTEXT)
    found = [ours.forward(packed([whole[:-steps] for whole in wholes]), cache)]
    for step in range(steps):
        tokens, starts = [[whole[step - steps]] for whole in wholes], [len(whole) - steps + step for whole in wholes]
        found.append(ours.forward(packed(tokens, starts=starts), cache))
    for row, whole in enumerate(wholes):
        with torch.inference_mode():
            expected: Tensor = reference(torch.tensor([whole]), use_cache=False).logits[0, -steps - 1 :]
        assert (torch.stack(found)[:, row] - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def texts_of_transformers(demo: Demo, reference: LlamaForCausalLM) -> list[list[int]]:
    return generate(reference, [demo.row(number).prompt_ids for number in range(NUM_PROMPTS)], NUM_TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_of_64_tokens_are_those_of_transformers(
    demo: Demo, ours: Decoder, texts_of_transformers: list[list[int]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kind(kind, monkeypatch)
    rows = [demo.row(number, temperature=0.0, max_tokens=NUM_TOKENS, stop=[]) for number in range(NUM_PROMPTS)]
    found = record(ours, rows, slots=16, max_context=MAX_CONTEXT, kind=kind)
    for number, expected in enumerate(texts_of_transformers):
        assert found.tokens[str(number)] == expected, demo.codec.decode(rows[number].prompt_ids)
    assert sum(len(text) == NUM_TOKENS for text in texts_of_transformers) > 10
    assert len({tuple(text) for text in texts_of_transformers}) == NUM_PROMPTS


def test_an_answer_in_bfloat16_is_the_same_bit_for_bit_alone_and_in_any_batch(demo: Demo) -> None:
    model = decoder(demo.folder, max_context=MAX_CONTEXT, dtype=torch.bfloat16)
    numbers = range(len(demo.requests))

    def run(chosen: Sequence[int], slots: int) -> Outcome:
        rows = [
            demo.row(number, max_tokens=8 + number % 9, temperature=number % 3 / 2, top_p=0.9 if number % 2 else 1.0)
            for number in chosen
        ]
        return record(model, rows, slots=slots, max_context=MAX_CONTEXT, kind="fastest")

    together = run(numbers, 32)
    generator = random.Random(1)
    for size, slots in ((1, 1), (1, 4), (2, 2), (7, 3), (7, 7)):
        for _ in range(8 if size == 1 else 2):
            chosen = generator.sample(numbers, size)
            found = run(chosen, slots)
            for number in chosen:
                found.assert_same(together, str(number))
