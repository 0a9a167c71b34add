"""Prompts whose control tokens come from the template alone.

A chat template mixes its own text with strings of the request. Only the template may write control tokens: before
rendering, strings of the request that could spell one are broken by a *mark*, a character that occurs nowhere in the
request. Templates see ordinary strings, so trimming, splitting, `in` tests and `tojson` work. After rendering,
control tokens are read from the marked text, where look-alikes no longer match, and the mark is removed before the
remaining text is tokenized: the ids of ordinary content are those of the plain text.

There are two grades. *Light* marks break look-alikes, whole ones and those that two strings side by side could form;
they leave everything else alone. *Full* marks stand behind every character that begins a control token, so no edit
of the template can form one; but a template that looks for, say, `</think>` inside content may then not find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from slimserve.weights.tokenizer.matcher import words_pattern

# Noncharacters: valid in a Python string, never assigned, not white space and not alphanumeric.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered template. text: what the model reads. marked_text: the same with `mark` inside look-alikes.

    mark is "" (and marked_text == text) when no string of the request could spell a control token.
    """

    text: str
    marked_text: str
    mark: str = ""

    @classmethod
    def of(cls, marked_text: str, mark: str = "") -> RenderedPrompt:
        """A prompt from text that holds marks."""
        return cls(marked_text.replace(mark, "") if mark else marked_text, marked_text, mark)


class Marking(Enum):
    """How much of a request's strings is marked."""

    NONE = "none"
    LIGHT = "light"
    FULL = "full"


class LookAlikeGuard:
    """Breaks look-alikes of control tokens in strings of a request."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        texts = sorted({text for text in control_texts if len(text) > 1})
        self._whole = words_pattern(texts)
        self._first = re.compile("[" + re.escape("".join(sorted({text[0] for text in texts}))) + "]") if texts else None
        # A token may also be spelled by two strings side by side: one ends with its beginning ...
        self._heads = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        # ... or begins with its end. Its last character alone is let through: a template would have to write the rest.
        self._tails = frozenset(text[start:] for text in texts for start in range(1, len(text) - 1))
        self._longest = max(map(len, texts), default=0)

    def choose_mark(self, strings: Iterable[str]) -> str | None:
        """A noncharacter that none of `strings` holds; None if they use all 32."""
        free = set(_MARKS)
        for string in strings:
            if not string.isascii():
                free.difference_update(string)
        return min(free, default=None)

    def is_harmless(self, string: str) -> bool:
        """Whether `string` has no character that begins a control token and does not begin with the end of one."""
        return self._first is None or (self._first.search(string) is None and not self._break_at_start(string))

    def protect(self, string: str, mark: str, marking: Marking) -> str:
        """`string` with `mark` behind the first character of every look-alike (FULL: of every possible one)."""
        if marking is Marking.NONE or self._first is None or self.is_harmless(string):
            return string
        if marking is Marking.FULL:
            breaks = {match.end() for match in self._first.finditer(string)}
        else:
            breaks = set(self._whole_breaks(string)) | set(self._breaks_at_end(string))
        start = self._break_at_start(string)
        if start:
            breaks.add(start)
        if not breaks:
            return string
        pieces = []
        done = 0
        for position in sorted(breaks):
            pieces.append(string[done:position])
            done = position
        pieces.append(string[done:])
        return mark.join(pieces)

    def _whole_breaks(self, string: str) -> list[int]:
        assert self._whole is not None
        breaks = []
        match = self._whole.search(string)
        while match is not None:
            breaks.append(match.start() + 1)
            match = self._whole.search(string, match.start() + 1)
        return breaks

    def _breaks_at_end(self, string: str) -> list[int]:
        """Positions to break so that no text behind the string (or behind it, trimmed) completes a token."""
        breaks = []
        for stop in {len(string), len(string.rstrip())}:
            for start in range(max(0, stop - self._longest + 1), stop):
                if string[start:stop] in self._heads:
                    breaks.append(start + 1)
        return breaks

    def _break_at_start(self, string: str) -> int:
        """Position to break so that no text in front of the string (trimmed or not) completes a token; 0 if none."""
        for begin in {0, len(string) - len(string.lstrip())}:
            for length in range(2, min(self._longest - 1, len(string) - begin) + 1):
                if string[begin : begin + length] in self._tails:
                    return begin + 1
        return 0


def restore_escaped_mark(text: str, mark: str) -> str:
    """JSON text in which an escaped `mark` (written by an ASCII-only encoder) is the mark itself again."""
    escaped = f"\\u{ord(mark):04x}" if mark else ""
    if not escaped or escaped not in text:
        return text
    return re.sub(r"(?<!\\)((?:\\\\)*)" + re.escape(escaped), lambda match: match[1] + mark, text)
