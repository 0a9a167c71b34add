"""The text side of fake_engine: bytes as tokens, a chat template of control tokens, simple parsers."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from fake_engine import CALL, CONTROL, END, END_CALL, END_THINK, IM_END, IM_START, THINK, VOCAB

from slimserve.errors import RequestError
from slimserve.serve.text import ReplyDelta, ToolCallDelta

VISIBLE = {THINK, END_THINK, CALL, END_CALL}


class FakeStream:
    def __init__(self, kept: set[int]) -> None:
        self._kept = kept
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return CONTROL[token_id] if token_id in self._kept else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class FakeStops:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        self._held += text
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        keep = max((n for stop in self._stops for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out, False

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


class FakeParser:
    """Sends text up to the first marker at once, sorts the rest at the end."""

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._held = ""

    def push(self, text: str) -> ReplyDelta:
        self._held += text
        cut = self._held.find("<")
        if cut < 0:
            cut = len(self._held)
        out, self._held = self._held[:cut], self._held[cut:]
        return ReplyDelta(content=out)

    def flush(self) -> ReplyDelta:
        text, reasoning, calls = self._held, "", []
        if match := re.match(r"<think>(.*?)(</think>|$)", text, re.DOTALL):
            reasoning, text = match.group(1), text[match.end() :]
        if self._tools:
            for match in re.finditer(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
                value = json.loads(match.group(1))
                calls.append(ToolCallDelta(len(calls), None, value["name"], json.dumps(value["arguments"])))
            text = re.sub(r"<tool_call>.*?(</tool_call>|$)", "", text, flags=re.DOTALL)
        return ReplyDelta(text, reasoning, tuple(calls))


class FakeText:
    """See the module."""

    vocab_size = VOCAB
    end_token_ids = frozenset({END, IM_END})
    chat_problem: str | None = None
    supports_tools = True

    def encode(self, text: str, *, add_special: bool = True, most: int | None = None) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        most: int | None = None,
    ) -> list[int]:
        if template_kwargs.get("fail"):
            raise RequestError("the template failed", param="messages", code="template_error")
        ids: list[int] = []
        if tools:
            ids += [IM_START, *json.dumps(list(tools)).encode(), IM_END]
        for message in messages:
            ids += [IM_START, *message["role"].encode(), 10, *message.get("content", "").encode("utf-8")]
            if "tool_calls" in message:
                ids += json.dumps(message["tool_calls"]).encode()
            ids.append(IM_END)
        return [*ids, IM_START, *b"assistant\n"]

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        stream = FakeStream(set(CONTROL) if keep_control else set())
        return "".join(stream.push(token_id) for token_id in token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else CONTROL.get(token_id, "").encode()

    def text_stream(self, prompt_token_ids: Sequence[int], *, markup: bool) -> FakeStream:
        return FakeStream(VISIBLE if markup else set())

    def stop_stream(self, stops: Sequence[str]) -> FakeStops:
        return FakeStops(stops)

    def reply_parser(self, *, prompt_token_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None) -> FakeParser:
        return FakeParser(bool(tools))

    def least_tokens(self, num_characters: int) -> int:
        return num_characters
