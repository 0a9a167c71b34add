"""What a tool's declaration says about its parameters, and values written as text turned into JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ValueKind(Enum):
    """How a parameter's text is read: as it stands, or as JSON if it is JSON."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions of a request. names: None when nothing is known about them."""

    names: frozenset[str] | None
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> ToolSet:
        """From OpenAI's `tools`; declarations of another shape are skipped."""
        if tools is None:
            return cls(None, {})
        parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str):
                schema = function.get("parameters")
                properties = schema.get("properties") if isinstance(schema, Mapping) else None
                parameters[name] = properties if isinstance(properties, Mapping) else {}
        return cls(frozenset(parameters), parameters)

    def declares(self, name: str) -> bool:
        """Whether the request has a function of this name."""
        return self.names is not None and name in self.names

    def kind(self, function: str, parameter: str) -> ValueKind:
        """How to read a value of this parameter; without a declaration as JSON if it is JSON."""
        schema = self.parameters.get(function, {}).get(parameter)
        return ValueKind.TEXT if _allows_only_text(schema) else ValueKind.JSON


def _allows_only_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return schema["type"] == "string" or schema["type"] == ["string"]
    if isinstance(schema.get("enum"), list):
        return bool(schema["enum"]) and all(isinstance(value, str) for value in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            return all(_allows_only_text(option) for option in options)
    return isinstance(schema.get("const"), str)


def escape(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def value_json(text: str) -> str:
    """JSON of a value written as text: itself if it is JSON (Python's True, False, None too), else a string."""
    stripped = text.strip()
    stripped = _PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
