"""Finding special tokens in text: leftmost match, the longest where several start at one place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slimserve.errors import FormatError

_MAX_CHARACTERS = 2_000_000


class _Node:
    __slots__ = ("children", "ends")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.ends = False


def _pattern_of(node: _Node) -> str:
    """Regular expression of the words below `node`; greedy, so longer words are tried first."""
    branches = []
    for character, child in node.children.items():
        prefix = re.escape(character)
        while len(child.children) == 1 and not child.ends:
            (character, child) = next(iter(child.children.items()))
            prefix += re.escape(character)
        branches.append(prefix + _pattern_of(child))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and not node.ends else f"(?:{'|'.join(branches)})"
    return body + "?" if node.ends else body


def words_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    """One compiled expression that matches the longest of `words` at a position; None without words.

    The alternatives are folded into a tree, so the cost at a position does not grow with the number of words
    (Gemma 3 has 6,414 special tokens). Raises FormatError for tables beyond any model's.
    """
    words = [word for word in words if word]
    if sum(map(len, words)) > _MAX_CHARACTERS:
        raise FormatError(
            f"the tokenizer has {len(words):,} special tokens of {sum(map(len, words)):,} characters in all"
        )
    root = _Node()
    for word in words:
        node = root
        for character in word:
            node = node.children.setdefault(character, _Node())
        node.ends = True
    if not root.children:
        return None
    try:
        return re.compile(_pattern_of(root))
    except RecursionError:
        # Words that begin each other hundreds of times over: slower, but as right.
        return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))


@dataclass(frozen=True, slots=True)
class StripRules:
    """Ids of added tokens that swallow white space beside them, or that match whole words only."""

    left: frozenset[int] = frozenset()
    right: frozenset[int] = frozenset()
    whole_word: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TokenMatcher:
    """Splits text at the tokens of a table `text -> id`."""

    ids: Mapping[str, int]
    rules: StripRules = StripRules()
    pattern: re.Pattern[str] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", words_pattern(self.ids))

    def split(self, text: str) -> list[str | int]:
        """Non-empty text pieces and token ids, in order; the pieces and the tokens' texts join to `text`."""
        if self.pattern is None:
            return [text] if text else []
        pieces: list[str | int] = []
        done = 0
        for match in self.pattern.finditer(text):
            start, end = match.span()
            token_id = self.ids[match[0]]
            if token_id in self.rules.whole_word and not _stands_alone(text, start, end):
                continue
            left = text[done:start]
            if token_id in self.rules.left:
                left = left.rstrip()
            if left:
                pieces.append(left)
            pieces.append(token_id)
            done = end
            if token_id in self.rules.right:
                done = len(text) - len(text[end:].lstrip())
        if done < len(text):
            pieces.append(text[done:])
        return pieces


def _stands_alone(text: str, start: int, end: int) -> bool:
    before = start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_")
    after = end < len(text) and (text[end].isalnum() or text[end] == "_")
    return not before and not after
