"""One grammar for a chat reply: reasoning, content and tool calls, in the order in which they come.

Text is taken only when nothing that follows can change what it is, so the result does not depend on how the reply
was sliced; what is held back is the beginning of a marker, a run of white space that may turn out to surround one,
or a call that is not accepted yet, and each of these is bounded.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum

from slimserve.serve.parsers.calls import CallReader, Status
from slimserve.serve.parsers.formats import CallFormat, CallMarker, ReasoningFormat
from slimserve.serve.parsers.values import ToolSet
from slimserve.serve.text import ReplyDelta, ToolCallDelta

_MAX_SPACE = 1024
_PIECE = 4096
# Text that was held as a call and turned out to be none is read twice; past this much in one reply no more calls are
# looked for, so that the work stays in proportion.
_MAX_RESCANNED = 1 << 20


class _State(Enum):
    START = "start"  # nothing but white space so far
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    AFTER_CALL = "after call"  # closing markers, or the next call between the same markers


def new_call_id() -> str:
    """A fresh id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ReplyParser:
    """Sorts one reply's text.

    reasoning: None takes everything as content. calls: None (or tools None) leaves calls in the text.
    in_reasoning: the prompt has opened the reasoning already.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        tools: ToolSet | None,
        *,
        in_reasoning: bool = False,
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls if tools is not None else None
        self._tools = tools or ToolSet.of(None)
        self._new_id = call_id
        self._state = _State.START
        self._inside = in_reasoning and reasoning is not None  # where text goes back to after a call
        self._drop_space = True
        self._long_space = False
        self._space = ""  # white space in front of a marker: text again if the marker opens no call
        self._rescanned = 0
        self._buffer = ""
        self._fed = 0
        self._marker: CallMarker | None = None
        self._reader: CallReader | None = None
        self._num_calls = 0
        self._texts: dict[bool, list[str]] = {False: [], True: []}  # by whether it is reasoning
        self._said: set[bool] = set()
        self._torn = False  # a call stands between the last text and the next
        self._pieces: list[ToolCallDelta] = []

    def push(self, text: str) -> ReplyDelta:
        """What this text adds."""
        # In pieces, so that cutting the buffer stays cheap.
        for start in range(0, len(text), _PIECE):
            self._buffer += text[start : start + _PIECE]
            while self._step():
                pass
        return self._take()

    def flush(self) -> ReplyDelta:
        """What was held back, at the end of the reply."""
        while self._step():
            pass
        while self._reader is not None and self._state is _State.CALL:
            if self._reader.status is Status.ACCEPTED:
                self._reader, self._buffer = None, ""
            else:
                self._reject()
                while self._step():
                    pass
        if self._state is not _State.AFTER_CALL:
            self._finish_text()
        self._buffer = ""
        return self._take()

    def _finish_text(self) -> None:
        self._say(self._buffer.rstrip() if self._inside else self._buffer)

    def _take(self) -> ReplyDelta:
        content, reasoning = "".join(self._texts[False]), "".join(self._texts[True])
        delta = ReplyDelta(content, reasoning, tuple(self._pieces))
        self._texts = {False: [], True: []}
        self._pieces = []
        return delta

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._torn and self._inside in self._said and not text[0].isspace():
            text = "\n" + text
        self._torn = False
        self._said.add(self._inside)
        self._texts[self._inside].append(text)

    def _step(self) -> bool:
        """Take what is certain; False when more text is needed."""
        if not self._buffer:
            return False
        if self._state is _State.START:
            return self._start()
        if self._state is _State.CALL:
            return self._read_call()
        if self._state is _State.AFTER_CALL:
            return self._close_call()
        return self._text()

    # ---- the beginning ----

    def _start(self) -> bool:
        """White space, then the opening of the reasoning (also if the prompt has it already), or something else."""
        body = self._buffer.lstrip()
        space = len(self._buffer) - len(body)
        if not body and space <= _MAX_SPACE:
            return False
        opening = self._reasoning.opening if self._reasoning is not None else None
        if opening is not None and body and space <= _MAX_SPACE:
            if body.startswith(opening):
                self._buffer = body[len(opening) :]
                self._inside = True
                self._enter_text()
                return True
            if opening.startswith(body):
                return False
        if self._inside:
            self._enter_text()
            return True
        bare = self._calls.bare if self._calls is not None else None
        if bare is not None and body.startswith("{") and space <= _MAX_SPACE:
            self._space, self._buffer = self._buffer[:space], body
            self._open_call(bare)
            return True
        self._enter_text(keep_space=True)
        return True

    def _enter_text(self, *, keep_space: bool = False) -> None:
        self._state = _State.REASONING if self._inside else _State.CONTENT
        self._drop_space = not keep_space
        self._long_space = False

    # ---- reasoning and content ----

    def _openings(self) -> list[tuple[str, CallMarker]]:
        if self._calls is None:
            return []
        return [(marker.opening, marker) for marker in self._calls.markers if not (self._inside and marker.fallback)]

    def _text(self) -> bool:
        if self._drop_space:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            self._drop_space = False
        words = [opening for opening, _ in self._openings()]
        if self._inside and self._reasoning is not None:
            words.append(self._reasoning.closing)
        place, word = _first_of(self._buffer, words)
        if word:
            if any(other != word and other.startswith(word) for other in words) and self._may_grow(place, words):
                return self._release(place)
            self._release_before(place)
            self._buffer = self._buffer[len(word) :]
            self._meet(word)
            return True
        return self._release(len(self._buffer) - _partial(self._buffer, words))

    def _may_grow(self, place: int, words: list[str]) -> bool:
        rest = self._buffer[place:]
        return any(len(word) > len(rest) and word.startswith(rest) for word in words)

    def _meet(self, word: str) -> None:
        for opening, marker in self._openings():
            if opening == word:
                self._open_call(marker)
                return
        self._inside, self._space = False, ""
        self._enter_text()

    def _release(self, end: int) -> bool:
        """Give out the text before `end`, but not white space that may stand before a marker; then wait."""
        text = self._buffer[:end]
        if not text:
            return False
        body = text.rstrip() if self._inside or self._calls is not None else text
        space = len(text) - len(body)
        if self._long_space or space > _MAX_SPACE:
            # Too long a run to hold: it is text, to its end.
            self._long_space = space > 0
            body = text
        elif body:
            self._long_space = False
        self._say(body)
        self._buffer = self._buffer[len(body) :]
        return False

    def _release_before(self, place: int) -> None:
        """Give out the text before a marker; white space between the two is dropped unless it is text already."""
        text = self._buffer[:place]
        body = text.rstrip()
        if (self._long_space and not body) or len(text) - len(body) > _MAX_SPACE:
            body = text
        self._long_space = False
        self._say(body)
        self._space = text[len(body) :]
        self._buffer = self._buffer[place:]

    # ---- calls ----

    def _open_call(self, marker: CallMarker) -> None:
        self._marker = marker
        self._reader = marker.reader(self._tools, marker.fallback or self._inside)
        self._state = _State.CALL
        self._fed = 0

    def _read_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        while self._fed < len(self._buffer):
            accepted = reader.status is Status.ACCEPTED
            status = reader.feed(self._buffer[self._fed])
            self._fed += 1
            if not accepted and status in (Status.ACCEPTED, Status.DONE):
                self._pieces.append(ToolCallDelta(self._num_calls, self._new_id(), reader.name, ""))
                self._num_calls += 1
                self._space, self._torn = "", True
            if status is Status.REJECTED:
                self._reject()
                return True
            if status is Status.DONE:
                self._give_arguments()
                self._buffer = reader.rest + self._buffer[self._fed :]
                self._reader, self._state = None, _State.AFTER_CALL
                return True
        if reader.status is Status.ACCEPTED:
            self._give_arguments()
            self._buffer, self._fed = "", 0
        return False

    def _give_arguments(self) -> None:
        assert self._reader is not None
        text = self._reader.take()
        if not text:
            return
        index = self._num_calls - 1
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.index == index:
            self._pieces[-1] = ToolCallDelta(index, last.call_id, last.name, last.arguments + text)
        else:
            self._pieces.append(ToolCallDelta(index, None, None, text))

    def _reject(self) -> None:
        """No call: the marker is text, and what follows is looked at again."""
        marker = self._marker
        assert marker is not None
        self._rescanned += self._fed
        if self._rescanned > _MAX_RESCANNED:
            self._calls = None
        self._reader = self._marker = None
        self._enter_text(keep_space=True)
        self._say(self._space + marker.opening)
        self._space = ""

    def _close_call(self) -> bool:
        """Closing markers and white space are dropped; between repeating markers another call may follow."""
        marker = self._marker
        assert marker is not None
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        for closing in marker.closing:
            if self._buffer.startswith(closing):
                self._buffer = self._buffer[len(closing) :]
                self._marker = None
                self._enter_text()
                return True
            if closing.startswith(self._buffer):
                return False
        if marker.repeats and self._buffer.startswith("{"):
            self._open_call(CallMarker("", marker.closing, marker.reader, marker.fallback, marker.repeats))
            return True
        self._marker = None
        self._enter_text()
        return True


def _first_of(text: str, words: list[str]) -> tuple[int, str]:
    """(place, word) of the earliest word in `text`, the longest of those at one place; (0, "") if there is none."""
    found = [(place, -len(word), word) for word in words if (place := text.find(word)) >= 0]
    if not found:
        return 0, ""
    place, _, word = min(found)
    return place, word


def _partial(text: str, words: list[str]) -> int:
    """Length of the longest end of `text` that begins one of `words`."""
    longest = max(map(len, words), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(word.startswith(end) for word in words):
            return length
    return 0


def opens_reasoning(reasoning: ReasoningFormat | None, prompt_end: str) -> bool:
    """Whether a prompt that ends in this text has opened the reasoning and not closed it."""
    return reasoning is not None and prompt_end.rstrip().endswith(reasoning.opening)
