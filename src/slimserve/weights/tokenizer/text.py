"""The door for text: every string that enters a tokenizer or a template is valid Unicode afterwards."""

from __future__ import annotations

import re

from tokenizers import Tokenizer as RustTokenizer

_LONG = 4096

_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(text: str | bytes) -> str:
    """Valid text: an invalid UTF-8 sequence or lone surrogate becomes one U+FFFD, a surrogate pair its character."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def encode_plain(rust: RustTokenizer, text: str) -> list[int]:
    """Ids of a text without special tokens; a long one leaves the interpreter to other threads meanwhile."""
    if len(text) < _LONG:
        return rust.encode(text, add_special_tokens=False).ids
    return rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
