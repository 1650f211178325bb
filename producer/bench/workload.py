"""A built-in workload with a realistic spread of lengths: many short texts, few long ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A prompt's content makes no difference to the time it takes; these ids are in every vocabulary.
_TOKEN_IDS = range(32, 256)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A log-normal spread of lengths in tokens, cut off at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, generator: random.Random, most: int) -> int:
        """A length; `most` is a further limit."""
        length = round(self.median * generator.lognormvariate(0.0, self.sigma))
        return max(1, min(max(length, self.least), self.most, most))


PROMPTS = Spread(median=64, sigma=0.9, least=4, most=512)
OUTPUTS = Spread(median=96, sigma=0.8, least=4, most=512)


def synthetic_requests(num_jobs: int, seed: int, max_context: int | None) -> Iterator[dict[str, Any]]:
    """Requests with exact lengths, the same for the same arguments: prompts of token ids, answers that ignore EOS.

    Prompt and answer take half of `max_context` at most, each.
    """
    generator = random.Random(seed)
    most = max_context // 2 if max_context else PROMPTS.most
    for number in range(num_jobs):
        prompt_tokens = PROMPTS.draw(generator, most)
        yield {
            "id": str(number),
            "prompt": generator.choices(_TOKEN_IDS, k=prompt_tokens),
            "max_tokens": OUTPUTS.draw(generator, most),
            "ignore_eos": True,
            "seed": seed + number,
        }


def write_requests(path: Path, requests: Iterator[dict[str, Any]]) -> None:
    """As JSON Lines, to be read like any dataset."""
    with path.open("w", encoding="utf-8") as lines:
        for request in requests:
            lines.write(json.dumps(request) + "\n")
