"""A loaded tokenizer and chat template as the TextModel that server and terminal use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from slimserve.errors import RequestError
from slimserve.serve.detokenize import Detokenizer
from slimserve.serve.parsers import (
    CallFormat,
    ReasoningFormat,
    ToolSet,
    call_format,
    detect_call_format,
    detect_reasoning_format,
    opens_reasoning,
    reasoning_format,
)
from slimserve.serve.parsers import ReplyParser as FormatParser
from slimserve.serve.stop_strings import StopMatcher
from slimserve.serve.text import ReplyParser, StopStream, TextStream
from slimserve.weights.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    chat_template_from_folder,
    chat_template_from_gguf,
)
from slimserve.weights.source import Container, Source
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

Form = TypeVar("Form")

_WINDOW = 64 * 2**10
"""Characters that are counted at a time where a text may be far too long."""

_LONG_PROSE = 5
"""Characters per token that prose rarely reaches: shorter texts are tokenized at once."""

_CUT_TOKENS = 256
"""More than the longest token has characters, so more than a cut can add."""

_PROMPT_END = 16
"""Tokens at a prompt's end that may open the reasoning."""

_INNER_MARKUP = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<parameter", "</parameter>", "</function>")


class ModelText:
    """See slimserve.serve.text.TextModel."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        vocab_size: int,
        *,
        reasoning: str = "",
        calls: str = "",
    ) -> None:
        """`vocab_size`: rows of the model's embedding, which may be more than the tokenizer names.

        `reasoning` and `calls` name reply formats ("none" = none); empty = what the template teaches.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size
        source = "" if template is None else template.source
        self._reasoning = _choose(reasoning, reasoning_format, lambda: detect_reasoning_format(source))
        self._calls = _choose(calls, call_format, lambda: detect_call_format(source))
        self._markup = _markup_ids(tokenizer, self._reasoning, self._calls)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end a reply."""
        return frozenset(self.tokenizer.end_ids)

    @property
    def chat_problem(self) -> str | None:
        """Why this model cannot chat; None if it can."""
        return NO_TEMPLATE if self.template is None else self.template.problem

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return self.template is not None and self.template.supports_tools

    def encode(self, text: str, *, add_special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a raw prompt."""
        self._refuse_above(text, most, "prompt")
        if add_special:
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode(text, parse_special=True)

    def least_tokens(self, num_characters: int) -> int:
        """Characters over the bytes of the longest token."""
        return num_characters // self.tokenizer.max_token_bytes

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation."""
        assert self.template is not None, "chat_problem was not looked at"
        rendered = self.template.render(messages, tools, **template_kwargs)
        self._refuse_above(rendered.text, most, "messages")
        return self.tokenizer.encode_prompt(rendered)

    def _refuse_above(self, text: str, most: int | None, param: str) -> None:
        """Count a long text window by window before it is tokenized whole, which takes 500 bytes per token.

        Cutting a text changes its tokens near the cuts only; each may add or save a few.
        """
        if most is None or len(text) <= max(_WINDOW, _LONG_PROSE * most):
            return
        count = 0
        for number, start in enumerate(range(0, len(text), _WINDOW), start=1):
            count += len(self.tokenizer.encode(text[start : start + _WINDOW], parse_special=True))
            if count > most + _CUT_TOKENS * number:
                seen = min(start + _WINDOW, len(text))
                raise RequestError(
                    f"the first {seen} of the prompt's {len(text)} characters alone have {count} tokens; this server "
                    f"takes at most {most} tokens of prompt and reply together",
                    param=param,
                    code="context_length_exceeded",
                )

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of tokens."""
        return self.tokenizer.decode(token_ids, skip_special=not keep_control, keep=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        return self.tokenizer.token_bytes(token_id)

    def text_stream(self, prompt_token_ids: Sequence[int], *, markup: bool) -> TextStream:
        """A fresh incremental decoder."""
        keep = self._markup if markup else frozenset()
        return Detokenizer(self.tokenizer, previous_id=prompt_token_ids[-1], keep_ids=keep)

    def stop_stream(self, stops: Sequence[str]) -> StopStream:
        """A fresh stop-string matcher."""
        return StopMatcher.of(stops)

    def reply_parser(self, *, prompt_token_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None) -> ReplyParser:
        """A fresh parser; the prompt's end says whether reasoning has begun."""
        end = self.tokenizer.decode(prompt_token_ids[-_PROMPT_END:], skip_special=False)
        return FormatParser(
            self._reasoning,
            self._calls,
            None if tools is None else ToolSet.of(tools),
            in_reasoning=opens_reasoning(self._reasoning, end),
        )

    def describe(self) -> list[str]:
        """Lines for start-up."""
        chat = [f"chat: not available, {NO_TEMPLATE}"] if self.template is None else self.template.describe()
        names = [form.name for form in (self._reasoning, self._calls) if form is not None]
        formats = [f"reply formats: {', '.join(names)}"] if names and self.template is not None else []
        return [*self.tokenizer.describe(), *chat, *formats]


def _choose(name: str, by_name: Callable[[str], Form], detect: Callable[[], Form | None]) -> Form | None:
    if name == "none":
        return None
    return by_name(name) if name else detect()


def _markup_ids(tokenizer: Tokenizer, reasoning: ReasoningFormat | None, calls: CallFormat | None) -> frozenset[int]:
    """Control tokens that are markup of the reply formats: their names must reach the parser."""
    words = set(_INNER_MARKUP) if calls is not None else set()
    if reasoning is not None:
        words |= {reasoning.opening, reasoning.closing}
    for marker in calls.markers if calls is not None else ():
        words |= {marker.opening, *marker.closing}
    found = (tokenizer.token_id(word) for word in words)
    return frozenset(index for index in found if index is not None) - frozenset(tokenizer.end_ids)


def model_text(source: Source, vocab_size: int, *, reasoning: str = "", calls: str = "") -> ModelText:
    """The text side of an opened model; raises FormatError for damaged tokenizer files, UsageError for formats."""
    if source.container is Container.GGUF:
        return metadata_text(source.metadata, vocab_size, reasoning=reasoning, calls=calls)
    tokenizer = tokenizer_from_folder(source.folder)
    template = chat_template_from_folder(source.folder, tokenizer)
    return ModelText(tokenizer, template, vocab_size, reasoning=reasoning, calls=calls)


def metadata_text(metadata: Mapping[str, Any], vocab_size: int, *, reasoning: str = "", calls: str = "") -> ModelText:
    """The text side that GGUF keys describe; raises as `model_text` does."""
    tokenizer = tokenizer_from_gguf(metadata)
    template = chat_template_from_gguf(metadata, tokenizer)
    return ModelText(tokenizer, template, vocab_size, reasoning=reasoning, calls=calls)
