"""Distinct prompts of an exact number of tokens, cut from one fixed text at strided offsets.

Where the server takes token ids (ours, llama.cpp's and vLLM's do) the cut is made in ids. A server that takes text
only is asked how many tokens a text has, and the cut is moved until the count is exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from slimserve.errors import RunError
from slimserve.measure.client import Endpoint, ServerError

_SUBJECTS = (
    "the miller", "a captain", "her brother", "the old clock", "one student", "the river", "a merchant",
             "the night train", "our neighbour", "the baker", "a stranger", "the lighthouse", "their teacher",
)  # fmt: skip
_VERBS = ("watched", "carried", "found", "remembered", "sold", "painted", "followed", "opened", "left", "mended",
          "counted", "hid", "praised", "crossed")  # fmt: skip
_OBJECTS = ("a small boat", "the empty house", "seven letters", "the green door", "a map of the coast", "the last loaf",
            "a broken lamp", "the long bridge", "a sack of flour", "the quiet garden", "two silver coins")  # fmt: skip
_ENDINGS = ("before the rain", "in early spring", "without a word", "near the market", "for the third time",
            "after a long winter", "while the town slept", "by the light of the moon", "at noon")  # fmt: skip

STRIDE = 7919
"""Tokens (or words) between the starts of two prompts; a prime, so that starts do not meet sentence lengths."""

_PIECE = 200_000
"""Characters tokenized in one call; servers bound the size of a body."""


def fixed_text(num_sentences: int, seed: int = 20260131) -> str:
    """The fixed text: plain English sentences, the same on every machine."""
    choose = random.Random(seed)
    sentences = []
    for number in range(num_sentences):
        words = (choose.choice(_SUBJECTS), choose.choice(_VERBS), choose.choice(_OBJECTS), choose.choice(_ENDINGS))
        sentence = " ".join(words)
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}" + (f", {number}." if number % 3 == 0 else "."))
    return " ".join(sentences)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes into the `prompt` field, and how many tokens the server is to see."""

    value: str | tuple[int, ...]
    num_tokens: int

    def body(self) -> str | list[int]:
        """The JSON value."""
        return self.value if isinstance(self.value, str) else list(self.value)


@dataclass(slots=True)
class PromptSource:
    """Hands out prompts that no earlier request of this source had."""

    endpoint: Endpoint
    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    next_offset: int = 0
    per_word: float = 1.3
    notes: list[str] = field(default_factory=list)

    def take(self, num_tokens: int) -> Prompt:
        """The next prompt of exactly `num_tokens` tokens."""
        offset = self.next_offset
        self.next_offset += 1
        if self.ids:
            start = offset * STRIDE % len(self.ids)
            doubled = self.ids[start : start + num_tokens]
            while len(doubled) < num_tokens:
                doubled += self.ids[: num_tokens - len(doubled)]
            return Prompt(doubled, num_tokens)
        return self._text(offset, num_tokens)

    def _text(self, offset: int, num_tokens: int) -> Prompt:
        """Move the cut of a text until the server counts exactly num_tokens."""
        start = offset * STRIDE % len(self.words)
        words = (*self.words[start:], *self.words[:start])
        low, high = 1, max(2, int(2 * num_tokens / self.per_word) + 8)
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(" ".join(words[:middle])) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        text = " ".join(words[:low])
        count = self._count(text)
        for filler in (" a", " .", " 1", "\n", "!", ","):
            while count < num_tokens:
                longer = self._count(text + filler)
                if longer != count + 1:
                    break
                text, count = text + filler, longer
        if count != num_tokens:
            raise RunError(
                f"no text of exactly {num_tokens} tokens was found for {self.endpoint.url}; try another length"
            )
        self.per_word = num_tokens / low
        return Prompt(text, num_tokens)

    def _count(self, text: str) -> int:
        reply = self.endpoint.complete({"prompt": text, "max_tokens": 1, "temperature": 0.0})
        if reply.prompt_tokens is None:
            raise RunError(f"{self.endpoint.url} reports no usage.prompt_tokens, so exact counts cannot be made")
        return reply.prompt_tokens


def prompt_source(endpoint: Endpoint, *, first_offset: int = 0, num_sentences: int = 20_000) -> PromptSource:
    """Find out what the server takes: ids from its own /tokenize, plain ids, or text."""
    text = fixed_text(num_sentences)
    ids: list[int] = []
    for start in range(0, len(text), _PIECE):
        piece = _tokenize(endpoint, text[start : start + _PIECE])
        if not piece:
            break
        ids += piece
    if ids:
        source = PromptSource(endpoint, ids=tuple(ids), next_offset=first_offset)
        if _takes_ids(endpoint, ids[:8]):
            return source
    words = tuple(text.split())
    source = PromptSource(endpoint, words=words, next_offset=first_offset)
    source.notes.append("the server takes text only: prompts are cut by its own token counts")
    return source


def _takes_ids(endpoint: Endpoint, ids: Sequence[int]) -> bool:
    try:
        reply = endpoint.complete({"prompt": list(ids), "max_tokens": 1, "temperature": 0.0})
    except ServerError as error:
        if error.status == 0 or error.status in (401, 403):
            raise
        return False
    return reply.prompt_tokens == len(ids)


def _tokenize(endpoint: Endpoint, text: str) -> list[int]:
    """Token ids by the server's own tokenizer (several spellings of the same call), or none."""
    for path, body in (
        ("/tokenize", {"prompt": text, "add_special_tokens": False}),
        ("/tokenize", {"content": text}),
        ("/extras/tokenize", {"input": text}),
    ):
        try:
            answer = endpoint.post(path, body)
        except ServerError as error:
            if error.status == 0:
                raise
            continue
        ids = answer.get("tokens")
        if isinstance(ids, list) and len(ids) > 16 and all(isinstance(token, int) for token in ids):
            return [int(token) for token in ids]
    return []
