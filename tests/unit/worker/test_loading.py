"""From a folder to an engine: what the parts must know of one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import save_tiny_model
from transformers import PreTrainedTokenizerFast

from headrace.shared.schema import ErrorCode, Request
from headrace.worker.loading import Loaded, load
from headrace.worker.runner import Rejected
from headrace.worker.settings import EngineSettings


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """A model whose tokenizer has a token more than its embedding."""
    folder = save_tiny_model(tmp_path / "tiny")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    return load(EngineSettings(model=str(folder), slots=2, dtype="float32", device="cpu"))


@pytest.mark.parametrize("prompt", ["a <extra> b", [5, 258]], ids=["as text", "as an id"])
def test_a_token_that_the_model_lacks_is_refused_before_it_meets_other_rows(
    loaded: Loaded, prompt: str | list[int]
) -> None:
    with pytest.raises(Rejected) as refused:
        loaded.runner.row(Request(prompt=prompt), "bad")
    assert refused.value.error.code is ErrorCode.INVALID_REQUEST
    assert "258" in refused.value.error.message
    assert "257" in refused.value.error.message

    loaded.engine.submit(loaded.runner.row(Request(prompt="good", max_tokens=3, ignore_eos=True), "good"))
    done = []
    while loaded.engine.num_rows:
        done += loaded.engine.step()
    assert [len(row.token_ids) for row in done] == [3]
