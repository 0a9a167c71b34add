"""The tokenizer of a Hugging Face folder as `tokenizer.*` keys of a GGUF file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from slimserve.errors import FormatError, RefusalError
from slimserve.weights.small_file import read_small_file
from slimserve.weights.tokenizer.byte_level import splitter
from slimserve.weights.tokenizer.hf_json import JsonTokenizer, read_json, tokenizer_from_folder
from slimserve.weights.tokenizer.pretokenizers import PRE_TOKENIZERS

_END_KEYS = ("eos", "eot", "eom")
_MAX_TEMPLATE_BYTES = 4 << 20
_PROBE = (
    "Hello world! It's 12345 o'clock, isn't it? I'LL say: we've done 3.14%\n\n  \tdef f(x_1):\n        return x**2 #\n"
    "\r\n   leading spaces,trailing   \n'tis ÄÖÜ naïve café Ünïcödé Привет, мир! 你好，世界 ١٢٣ 12٣4 e\u0301a\u0300 "
    "\u00a0 🙂👍🏽 CamelCaseWords ALLCAPS mixedCASE123abc $100,000.00 --flag=value /path/to/f.txt <tag v=1/> a\u2028b\n"
)
"""Text on which pre-tokenizers of byte-level vocabularies differ: case, digits, marks, white space, symbols."""


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Keys from which `tokenizer_from_gguf` makes the same byte-level tokenizer, chat template included.

    Raises RefusalError for a tokenizer of another kind, or one whose splitting no known name stands for.
    """
    own = tokenizer_from_folder(folder)
    document = read_json(folder / "tokenizer.json", 512 << 20)
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
        raise RefusalError(f"{folder}: only byte-level BPE tokenizers can be written to GGUF here")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(folder / "tokenizer.json", bool(model.get("ignore_merges"))),
        "tokenizer.ggml.tokens": list(own.vocabulary.texts),
        "tokenizer.ggml.token_type": np.frombuffer(own.vocabulary.kinds, dtype=np.uint8).astype(np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": own.add_bos,
    }
    special = own.special
    for name, token_id in (("bos", special.bos), ("padding", special.padding), ("unknown", special.unknown)):
        if token_id is not None:
            values[f"tokenizer.ggml.{name}_token_id"] = token_id
    values |= _ends(own, folder)
    template = _template(folder)
    return values | ({"tokenizer.chat_template": template} if template else {})


def _ends(own: JsonTokenizer, folder: Path) -> dict[str, int]:
    """End tokens under the three keys that GGUF has for them, the tokenizer's own first."""
    ends = sorted(own.end_ids, key=lambda token_id: (token_id != own.special.eos, token_id))
    if len(ends) > len(_END_KEYS):
        names = ", ".join(own.vocabulary.texts[token_id] for token_id in ends)
        raise RefusalError(f"{folder}: {len(ends)} end tokens ({names}) do not fit into GGUF's {len(_END_KEYS)} keys")
    return {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in zip(_END_KEYS, ends, strict=False)}


def _pre_tokenizer(path: Path, ignore_merges: bool) -> str:
    """The name whose rule splits the probe text into the same pieces."""
    own = RustTokenizer.from_file(str(path)).pre_tokenizer
    expected = own.pre_tokenize_str(_PROBE) if own is not None else []
    for name, rule in PRE_TOKENIZERS.items():
        if rule.ignore_merges == ignore_merges and splitter(rule).pre_tokenize_str(_PROBE) == expected:
            return name
    raise RefusalError(f"{path} splits text in a way that no GGUF pre-tokenizer name stands for")


def _template(folder: Path) -> str | None:
    """The chat template: a file of its own, or a string of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    with contextlib.suppress(FileNotFoundError):
        return read_small_file(path, _MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    stated = read_json(folder / "tokenizer_config.json").get("chat_template")
    if stated is None or isinstance(stated, str):
        return stated
    raise FormatError(f"{folder}: several chat templates cannot be written to GGUF; keep one of them")
