"""llama.cpp's tokenizer as an oracle, on real GGUF files and on vocabularies written for a test."""

from __future__ import annotations

import ctypes
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizer_corpus import corpus
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, trainers

# llama.cpp turns any token named "</s>" into an end token, whatever the file says of it (plain markup in Gemma 3 and
# Qwen 2.5). SlimServe follows the file, so lines with that text are compared with the file's statement instead.
LLAMA_CPP_QUIRK = "</s>"


class LlamaCppTokenizer:
    """llama.cpp's vocabulary of one file."""

    def __init__(self, path: Path) -> None:
        llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: no tokenizer oracle")
        self._library = llama_cpp
        self._llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama.model)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        return self._llama.tokenize(text.encode("utf-8"), add_bos=False, special=parse_special)

    def token_bytes(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(4096)
        length = self._library.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        return buffer.raw[:length]


@lru_cache
def crossing_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a small byte-level BPE whose merges cross every boundary, so that ids show the splits."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=6000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rust.train_from_iterator(corpus(1200, seed=1, look_alikes=False), trainer)
    model = json.loads(rust.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """GGUF metadata of the crossing vocabulary under a pre-tokenizer name; two control tokens at its end."""
    tokens, merges = crossing_vocabulary()
    names = [*tokens, "<|zz_start|>", "<|zz_end|>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_metadata(texts: list[str], *, add_space_prefix: bool) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: <unk>, <s>, </s>, the bytes, then `texts` by falling score."""
    count = len(texts)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(count)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * count,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file that holds only `metadata`."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: no vocabulary files for the oracle")
    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
