"""Which markers a model writes around reasoning and tool calls, by name and by its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slimserve.errors import UsageError
from slimserve.serve.parsers.calls import ArgumentCallReader, CallReader, FunctionCallReader, JsonCallReader
from slimserve.serve.parsers.values import ToolSet


@dataclass(frozen=True, slots=True)
class CallMarker:
    """Text that opens a call. closing: texts, in order, that may follow it and are dropped.

    reader(tools, declared_only): reads what lies between. fallback: a form that the template does not ask for; it
    counts only for functions that the request declares, and never inside reasoning. repeats: further calls may stand
    between the same markers.
    """

    opening: str
    closing: tuple[str, ...]
    reader: Callable[[ToolSet, bool], CallReader]
    fallback: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls. bare: a call may also be all of the text, without a marker."""

    name: str
    markers: tuple[CallMarker, ...]
    bare: CallMarker | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    name: str
    opening: str
    closing: str


def _json(tools: ToolSet, declared_only: bool) -> CallReader:
    return JsonCallReader(tools, declared_only=declared_only)


def _json_with_arguments(tools: ToolSet, declared_only: bool) -> CallReader:
    return JsonCallReader(tools, declared_only=True, needs_arguments=True)


def _arguments(tools: ToolSet, declared_only: bool) -> CallReader:
    return ArgumentCallReader(tools, declared_only=declared_only)


def _function(tools: ToolSet, declared_only: bool) -> CallReader:
    return FunctionCallReader(tools, declared_only=declared_only)


def _inside_function(tools: ToolSet, declared_only: bool) -> CallReader:
    return FunctionCallReader(tools, declared_only=declared_only, inside=True)


_HERMES = CallMarker("<tool_call>", ("</tool_call>",), _json, repeats=True)
_FUNCTION_CLOSING = ("</tool_call>",)

CALL_FORMATS = {
    "hermes": CallFormat("hermes", (_HERMES,)),
    # Qwen 2.5 is asked for <tool_call>, but its small and its Coder models often write a code fence (recorded for
    # Qwen2.5-Coder 0.5B), repeat the tag of the tool list, or write the bare object.
    "qwen25": CallFormat(
        "qwen25",
        (
            _HERMES,
            CallMarker("<tools>", ("</tools>",), _json_with_arguments, fallback=True, repeats=True),
            CallMarker("```json", ("```",), _json_with_arguments, fallback=True, repeats=True),
            CallMarker("```", ("```",), _json_with_arguments, fallback=True, repeats=True),
        ),
        bare=CallMarker("", (), _json_with_arguments, fallback=True, repeats=True),
    ),
    "glm47": CallFormat("glm47", (CallMarker("<tool_call>", (), _arguments),)),
    "qwen3_xml": CallFormat(
        "qwen3_xml",
        (
            CallMarker("<tool_call>", _FUNCTION_CLOSING, _function),
            # The opening tag is sometimes left out.
            CallMarker("<function=", _FUNCTION_CLOSING, _inside_function),
        ),
    ),
}
REASONING_FORMATS = {"think": ReasoningFormat("think", "<think>", "</think>")}
_ALIASES = {"glm45": "glm47", "qwen3_coder": "qwen3_xml", "qwen3_5": "qwen3_xml"}
_REASONING_ALIASES = {"glm45": "think", "qwen3": "think", "deepseek_r1": "think"}


def call_format(name: str) -> CallFormat:
    """The format of a name; UsageError naming the known ones."""
    found = CALL_FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"unknown tool-call format {name!r}; known: {', '.join(sorted((*CALL_FORMATS, *_ALIASES)))}")
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of a name; UsageError naming the known ones."""
    found = REASONING_FORMATS.get(_REASONING_ALIASES.get(name, name))
    if found is None:
        known = ", ".join(sorted((*REASONING_FORMATS, *_REASONING_ALIASES)))
        raise UsageError(f"unknown reasoning format {name!r}; known: {known}")
    return found


def detect_call_format(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None if it teaches none that is known."""
    if "<arg_key>" in template:
        return CALL_FORMATS["glm47"]
    if "<function=" in template:
        return CALL_FORMATS["qwen3_xml"]
    if "<tool_call>" in template and "arguments" in template:
        small = "You are Qwen, created by Alibaba Cloud" in template and "<think>" not in template
        return CALL_FORMATS["qwen25" if small else "hermes"]
    return None


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The reasoning format of a chat template; None if it has none."""
    found = REASONING_FORMATS["think"]
    return found if found.closing in template or found.opening in template else None
