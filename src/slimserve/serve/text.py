"""What the server and the terminal need of a model's text side; weights/tokenizer and serve/parsers fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: `call_id` and `name` come once, with the first piece of an index."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """A piece of a chat reply, sorted into what the API calls content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.content or self.reasoning or self.tool_calls)


class TextStream(Protocol):
    """Tokens to text, whole characters only."""

    def push(self, token_id: int) -> str:
        """Text that became whole with this token."""
        ...

    def flush(self) -> str:
        """End of the text; a character that never became whole is left out."""
        ...


class StopStream(Protocol):
    """Holds back what may be the beginning of a stop string."""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent, whether a stop string was met); nothing of a stop string is ever sent."""
        ...

    def flush(self) -> str:
        """What was held and is no stop string after all."""
        ...


class ReplyParser(Protocol):
    """Sorts a chat reply's text; the result does not depend on how the text was sliced."""

    def push(self, text: str) -> ReplyDelta:
        """What this text adds."""
        ...

    def flush(self) -> ReplyDelta:
        """What was held back, at the end of the reply."""
        ...


class TextModel(Protocol):
    """One model's tokenizer, template and parsers. Methods are safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a reply."""
        ...

    @property
    def chat_problem(self) -> str | None:
        """Why this model cannot chat (no template, or one that does not compile); None if it can."""
        ...

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        ...

    def encode(self, text: str, *, add_special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a raw prompt; control tokens written in it are read, because its writer writes all of it.

        `most`: raise RequestError, without tokenizing all of it, for a text that has clearly more tokens.
        """
        ...

    def least_tokens(self, num_characters: int) -> int:
        """A text of so many characters has at least this many tokens: a bound before any tokenizing."""
        ...

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation that ends where the assistant speaks; RequestError if it fails.

        `most`: see encode.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of tokens; control tokens are left out or shown by their names."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, control tokens by their name."""
        ...

    def text_stream(self, prompt_token_ids: Sequence[int], *, markup: bool) -> TextStream:
        """A fresh incremental decoder of what follows a prompt; `markup` keeps what a reply parser reads."""
        ...

    def stop_stream(self, stops: Sequence[str]) -> StopStream:
        """A fresh stop-string matcher."""
        ...

    def reply_parser(self, *, prompt_token_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None) -> ReplyParser:
        """A fresh parser for the reply to this prompt; without `tools`, calls stay text."""
        ...
