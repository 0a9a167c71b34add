"""Stop strings in streamed text: nothing of a stop string is ever sent, and no more is held back than could become one.

All stop strings are matched at once by one automaton (Aho and Corasick, 1975): its state is the longest end of the
text that begins some stop string, so the work per character does not depend on how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """Transitions over the prefixes of all stop strings; shared by all choices of a request.

    depth[state]: length of the prefix. found[state]: length of the longest stop string that ends there, or 0.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.found = [0]
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
            state = following
        self.found[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                queue.append(following)
            self.found[state] = max(self.found[state], self.found[self._fail[state]])

    def step(self, state: int, character: str) -> int:
        """State after `character`."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    @property
    def is_empty(self) -> bool:
        """Whether there is no stop string at all."""
        return len(self._next) == 1


@lru_cache(maxsize=4)
def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of a request; 256 choices with the longest lists would need four million states otherwise."""
    return StopAutomaton(stops)


class StopMatcher:
    """One choice's text. The first stop string to become complete ends it (of several at one place, the longest)."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self._stopped = False

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopMatcher:
        """A matcher of its own for `stops`; empty strings are not stop strings."""
        return cls(_automaton(tuple(stops)))

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was met); after a match everything is dropped."""
        if self._stopped or not text:
            return "", self._stopped
        automaton = self._automaton
        if automaton.is_empty:
            return text, False
        state = self._state
        text = self._held + text
        for index in range(len(self._held), len(text)):
            state = automaton.step(state, text[index])
            length = automaton.found[state]
            if length:
                self._stopped, self._held = True, ""
                return text[: index + 1 - length], True
        self._state = state
        sent = len(text) - automaton.depth[state]
        self._held = text[sent:]
        return text[:sent], False

    def flush(self) -> str:
        """What was held and is no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held
