"""The token table of a model and what its files say about special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from slimserve.errors import FormatError


class TokenKind(IntEnum):
    """Type of a token, with the numbers that GGUF stores in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Tokens that end a turn or a text by their published meaning, for files whose metadata names only one of them.
_END_NAMES = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)
# Names that are also plain markup in some vocabularies: they count only where the table calls them control tokens.
_WEAK_END_NAMES = frozenset({"</s>", "<eos>", "[EOS]", "[EOT]", "<EOT>"})


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Special tokens named by the files; None where they name none."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unknown: int | None = None
    padding: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Token texts as stored (not yet bytes) and their kinds, both indexed by id.

    Texts that are not UTF-8 hold their bytes as surrogate escapes.
    """

    texts: Sequence[str]
    kinds: bytes

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.kinds):
            raise FormatError(f"the tokenizer has {len(self.texts)} tokens but {len(self.kinds)} token types")

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """First id of each text."""
        table = dict(zip(reversed(self.texts), range(len(self.texts) - 1, -1, -1), strict=True))
        table.pop("", None)
        return table

    def of_kind(self, *kinds: TokenKind) -> list[int]:
        """Ids of the given kinds, ascending."""
        wanted = frozenset(kinds)
        return [index for index, kind in enumerate(self.kinds) if kind in wanted]


def end_token_ids(vocabulary: Vocabulary, stated: Iterable[int | None]) -> tuple[int, ...]:
    """Every id that ends a generation: those `stated` by the files and those whose name says so, ascending.

    A name counts where the table calls it a control token (for unambiguous names: or a user-defined one).
    """
    found = {token_id for token_id in stated if token_id is not None and 0 <= token_id < len(vocabulary)}
    for name in _END_NAMES | _WEAK_END_NAMES:
        token_id = vocabulary.ids.get(name)
        if token_id is None:
            continue
        kind = vocabulary.kinds[token_id]
        if kind == TokenKind.CONTROL or (kind == TokenKind.USER_DEFINED and name in _END_NAMES):
            found.add(token_id)
    # In the harmony format <|end|> closes a message inside a reply; <|return|> and <|call|> end the reply.
    if {"<|return|>", "<|call|>", "<|end|>"} <= vocabulary.ids.keys():
        found.discard(vocabulary.ids["<|end|>"])
    return tuple(sorted(found))
