"""Tokens to text while they arrive: only whole characters are given out."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from slimserve.weights.tokenizer import Tokenizer

# Stands for "some ordinary token": the text continues a prompt, so a leading space belongs to it.
CONTINUES = -1


class Detokenizer:
    """Incremental decoder of one choice; what it gives out joins to `Tokenizer.decode` of all its ids.

    previous_id: the token in front of the first one (None: the text starts here).
    keep_ids: control tokens whose names are part of the text (markup that a parser reads); all others give none.
    At most three bytes are held back: the beginning of a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, previous_id: int | None = CONTINUES, keep_ids: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._previous_id = previous_id
        self._hidden = tokenizer.control_ids - frozenset(keep_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became whole with this token."""
        previous_id, self._previous_id = self._previous_id, token_id
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token_id, previous_id))

    def flush(self) -> str:
        """End of the text: a character that never became whole is left out, so this is always ""."""
        self._decoder.reset()
        return ""
