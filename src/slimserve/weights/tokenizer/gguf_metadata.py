"""The tokenizer that a GGUF file carries in its `tokenizer.ggml.*` keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slimserve.errors import FormatError, RefusalError
from slimserve.weights.tokenizer.base import Tokenizer
from slimserve.weights.tokenizer.byte_level import ByteLevelTokenizer, parse_merges
from slimserve.weights.tokenizer.pretokenizers import pre_tokenizer
from slimserve.weights.tokenizer.sentencepiece import SentencePieceTokenizer
from slimserve.weights.tokenizer.vocabulary import SpecialIds, TokenKind, Vocabulary, end_token_ids

_PREFIX = "tokenizer.ggml."
# Ids that SentencePiece models have where the file does not say.
_SENTENCEPIECE_DEFAULTS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class _Metadata:
    """Typed access to the tokenizer keys; a value of a wrong type is an error that names the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.notes: list[str] = []

    def text(self, name: str) -> str | None:
        value = self.values.get(_PREFIX + name)
        if value is not None and not isinstance(value, str):
            raise FormatError(f"{_PREFIX}{name} is a {type(value).__name__}, not a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise FormatError(f"{_PREFIX}{name} is a {type(value).__name__}, not a boolean")
        return value

    def strings(self, name: str) -> list[str]:
        value = self.values.get(_PREFIX + name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FormatError(f"{_PREFIX}{name} is missing or not a list of strings")
        return value

    def numbers(self, name: str) -> np.ndarray | None:
        value = self.values.get(_PREFIX + name)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
            raise FormatError(f"{_PREFIX}{name} is a {type(value).__name__}, not a list of numbers")
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise FormatError(f"{_PREFIX}{name} is not a list of numbers") from error
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iuf"):
            raise FormatError(f"{_PREFIX}{name} is not a list of numbers")
        return array

    def token_id(self, name: str, size: int, default: int | None = None) -> int | None:
        value = self.values.get(_PREFIX + name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise FormatError(f"{_PREFIX}{name} is a {type(value).__name__}, not an integer")
        if not 0 <= int(value) < size:
            self.notes.append(f"{_PREFIX}{name} = {value} is outside the {size} tokens and is not used")
            return None
        return int(value)


def _read_vocabulary(metadata: _Metadata) -> Vocabulary:
    texts = metadata.strings("tokens")
    if not texts:
        raise FormatError(f"{_PREFIX}tokens is empty")
    kinds = metadata.numbers("token_type")
    if kinds is None:
        return Vocabulary(texts, bytes([TokenKind.NORMAL]) * len(texts))
    if len(kinds) != len(texts):
        raise FormatError(f"{_PREFIX}token_type has {len(kinds)} entries for {len(texts)} tokens")
    known = (kinds >= TokenKind.NORMAL) & (kinds <= TokenKind.BYTE)
    return Vocabulary(texts, np.where(known, kinds, TokenKind.UNUSED).astype(np.uint8).tobytes())


def _special_ids(metadata: _Metadata, size: int, defaults: Mapping[str, int]) -> SpecialIds:
    def find(name: str) -> int | None:
        return metadata.token_id(name, size, defaults.get(name))

    return SpecialIds(
        bos=find("bos_token_id"),
        eos=find("eos_token_id"),
        eot=find("eot_token_id"),
        eom=find("eom_token_id"),
        unknown=find("unknown_token_id"),
        padding=find("padding_token_id"),
    )


def tokenizer_from_gguf(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file, from its metadata.

    Raises FormatError naming the key at fault, RefusalError naming an unknown tokenizer or pre-tokenizer.
    """
    metadata = _Metadata(values)
    model = metadata.text("model")
    if model is None:
        raise FormatError(f"the file has no {_PREFIX}model key: it carries no tokenizer")
    if model not in ("llama", "gpt2"):
        raise RefusalError(
            f"the tokenizer {model!r} ({_PREFIX}model) is not supported; supported are 'llama' (SentencePiece BPE) and "
            "'gpt2' (byte-level BPE)"
        )
    vocabulary = _read_vocabulary(metadata)
    special = _special_ids(metadata, len(vocabulary), _SENTENCEPIECE_DEFAULTS if model == "llama" else {})
    ends = end_token_ids(vocabulary, (special.eos, special.eot, special.eom))
    if not ends:
        metadata.notes.append("the file names no end token; replies end by length only")
    if metadata.flag("add_eos_token", False):
        metadata.notes.append("the file asks for an end token after each prompt; prompts are left open instead")
    if model == "llama":
        return _sentencepiece(metadata, vocabulary, special, ends)
    return _byte_level(metadata, vocabulary, special, ends)


def _sentencepiece(
    metadata: _Metadata, vocabulary: Vocabulary, special: SpecialIds, ends: tuple[int, ...]
) -> SentencePieceTokenizer:
    scores = metadata.numbers("scores")
    if scores is None:
        raise FormatError(f"{_PREFIX}scores is missing: a SentencePiece vocabulary cannot be used without it")
    return SentencePieceTokenizer(
        vocabulary,
        special,
        scores,
        add_space_prefix=metadata.flag("add_space_prefix", True),
        add_bos=metadata.flag("add_bos_token", True),
        end_ids=ends,
        kind="SentencePiece BPE",
        notes=tuple(metadata.notes),
    )


def _byte_level(
    metadata: _Metadata, vocabulary: Vocabulary, special: SpecialIds, ends: tuple[int, ...]
) -> ByteLevelTokenizer:
    name = metadata.text("pre")
    if name is None:
        name = "default"
        metadata.notes.append(f"the file has no {_PREFIX}pre key; text is split by the rule 'default'")
    rule = pre_tokenizer(name)
    return ByteLevelTokenizer(
        vocabulary,
        special,
        parse_merges(metadata.strings("merges"), vocabulary),
        rule,
        add_bos=metadata.flag("add_bos_token", rule.add_bos),
        end_ids=ends,
        kind=f"byte-level BPE ({name})",
        notes=tuple(metadata.notes),
    )
