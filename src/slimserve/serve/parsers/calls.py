"""Readers of tool calls: what stands between the markers, one character at a time.

A reader is a coroutine over characters, so its result cannot depend on how text arrives. Until it has *accepted* the
call (the function's name is known and the rest has the right shape) nothing is given out, and the caller may still
take everything as ordinary text; afterwards arguments stream. What is held before acceptance is bounded.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Generator
from enum import Enum

from slimserve.serve.parsers.values import ToolSet, ValueKind, escape, value_json

Characters = Generator[None, str, bool]
Text = Generator[None, str, str]

_SPACE = frozenset(" \t\r\n")
_MAX_NAME = 256
_MAX_HELD = 1 << 16
_MAX_TEXT = 1 << 20


class Status(Enum):
    """Where a reader stands. WAITING: not accepted yet; DONE and REJECTED are final."""

    WAITING = "waiting"
    ACCEPTED = "accepted"
    DONE = "done"
    REJECTED = "rejected"


class _RejectedError(Exception):
    """The text is no call."""


class CallReader(ABC):
    """Reads one call. name: of the function, once accepted. After `feed`, `take` gives new argument text.

    rest: text that a DONE reader has read but that is not part of the call (a call without its end).
    """

    def __init__(self, tools: ToolSet, *, declared_only: bool) -> None:
        """declared_only: a name that the request does not declare is no call."""
        self.name: str | None = None
        self.rest = ""
        self.status = Status.WAITING
        self._tools = tools
        self._declared_only = declared_only
        self._out: list[str] = []
        self._fed = 0
        self._run = self._guarded()
        next(self._run)

    def feed(self, character: str) -> Status:
        """Take one character; a DONE or REJECTED reader must not be fed."""
        self._fed += 1
        try:
            self._run.send(character)
        except StopIteration as end:
            self.status = Status.DONE if end.value else Status.REJECTED
        if self.status is Status.WAITING and self._fed > _MAX_HELD:
            self.status = Status.REJECTED
        return self.status

    def take(self) -> str:
        """Argument text since the last time."""
        text = "".join(self._out)
        self._out.clear()
        return text

    @abstractmethod
    def _read(self) -> Characters:
        """The coroutine; its value says whether there was a call."""

    def _guarded(self) -> Characters:
        try:
            done = yield from self._read()
        except _RejectedError:
            done = False
        # Once accepted there is a call, whatever became of the rest of it.
        if self.status is Status.ACCEPTED and not done:
            self._break_off()
            return True
        return done

    def _break_off(self) -> None:  # noqa: B027 (most forms have nothing to close)
        """An accepted call did not go on as it should."""

    def _accept(self, name: str) -> None:
        self.name = name
        self.status = Status.ACCEPTED

    def _check_name(self, name: str) -> str:
        if not name or len(name) > _MAX_NAME or any(character.isspace() or character in '<>{}"' for character in name):
            raise _RejectedError
        if self._declared_only and not self._tools.declares(name):
            raise _RejectedError
        return name

    def _skip_space(self) -> Text:
        """The next character that is not white space."""
        while True:
            character = yield
            if character not in _SPACE:
                return character

    def _expect(self, text: str) -> Characters:
        for expected in text:
            character = yield
            if character != expected:
                raise _RejectedError
        return True

    def _word_until(self, stop: str) -> Text:
        """Text up to the character `stop`; a name or a key, so it is short."""
        word: list[str] = []
        while True:
            character = yield
            if character == stop:
                return "".join(word)
            word.append(character)
            if len(word) > _MAX_NAME:
                self.rest = "".join(word)
                raise _RejectedError


_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_IGNORED_KEYS = frozenset({"id", "type", "index"})


class JsonCallReader(CallReader):
    """`{"name": ..., "arguments": {...}}`, the keys in any order; the arguments' text is passed on as written.

    needs_arguments: an object without arguments is no call.
    """

    def __init__(self, tools: ToolSet, *, declared_only: bool, needs_arguments: bool = False) -> None:
        self._needs_arguments = needs_arguments
        self._pending: list[str] | None = []
        self._function = ""
        self._has_arguments = False
        super().__init__(tools, declared_only=declared_only)

    def _read(self) -> Characters:
        if (yield from self._skip_space()) != "{":
            return False
        character = yield from self._skip_space()
        while character != "}":
            if character != '"':
                return False
            key = yield from self._string(_MAX_NAME)
            if (yield from self._skip_space()) != ":":
                return False
            character = yield from self._member(key)
            if character in _SPACE:
                character = yield from self._skip_space()
            if character == ",":
                character = yield from self._skip_space()
            elif character != "}":
                self.rest = character
                return False
        return self._close()

    def _close(self) -> bool:
        if not self._function or (self._needs_arguments and not self._has_arguments):
            return False
        if not self._has_arguments:
            self._emit("{}")
        self._open()
        return True

    def _member(self, key: str) -> Text:
        """Read a value; the character behind it."""
        character = yield from self._skip_space()
        if key in _NAME_KEYS and not self._function:
            if character != '"':
                raise _RejectedError
            self._function = self._check_name((yield from self._string(_MAX_NAME)))
            if self._has_arguments:
                self._open()
        elif key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            if self._function:
                self._open()
            return (yield from self._arguments(character))
        elif key in _IGNORED_KEYS:
            return (yield from self._value(character, keep=False))
        else:
            raise _RejectedError
        return (yield)

    def _open(self) -> None:
        """Accept, and give out what was held for want of a name."""
        if self.status is Status.WAITING:
            self._accept(self._function)
            self._out.extend(self._pending or ())
            self._pending = None

    def _emit(self, text: str) -> None:
        (self._out if self._pending is None else self._pending).append(text)

    def _arguments(self, character: str) -> Text:
        """An object as it stands; a string holds the object as text; null means none."""
        if character == '"':
            text = yield from self._string(_MAX_TEXT)
            self._emit(text if text.strip() else "{}")
            return (yield)
        if character == "n":
            yield from self._expect("ull")
            self._emit("{}")
            return (yield)
        return (yield from self._value(character, keep=True))

    def _value(self, character: str, *, keep: bool) -> Text:
        """Pass over one JSON value that begins with `character`; the character behind it."""
        depth = 0
        in_string = False
        while True:
            if in_string:
                if keep:
                    self._emit(character)
                if character == "\\":
                    character = yield
                    if keep:
                        self._emit(character)
                elif character == '"':
                    in_string = False
                    if depth == 0:
                        return (yield)
            else:
                if depth == 0 and (character in ",}" or character in _SPACE):
                    return character
                if keep:
                    self._emit(character)
                if character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if depth == 0:
                        return (yield)
            character = yield

    def _string(self, limit: int) -> Text:
        """A JSON string behind its opening quote, decoded; at most `limit` characters long."""
        raw: list[str] = []
        while True:
            character = yield
            if character == '"':
                break
            raw.append(character)
            if character == "\\":
                raw.append((yield))
            if len(raw) > limit:
                raise _RejectedError
        try:
            return json.loads(f'"{"".join(raw)}"', strict=False)
        except ValueError as error:
            raise _RejectedError from error


class _TaggedReader(CallReader):
    """Common to formats that write each argument between tags: builds the JSON object member by member."""

    def __init__(self, tools: ToolSet, *, declared_only: bool) -> None:
        self._num_members = 0
        self._held: list[str] | None = None
        self._held_size = 0
        super().__init__(tools, declared_only=declared_only)

    def _begin(self, name: str) -> None:
        self._accept(self._check_name(name))
        self._out.append("{")

    def _break_off(self) -> None:
        self._out.append("}")

    def _key(self, key: str) -> None:
        self._out.append(f"{', ' if self._num_members else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_members += 1

    def _value_until(self, key: str, tag: str, *, strip_lines: bool) -> Characters:
        """A value up to `tag`, which begins with "<" and has no other one. Text streams, the rest is held.

        strip_lines: one line end belongs to each tag, not to the value.
        """
        as_text = self._tools.kind(self.name or "", key) is ValueKind.TEXT
        self._held, self._held_size = (None, 0) if as_text else ([], 0)
        if as_text:
            self._out.append('"')
        waiting = ""  # what may be the beginning of the tag, with the line end in front of it
        first = True
        while True:
            character = yield
            if first and strip_lines and character == "\n":
                first = False
                continue
            first = False
            while waiting and not self._goes_on(waiting, character, tag, strip_lines):
                self._add(waiting[0])
                waiting = waiting[1:]
            if waiting or self._goes_on("", character, tag, strip_lines):
                waiting += character
            else:
                self._add(character)
            if waiting.endswith(tag):
                break
        if self._held is None:
            self._out.append('"')
        else:
            self._out.append(value_json("".join(self._held)))
        self._held = None
        return True

    @staticmethod
    def _goes_on(waiting: str, character: str, tag: str, strip_lines: bool) -> bool:
        text = waiting + character
        return tag.startswith(text) or (strip_lines and ("\n" + tag).startswith(text))

    def _add(self, text: str) -> None:
        if self._held is None:
            self._out.append(escape(text))
            return
        self._held.append(text)
        self._held_size += len(text)
        if self._held_size > _MAX_HELD:
            # Too long to be held: no number, and better a text that streams than an object that never ends.
            self._out.append('"' + escape("".join(self._held)))
            self._held = None


class ArgumentCallReader(_TaggedReader):
    """GLM's form: `name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`, white space between the tags."""

    def _read(self) -> Characters:
        name = (yield from self._word_until("<")).strip()
        self._check_name(name)
        tag = yield from self._word_until(">")
        if tag not in ("arg_key", "/tool_call"):
            return False
        self._begin(name)
        while tag == "arg_key":
            key = yield from self._word_until("<")
            yield from self._expect("/arg_key>")
            yield from self._next_tag("arg_value>")
            self._key(key.strip())
            yield from self._value_until(key.strip(), "</arg_value>", strip_lines=False)
            yield from self._next_tag("")
            tag = yield from self._word_until(">")
        if tag != "/tool_call":
            self.rest = f"<{tag}>"
        self._out.append("}")
        return True

    def _next_tag(self, name: str) -> Characters:
        character = yield from self._skip_space()
        if character != "<":
            self.rest = character
            raise _RejectedError
        return (yield from self._expect(name))


class FunctionCallReader(_TaggedReader):
    """Qwen 3.5's form: `<function=name><parameter=k>v</parameter>...</function>`, values on lines of their own."""

    def __init__(self, tools: ToolSet, *, declared_only: bool, inside: bool = False) -> None:
        """inside: `<function=` has been read already."""
        self._inside = inside
        super().__init__(tools, declared_only=declared_only)

    def _read(self) -> Characters:
        if not self._inside:
            if (yield from self._skip_space()) != "<":
                return False
            yield from self._expect("function=")
        self._begin((yield from self._word_until(">")).strip().strip("\"'"))
        while True:
            character = yield from self._skip_space()
            if character != "<":
                self.rest = character
                return False
            tag = yield from self._word_until(">")
            if not tag.startswith("parameter="):
                self.rest = "" if tag == "/function" else f"<{tag}>"
                break
            key = tag.removeprefix("parameter=").strip().strip("\"'")
            self._key(key)
            yield from self._value_until(key, "</parameter>", strip_lines=True)
        self._out.append("}")
        return True
