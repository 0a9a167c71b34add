"""A tokenizer for models that have weights of the right shape and no text: bytes, and a word for every other id.

Text encodes to its bytes, one token each; ids above 255 decode to words that name them, so that what such a model
says can be printed and streamed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from slimserve.errors import UsageError
from slimserve.weights.tokenizer.byte_level import BYTE_OF_CHARACTER
from slimserve.weights.tokenizer.vocabulary import TokenKind

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""The last ids of the vocabulary."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
_PRE_TOKENIZER = "qwen2"
_SPACE = "\u0120"


def stand_in_tokens(vocab_size: int) -> list[str]:
    """Texts of all ids in the byte alphabet; UsageError where the vocabulary does not hold the 256 bytes."""
    least = 256 + len(CONTROL)
    if vocab_size < least:
        raise UsageError(f"a vocabulary of {vocab_size} tokens cannot hold every byte; at least {least} are needed")
    characters = sorted(BYTE_OF_CHARACTER, key=BYTE_OF_CHARACTER.__getitem__)
    words = [f"{_SPACE}w{number}" for number in range(256, vocab_size - len(CONTROL))]
    return [*characters, *words, *CONTROL]


def stand_in_metadata(vocab_size: int) -> dict[str, Any]:
    """The tokenizer as keys of a GGUF file."""
    kinds = np.full(vocab_size, TokenKind.NORMAL, dtype=np.int32)
    kinds[-len(CONTROL) :] = TokenKind.CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE_TOKENIZER,
        "tokenizer.ggml.tokens": stand_in_tokens(vocab_size),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
        "tokenizer.ggml.eot_token_id": vocab_size - 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_stand_in(folder: Path, vocab_size: int) -> None:
    """The tokenizer as tokenizer.json and tokenizer_config.json of a model folder."""
    tokens = stand_in_tokens(vocab_size)
    first_control = vocab_size - len(CONTROL)
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": first_control + place, "content": text, **plain} for place, text in enumerate(CONTROL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token_id for token_id, text in enumerate(tokens[:first_control])},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": CONTROL[-1],
        "additional_special_tokens": list(CONTROL[:-1]),
        "chat_template": TEMPLATE,
        "add_bos_token": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
