from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from headrace.worker.models.detokenize import Detokenizer

TEXTS = [
    "plain text",
    "naïve",
    "日本語 テキスト",
    "🙂👨‍👩‍👧‍👦 family",
    "e\u0301 a\u0308",
    "العربية",
    " leading",
    "a  b\n",
]


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer).stream()
    return [stream.push(token_id) for token_id in token_ids]


@pytest.fixture
def byte_level(folder_maker: Any) -> Tokenizer:
    return folder_maker.byte_level()


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """A vocabulary of sentencepiece's kind, of single characters and bytes."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁▁"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_out_whole(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text).ids
    assert "".join(streamed(byte_level, ids)) == text == byte_level.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_text_comes_out_whole(text: str) -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, ids)) == text == tokenizer.decode(ids)


def test_nothing_is_told_of_a_character_until_it_is_complete(byte_level: Tokenizer) -> None:
    assert streamed(byte_level, byte_level.encode("🙂!").ids) == ["", "", "", "🙂", "!"]


def test_special_tokens_and_unknown_ids_have_no_text(byte_level: Tokenizer) -> None:
    assert streamed(byte_level, [1, *byte_level.encode("t").ids, 2, 10**6]) == ["", "t", "", ""]


def test_a_special_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("è").ids
    assert streamed(byte_level, [first, 2, second]) == ["", "", "è"]


def test_random_byte_level_tokens_give_what_the_tokenizer_gives_at_once(byte_level: Tokenizer) -> None:
    generator = random.Random(3)
    size = byte_level.get_vocab_size()
    for _ in range(300):
        ids = [generator.randrange(size) for _ in range(generator.randrange(60))]
        told, whole = "".join(streamed(byte_level, ids)), byte_level.decode(ids)
        # What the tokenizer has more at the end stands for a character that is not complete yet.
        assert whole.startswith(told)
        assert set(whole[len(told) :]) <= {"\ufffd"}


def test_random_byte_fallback_tokens_keep_every_character_that_is_whole() -> None:
    tokenizer = byte_fallback()
    generator = random.Random(4)
    for _ in range(200):
        text = "".join(generator.choice("ab é日🙂") for _ in range(20))
        ids = tokenizer.encode(text).ids
        assert "".join(streamed(tokenizer, ids)) == text
        broken = [*ids, tokenizer.token_to_id("<0xFF>"), *ids]
        assert "".join(streamed(tokenizer, broken)) == f"{text}\ufffd {text}"


def test_only_the_first_space_of_a_text_is_dropped_and_only_where_the_decoder_says_so() -> None:
    ids = [byte_fallback().token_to_id(piece) for piece in ["<s>", "▁▁", "a", "▁", "b"]]
    assert streamed(byte_fallback(), ids) == ["", " ", "a", " ", "b"]
    assert streamed(byte_fallback(strips=False), ids) == ["", "  ", "a", " ", "b"]


def test_a_piece_that_only_looks_like_a_byte_is_text() -> None:
    tokenizer = byte_fallback()
    tokenizer.add_tokens(["<0xZZ>"])
    ids = [tokenizer.token_to_id("<0xZZ>")]
    assert streamed(tokenizer, ids) == ["<0xZZ>"]


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), decoders.WordPiece()],
    ids=["metaspace", "fallback and metaspace", "wordpiece"],
)
def test_other_decoders_give_what_the_tokenizer_gives_at_once(decoder: Any) -> None:
    pieces = ["▁the", "▁cat", "s", "▁", "##ing", "<0xC3>", "<0xA9>", "[PAD]"]
    tokenizer = Tokenizer(WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[PAD]"])
    ids = [0, 1, 2, 7, 3, 1, 5, 6, 0, 4, 2, 1]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
