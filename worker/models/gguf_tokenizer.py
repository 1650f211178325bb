"""From a GGUF file's vocabulary to tokenizer.json, tokenizer_config.json and the chat template.

How a text is cut before the merges apply is not in a GGUF; it only names the way, and each name is spelled out here.
A name that isn't known is refused: a tokenizer that cuts otherwise than in training gives worse text, silently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from headrace.worker.models.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = {_UNKNOWN, _CONTROL}
_SPACE = "▁"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Tokens that end an answer under whichever of these names a model has; older files name only one of theirs.
_ENDINGS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of the tokens with a role. `eos` is the file's own; `endings` are all that end an answer."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    endings: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Splitting:
    """How a byte-level vocabulary cuts text. `bos` is whether it starts a prompt with BOS if the file doesn't say."""

    regex: str | None
    single_digits: bool = False
    ignore_merges: bool = False
    bos: bool = False


_LLAMA3_SPLITTING = _Splitting(regex=_LLAMA3, ignore_merges=True, bos=True)
_SPLITTINGS = {
    "gpt-2": _Splitting(regex=None),
    "smollm": _Splitting(regex=None, single_digits=True),
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "llama-bpe": _LLAMA3_SPLITTING,
    "tekken": _Splitting(regex=_TEKKEN, ignore_merges=True, bos=True),
}


def read_special_tokens(file: GgufFile) -> SpecialTokens:
    """The ids of the special tokens. Raises ModelError for one that is outside the vocabulary."""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    roles = {name: _token_id(file, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    by_name = {index for index, (token, kind) in enumerate(_with_kinds(file)) if kind == _CONTROL and token in _ENDINGS}
    named = {token_id for name in ("eos", "eot", "eom") if (token_id := roles[name]) is not None}
    return SpecialTokens(
        bos=roles["bos"],
        eos=roles["eos"],
        unknown=roles["unknown"],
        padding=roles["padding"],
        endings=tuple(sorted(by_name | named)),
    )


def write_tokenizer(file: GgufFile, special: SpecialTokens, folder: Path) -> None:
    """Write the tokenizer's files. Raises ModelError for a kind of vocabulary that can't be converted."""
    tokenizer = build_tokenizer(file, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    roles = {"bos": special.bos, "eos": special.eos, "unk": special.unknown, "pad": special.padding}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # take tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get("llama.context_length", int),
        **{f"{role}_token": tokens[token_id] for role, token_id in roles.items() if token_id is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    template = file.get("tokenizer.chat_template", str, "")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(file: GgufFile, special: SpecialTokens) -> Tokenizer:
    """The tokenizer that the file describes. Raises ModelError for a kind of vocabulary that can't be converted."""
    kind = file.get("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise file.error(f"the tokenizer {kind!r} is not supported; {' and '.join(sorted(builders))} are")
    tokenizer, adds_bos = builders[kind](file, special)
    _mark_added_tokens(file, tokenizer)
    tokenizer.post_processor = _post_processor(file, special, adds_bos)
    return tokenizer


def _byte_level(file: GgufFile, special: SpecialTokens) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", str)
    if name not in _SPLITTINGS:
        raise file.error(f"the way of splitting text {name!r} is not supported; {', '.join(sorted(_SPLITTINGS))} are")
    splitting = _SPLITTINGS[name]
    merges = [_pair(file, merge) for merge in file.get_list("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(_bpe(file, vocab=_vocabulary(file), merges=merges, ignore_merges=splitting.ignore_merges))
    steps: list[Any] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.regex:
        steps.append(pre_tokenizers.Split(Regex(splitting.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.bos


def _sentencepiece(file: GgufFile, special: SpecialTokens) -> tuple[Tokenizer, bool]:
    vocabulary = _vocabulary(file)
    tokens = list(vocabulary)
    unknown = tokens[special.unknown] if special.unknown is not None else None
    model = _bpe(
        file,
        vocab=vocabulary,
        merges=_merges_from_scores(file, vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer, True


def _bpe(file: GgufFile, **settings: Any) -> BPE:
    try:
        return BPE(**settings)
    except Exception as error:  # the library raises no narrower kind for merges that don't fit the vocabulary
        raise file.error(f"the vocabulary can't be used: {error}") from error


def _merges_from_scores(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Sentencepiece has no merges but a score for each piece: a pair merges if the result is a piece, best first."""
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary):
        raise file.error(f"{len(scores)} scores for {len(vocabulary)} tokens")
    pieces = {token: scores[vocabulary[token]] for token, kind in _with_kinds(file) if kind == _NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _mark_added_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Tokens that are matched whole in the text: control tokens, which are special, and those defined by users."""
    marked = [
        AddedToken(token, normalized=False, special=kind in _SPECIAL)
        for token, kind in _with_kinds(file)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]
    tokenizer.add_special_tokens([token for token in marked if token.special])
    tokenizer.add_tokens([token for token in marked if not token.special])


def _post_processor(file: GgufFile, special: SpecialTokens, adds_bos: bool) -> processors.TemplateProcessing:
    """Puts BOS before and EOS after a plain prompt, where the file asks for it."""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    before = special.bos if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) else None
    after = special.eos if file.get("tokenizer.ggml.add_eos_token", bool, False) else None
    named = {name: token_id for name, token_id in (("BOS", before), ("EOS", after)) if token_id is not None}

    def around(part: str) -> str:
        return " ".join(step for step in ("BOS", part, "EOS") if step == part or step in named)

    return processors.TemplateProcessing(
        single=around("$A"),
        pair=f"{around('$A')} {around('$B:1')}",
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [tokens[token_id]]} for name, token_id in named.items()
        ],
    )


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise file.error(f"{len(tokens) - len(vocabulary)} tokens of the vocabulary stand in it twice")
    return vocabulary


def _with_kinds(file: GgufFile) -> Sequence[tuple[str, int]]:
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if "tokenizer.ggml.token_type" not in file:
        return [(token, _NORMAL) for token in tokens]
    kinds = file.get_list("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise file.error(f"{len(kinds)} token types for {len(tokens)} tokens")
    return list(zip(tokens, kinds, strict=True))


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise file.error(f"the merge {merge!r} is not a pair")
    return left, right


def _token_id(file: GgufFile, role: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file:
        return None
    token_id = file.get(key, int)
    if not 0 <= token_id < num_tokens:
        raise file.error(f"{key} is {token_id}; the vocabulary has {num_tokens} tokens")
    return token_id
