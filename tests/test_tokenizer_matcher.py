"""Finding special tokens: leftmost, longest, whatever the table."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimserve.errors import FormatError
from slimserve.weights.tokenizer.matcher import StripRules, TokenMatcher
from slimserve.weights.tokenizer.prompt import LookAlikeGuard, Marking, restore_escaped_mark
from slimserve.weights.tokenizer.vocabulary import TokenKind, Vocabulary, end_token_ids

WORDS = st.lists(st.text(alphabet="<|ab>", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


def reference_split(text: str, words: list[str]) -> list[str | int]:
    pieces: list[str | int] = []
    plain = ""
    place = 0
    while place < len(text):
        found = max((word for word in words if text.startswith(word, place)), key=len, default=None)
        if found is None:
            plain += text[place]
            place += 1
            continue
        if plain:
            pieces.append(plain)
        plain = ""
        pieces.append(words.index(found))
        place += len(found)
    return [*pieces, plain] if plain else pieces


@settings(max_examples=500, deadline=None)
@given(words=WORDS, text=st.text(alphabet="<|ab>", max_size=30))
def test_leftmost_longest(words: list[str], text: str) -> None:
    matcher = TokenMatcher({word: index for index, word in enumerate(words)})
    assert matcher.split(text) == reference_split(text, words)


def test_strip_rules() -> None:
    ids = {"[M]": 0, "[R]": 1, "word": 2}
    matcher = TokenMatcher(ids, StripRules(frozenset([0]), frozenset([1]), frozenset([2])))
    assert matcher.split("a  [M] b [R]  c") == ["a", 0, " b ", 1, "c"]
    assert matcher.split("word sword word_ a word") == [2, " sword word_ a ", 2]
    assert matcher.split("  [M]") == [0] and matcher.split("") == []


def test_tables_of_any_shape() -> None:
    nested = {"a" * length: length for length in range(1, 1500)}
    assert TokenMatcher(nested).split("a" * 1600) == [1499, 101]
    with pytest.raises(FormatError, match="special tokens"):
        TokenMatcher({f"{index:050d}": index for index in range(50_000)})


@settings(max_examples=500, deadline=None)
@given(words=WORDS, strings=st.lists(st.text(alphabet="<|ab> ", max_size=8), min_size=1, max_size=4))
def test_marked_strings_spell_no_token_together(words: list[str], strings: list[str]) -> None:
    """Side by side, trimmed or not, light marks leave no token that begins in one of the strings."""
    words = [word for word in words if len(word) > 1]
    guard = LookAlikeGuard(words)
    matcher = TokenMatcher({word: index for index, word in enumerate(words)})
    for marking in (Marking.LIGHT, Marking.FULL):
        marked = [guard.protect(string, "\ufdd0", marking) for string in strings]
        assert [string.replace("\ufdd0", "") for string in marked] == strings
        for joined in ("".join(marked), "".join(string.strip() for string in marked)):
            assert not any(isinstance(piece, int) for piece in matcher.split(joined))
    if all(guard.is_harmless(string) for string in strings):
        assert not any(isinstance(piece, int) for piece in matcher.split("".join(strings)))


def test_escaped_marks_come_back() -> None:
    mark = "\ufdd0"
    assert restore_escaped_mark(r"a\ufdd0b", mark) == f"a{mark}b"
    assert restore_escaped_mark(r"a\\ufdd0b", mark) == r"a\\ufdd0b"
    assert restore_escaped_mark(r"a\\\ufdd0\ufdd0", mark) == rf"a\\{mark}{mark}"
    assert restore_escaped_mark(r"a\ufdd0b", "") == r"a\ufdd0b"


def test_end_ids() -> None:
    normal, control, user = TokenKind.NORMAL, TokenKind.CONTROL, TokenKind.USER_DEFINED
    texts = ["<|im_end|>", "</s>", "<|endoftext|>", "<eos>", "x", "<|end|>"]
    table = Vocabulary(texts, bytes([control, user, user, control, normal, normal]))
    assert end_token_ids(table, [4, None, 77, -1]) == (0, 2, 3, 4)
    harmony = Vocabulary(["<|return|>", "<|call|>", "<|end|>"], bytes([control] * 3))
    assert end_token_ids(harmony, []) == (0, 1)
    with pytest.raises(FormatError, match="2 tokens but 1 token types"):
        Vocabulary(["a", "b"], b"\x01")
