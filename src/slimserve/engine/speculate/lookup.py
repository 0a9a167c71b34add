"""Prompt lookup: what followed the last tokens when they stood in prompt or output before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slimserve.engine.request import Request

SHORTEST_RUN = 2
LONGEST_RUN = 8
"""Tokens that must stand before a place as they stand at the end, and how many more are compared among places."""

_FIRST_DRAFT = 3


class _History:
    """The tokens of one request, the place that drafts are read from, and how they fare.

    Nothing but the tokens is kept (an index of runs would take forty times their memory and a pause per long prompt):
    a search looks at every token once, a few microseconds per thousand.
    """

    __slots__ = ("draft_length", "num_tokens", "pause", "proposed", "proposed_at", "source", "tokens")

    def __init__(self, longest: int) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros(256, dtype=np.int32)
        self.num_tokens = 0
        self.draft_length = min(_FIRST_DRAFT, longest)
        self.pause = 0
        self.proposed: tuple[int, ...] = ()
        self.proposed_at = 0
        self.source: int | None = None

    def extend(self, new: Sequence[int]) -> None:
        """Take in committed tokens. A place is kept for as long as what follows there comes true: then its run is
        longer than any that a search compares, and a newer place with the same few tokens proves nothing against it."""
        end = self.num_tokens + len(new)
        if end > self.tokens.size:
            grown = np.zeros(max(end, 2 * self.tokens.size), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown
        self.tokens[self.num_tokens : end] = new
        if self.source is not None:
            followed = self.tokens[self.source : self.source + len(new)]
            same = np.array_equal(followed, self.tokens[self.num_tokens : end])
            self.source = self.source + len(new) if same else None
        self.num_tokens = end

    def learn(self, longest: int) -> None:
        """Draft more after a draft that held, less after one that did not, and pause after several misses."""
        if not self.proposed:
            return
        actual = self.tokens[self.proposed_at : min(self.proposed_at + len(self.proposed), self.num_tokens)].tolist()
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
        known = self.tokens[self.source : self.num_tokens]
        # Where the place is so near that the draft reaches the end, the text repeats itself, and so does the draft.
        self.proposed = tuple(np.resize(known, min(limit, self.draft_length)).tolist())
        self.proposed_at = self.num_tokens
        return self.proposed

    def _find(self) -> int | None:
        """The place behind the longest run like the last tokens, the newest of equals; None where no run is like it."""
        if self.num_tokens < SHORTEST_RUN:
            return None
        tokens, last = self.tokens, self.num_tokens - 1
        places = np.flatnonzero(tokens[:last] == tokens[last])
        for back in range(1, min(LONGEST_RUN, last + 1)):
            longer = places[places >= back]
            longer = longer[tokens[longer - back] == tokens[last - back]]
            if not longer.size:
                if back < SHORTEST_RUN:
                    return None
                break
            places = longer
        return int(places[-1]) + 1 if places.size else None


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
        history.extend(request.output_token_ids[history.num_tokens - len(request.prompt_token_ids) :])
        history.learn(self._max_draft)
        return history.draft(min(limit, self._max_draft))

    def release(self, request_id: str) -> None:
        """See Drafter."""
        self._histories.pop(request_id, None)
