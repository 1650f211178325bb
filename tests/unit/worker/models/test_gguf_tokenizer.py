from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, LlamaForCausalLM

from headrace.shared.errors import ModelError
from headrace.worker.models.convert import convert_gguf

PIECES = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁he", "▁h", "w", "▁w", "lo", "llo"]


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer as transformers loads it from the converted folder."""
    folder = path.parent / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer


def sentencepiece(settings: dict[str, Any]) -> None:
    """Turn the settings into those of a sentencepiece vocabulary of the same size; scores fall along PIECES."""
    size = len(settings["tokenizer.ggml.tokens"])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]
    if (extra := size - len(tokens)) < 0:
        tokens, kinds, scores = tokens[:size], kinds[:size], scores[:size]
    settings |= {
        "tokenizer.ggml.tokens": tokens + [f"<unused{i}>" for i in range(extra)],
        "tokenizer.ggml.token_type": kinds + [5] * extra,
        "tokenizer.ggml.scores": scores + [0.0] * extra,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for name in ("tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"):
        del settings[name]


@pytest.fixture
def byte_level(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> Tokenizer:
    return tokenizer_of(gguf_maker.write(llama()))


def test_smollm_splits_off_every_digit(byte_level: Tokenizer) -> None:
    # "1 2" is a merge of this vocabulary, and may not happen across digits.
    assert byte_level.encode("the 12").tokens == ["t", "he", "Ġ", "1", "2"]


def test_gpt_2_keeps_digits_together(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> None:
    path = gguf_maker.write(llama(), edit=lambda settings, tensors: settings.update({"tokenizer.ggml.pre": "gpt-2"}))
    assert tokenizer_of(path).encode("the 12").tokens == ["t", "he", "Ġ", "12"]


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "🙂👨‍👩‍👧", "a  b\n\n\tc ", "e\u0301", "\x00\x7f"])
def test_any_text_survives_encoding_and_decoding(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text).ids) == text


def test_control_tokens_are_special(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>the<|im_end|>").ids
    assert [ids[0], ids[-1]] == [1, 2]
    assert byte_level.decode(ids) == "the"


def test_tokens_that_users_defined_are_whole_but_not_special(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.tokens"][-1] = "<think>"
        settings["tokenizer.ggml.merges"] = settings["tokenizer.ggml.merges"][:-1]
        settings["tokenizer.ggml.token_type"][-1] = 4

    tokenizer = tokenizer_of(gguf_maker.write(llama(), edit=edit))
    ids = tokenizer.encode("<think>t").ids
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "<think>t"


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], []),
        ({"tokenizer.ggml.add_bos_token": True}, [1], []),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [1], [2]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [], []),
    ],
)
def test_a_plain_prompt_gets_the_tokens_around_it_that_the_file_asks_for(
    gguf_maker: Any,
    llama: Callable[..., LlamaForCausalLM],
    settings: dict[str, Any],
    before: list[int],
    after: list[int],
) -> None:
    tokenizer = tokenizer_of(gguf_maker.write(llama(), edit=lambda all_of_it, tensors: all_of_it.update(settings)))
    bare = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == before + bare + after


def test_llama_3_starts_a_prompt_with_bos_if_the_file_does_not_say(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.pre"] = "llama-bpe"
        del settings["tokenizer.ggml.add_bos_token"]

    assert tokenizer_of(gguf_maker.write(llama(), edit=edit)).encode("the").ids[0] == 1


def test_sentencepiece_merges_the_best_scored_piece_first(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    model = llama(vocab_size=280)

    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.tokens"] += [f"<more{i}>" for i in range(280 - len(settings["tokenizer.ggml.tokens"]))]
        sentencepiece(settings)

    tokenizer = tokenizer_of(gguf_maker.write(model, edit=edit))
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode("hello hé").tokens == ["<s>", "▁hello", "▁h", "<0xC3>", "<0xA9>"]
    for text in ["hello", "hello hé 🙂", "  hello  ", "日"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_agrees_with_what_transformers_derives(
    gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]
) -> None:
    from transformers.tokenization_utils_base import generate_merges

    from headrace.worker.models.gguf_file import GgufFile
    from headrace.worker.models.gguf_tokenizer import _merges_from_scores, _vocabulary

    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.tokens"] += [f"<more{i}>" for i in range(280 - len(settings["tokenizer.ggml.tokens"]))]
        sentencepiece(settings)

    file = GgufFile(gguf_maker.write(llama(vocab_size=280), edit=edit))
    scores = {piece: -float(rank) for rank, piece in enumerate(PIECES)}
    assert _merges_from_scores(file, _vocabulary(file)) == generate_merges(
        {piece: index for index, piece in enumerate(PIECES)}, scores
    )


def test_a_vocabulary_with_a_token_twice_is_refused(gguf_maker: Any, llama: Callable[..., LlamaForCausalLM]) -> None:
    def edit(settings: dict[str, Any], tensors: dict[str, Any]) -> None:
        settings["tokenizer.ggml.tokens"][5] = settings["tokenizer.ggml.tokens"][6]

    with pytest.raises(ModelError, match="stand in it twice"):
        tokenizer_of(gguf_maker.write(llama(), edit=edit))


def test_the_decoder_is_one_that_is_streamed_by_bytes(byte_level: Tokenizer) -> None:
    assert isinstance(byte_level.decoder, decoders.ByteLevel)
