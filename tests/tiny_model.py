"""A small checkpoint with random weights and a byte-level tokenizer, for tests with real processes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_TEMPLATE = "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"


def save_tiny_model(folder: Path, *, max_positions: int = 512) -> Path:
    """Write the checkpoint into `folder` in the Hugging Face layout; the same bytes every time."""
    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(symbol, special=True) for symbol in symbols[:2]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
