"""Parsers of chat replies: reasoning and tool calls, by format name or detected from the chat template."""

from slimserve.serve.parsers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    call_format,
    detect_call_format,
    detect_reasoning_format,
    reasoning_format,
)
from slimserve.serve.parsers.reply import ReplyParser, new_call_id, opens_reasoning
from slimserve.serve.parsers.values import ToolSet

__all__ = [
    "CALL_FORMATS",
    "REASONING_FORMATS",
    "CallFormat",
    "ReasoningFormat",
    "ReplyParser",
    "ToolSet",
    "call_format",
    "detect_call_format",
    "detect_reasoning_format",
    "new_call_id",
    "opens_reasoning",
    "reasoning_format",
]
