"""A loaded tokenizer and chat template as the TextModel that server and terminal use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimserve.serve.detokenize import Detokenizer
from slimserve.serve.stop_strings import StopMatcher
from slimserve.serve.text import ReplyDelta, ReplyParser, StopStream, TextStream
from slimserve.weights.chat_template import (
    NO_TEMPLATE,
    ChatTemplate,
    chat_template_from_folder,
    chat_template_from_gguf,
)
from slimserve.weights.source import Container, Source
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf


class PlainParser:
    """The parser of models whose replies are content and nothing else."""

    def push(self, text: str) -> ReplyDelta:
        """All of it is content."""
        return ReplyDelta(content=text)

    def flush(self) -> ReplyDelta:
        """Nothing is ever held."""
        return ReplyDelta()


class ModelText:
    """See slimserve.serve.text.TextModel."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's embedding, which may be more than the tokenizer names."""
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size

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

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a raw prompt."""
        if add_special:
            return self.tokenizer.encode_prompt(text)
        return self.tokenizer.encode(text, parse_special=True)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Token ids of a rendered conversation."""
        assert self.template is not None, "chat_problem was not looked at"
        return self.tokenizer.encode_prompt(self.template.render(messages, tools, **template_kwargs))

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of tokens."""
        return self.tokenizer.decode(token_ids, skip_special=not keep_control, keep=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        return self.tokenizer.token_bytes(token_id)

    def text_stream(self, prompt_token_ids: Sequence[int], *, markup: bool) -> TextStream:
        """A fresh incremental decoder."""
        return Detokenizer(self.tokenizer, previous_id=prompt_token_ids[-1])

    def stop_stream(self, stops: Sequence[str]) -> StopStream:
        """A fresh stop-string matcher."""
        return StopMatcher.of(stops)

    def reply_parser(self, *, prompt_token_ids: Sequence[int], tools: bool) -> ReplyParser:
        """A fresh parser."""
        return PlainParser()

    def describe(self) -> list[str]:
        """Lines for start-up."""
        chat = [f"chat: not available, {NO_TEMPLATE}"] if self.template is None else self.template.describe()
        return [*self.tokenizer.describe(), *chat]


def model_text(source: Source, vocab_size: int) -> ModelText:
    """The text side of an opened model; raises FormatError for damaged tokenizer files."""
    if source.container is Container.GGUF:
        tokenizer = tokenizer_from_gguf(source.metadata)
        return ModelText(tokenizer, chat_template_from_gguf(source.metadata, tokenizer), vocab_size)
    tokenizer = tokenizer_from_folder(source.folder)
    return ModelText(tokenizer, chat_template_from_folder(source.folder, tokenizer), vocab_size)
