"""Prompt lookup: what followed the last tokens when they stood in prompt or output before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from slimserve.engine.request import Request

GRAM_LENGTHS = (4, 2)
"""Lengths of the token runs that are looked up, longest first."""

_FIRST_DRAFT = 3
_TOKEN_BITS = 32


class _History:
    """Where each run of tokens of one request was last followed by something, and how its drafts fare."""

    __slots__ = ("draft_length", "followers", "pause", "proposed", "proposed_at", "source", "tokens")

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self.followers: tuple[dict[int, int], ...] = tuple({} for _ in GRAM_LENGTHS)
        self.draft_length = min(_FIRST_DRAFT, longest)
        self.pause = 0
        self.proposed: tuple[int, ...] = ()
        self.proposed_at = 0
        self.source: int | None = None

    def extend(self, new: Sequence[int]) -> None:
        """Take in committed tokens; a run is filed once its follower is known."""
        tokens = self.tokens
        for token in new:
            if self.source is not None:
                self.source = self.source + 1 if tokens[self.source] == token else None
            for length, followers in zip(GRAM_LENGTHS, self.followers, strict=True):
                if len(tokens) >= length:
                    followers[_key(tokens[-length:])] = len(tokens)
            tokens.append(token)

    def learn(self, longest: int) -> None:
        """Draft more after a draft that held, less after one that did not, and pause after several misses."""
        if not self.proposed:
            return
        actual = self.tokens[self.proposed_at : self.proposed_at + len(self.proposed)]
        held = 0
        while held < len(actual) and actual[held] == self.proposed[held]:
            held += 1
        if held == len(self.proposed):
            self.draft_length = min(2 * self.draft_length, longest)
        elif not held:
            self.pause = 0 if self.draft_length > 1 else 8
            self.draft_length = max(1, self.draft_length // 2)
        else:
            self.draft_length = held + 1 if held + 1 <= longest else longest
        self.proposed = ()

    def draft(self, limit: int) -> tuple[int, ...]:
        """Tokens that followed the longest known run that the sequence ends with."""
        if self.pause:
            self.pause -= 1
            return ()
        if self.source is None:
            self.source = self._find()
            if self.source is None:
                return ()
        self.proposed = tuple(self.tokens[self.source : self.source + min(limit, self.draft_length)])
        self.proposed_at = len(self.tokens)
        return self.proposed

    def _find(self) -> int | None:
        """The place behind the newest run of tokens like the last ones.

        A place found is kept for as long as what follows there comes true: then its run is longer than any that is
        filed, and a newer place with the same few tokens before it proves nothing against it.
        """
        for length, followers in zip(GRAM_LENGTHS, self.followers, strict=True):
            if len(self.tokens) >= length:
                start = followers.get(_key(self.tokens[-length:]))
                if start is not None:
                    return start
        return None


class PromptLookup:
    """A drafter for every model: no weights and no device work, and good where a reply repeats its prompt."""

    def __init__(self, max_draft: int) -> None:
        """`max_draft` bounds a draft's tokens."""
        self._max_draft = max_draft
        self._histories: dict[str, _History] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """See Drafter."""
        return [self._propose(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose(self, request: Request, limit: int) -> tuple[int, ...]:
        history = self._histories.get(request.request_id)
        if history is None:
            history = self._histories[request.request_id] = _History(self._max_draft)
            history.extend(request.prompt_token_ids)
        history.extend(request.output_token_ids[len(history.tokens) - len(request.prompt_token_ids) :])
        history.learn(self._max_draft)
        return history.draft(min(limit, self._max_draft))

    def release(self, request_id: str) -> None:
        """See Drafter."""
        self._histories.pop(request_id, None)


def _key(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token
    return key
