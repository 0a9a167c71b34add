"""The fields of OpenAI's API and SlimServe's extensions, as types with documented bounds.

Every field is served, accepted because it asks for nothing (`user`, `store: false`, ...), or refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from slimserve.errors import RequestError
from slimserve.serve import limits
from slimserve.serve.errors import from_validation

_STRUCTURED = "structured output is not served by this version"
_NOT_TEXT = "this server reads and writes text only"

UNKNOWN_FIELD = "unknown_field"
"""Type of the complaint about a field that no object of its kind has; its context holds the `name`."""

UNSUPPORTED: dict[str, str] = {
    "regex": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding_backend": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "grammar": _STRUCTURED,
    "ebnf": _STRUCTURED,
    "audio": _NOT_TEXT,
    "images": _NOT_TEXT,
    "suffix": "text before a suffix (fill in the middle) is not served; write the model's own markers into `prompt`",
    "prediction": "predicted outputs are not served",
    "reasoning_effort": "pass what the model's template reads through `chat_template_kwargs`",
    "verbosity": "the model has no such setting",
    "web_search_options": "this server does not search the web",
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "use_beam_search": "beam search is not served",
}
"""Known fields that are refused when they hold anything but null, and why."""


Body = TypeVar("Body", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """The first unknown field ends the check: pydantic would write a complaint about each of a million."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"name": name})
        return value


class _Open(BaseModel):
    """An object whose further keys are looked at by hand; nothing known has more than a few."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limits.MAX_KEYS:
            raise PydanticCustomError("too_long", f"{len(value)} keys; at most {limits.MAX_KEYS} are taken")
        return value


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _at_most(count: int) -> BeforeValidator:
    """A bound on a list or object that is checked before any of its entries, which may be millions."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"{len(value)} entries; at most {count} are taken")
        return value

    return BeforeValidator(check)


FIRST_ONLY = Field(fail_fast=True)
"""A list whose first entry at fault ends its check: a million complaints cost more than a million entries."""

ShortText = Annotated[str, Field(max_length=limits.MAX_USER)]
TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]


class GenerationFields(_Strict):
    """What chat and plain completions share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stop: Stop | Annotated[list[Stop], FIRST_ONLY, _at_most(limits.MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    logit_bias: Annotated[dict[str, float], _at_most(limits.MAX_LOGIT_BIAS)] | None = None

    # Extensions.
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST_ONLY, _at_most(limits.MAX_STOP_TOKENS)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=limits.MAX_CACHE_SALT)] | None = None
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    speculate: bool | None = None

    # Accepted because they ask for nothing that changes the reply.
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    metadata: Annotated[dict[ShortText, ShortText], _at_most(limits.MAX_METADATA)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionBody(GenerationFields):
    """Body of /v1/completions; `prompt` is checked by hand because of its four shapes."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None


class FunctionCall(_Strict):
    """A call in an assistant turn of the history; `arguments` is the text of a JSON object."""

    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_TOOL_NAME)]
    arguments: str | None = None


class ToolCall(_Strict):
    """One entry of `tool_calls`."""

    id: ShortText | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ContentPart(_Open):
    """One part of a message's content; other types than text are refused by name in chat.py."""

    type: Annotated[str, Field(max_length=64)]


class Message(_Strict):
    """One message. `reasoning` is read as another name of `reasoning_content`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], FIRST_ONLY, _at_most(limits.MAX_PARTS)] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ONLY, _at_most(limits.MAX_TOOL_CALLS)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], FIRST_ONLY, _at_most(0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(_Strict):
    """A function that the model may call; its schema is data for the template."""

    name: Annotated[str, Field(min_length=1, max_length=limits.MAX_TOOL_NAME, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class ResponseFormat(_Open):
    """Only {"type": "text"} is served."""

    type: Annotated[str, Field(max_length=64)]


class ChatBody(GenerationFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FIRST_ONLY, _at_most(limits.MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], FIRST_ONLY, _at_most(limits.MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], FIRST_ONLY, _at_most(8)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], _at_most(limits.MAX_TEMPLATE_KWARGS)] | None = None


class TokenizeBody(_Strict):
    """Body of /tokenize: either `prompt` or `messages` (with `tools`)."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1), FIRST_ONLY, _at_most(limits.MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], FIRST_ONLY, _at_most(limits.MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], _at_most(limits.MAX_TEMPLATE_KWARGS)] | None = None


class DetokenizeBody(_Strict):
    """Body of /detokenize."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Annotated[list[TokenId], FIRST_ONLY, _at_most(limits.MAX_DETOKENIZE)]


def parse_body(kind: type[Body], value: dict[str, Any]) -> Body:
    """Check a JSON object against a body type; RequestError names the first field at fault."""
    for name, reason in UNSUPPORTED.items():
        if value.get(name) is not None:
            raise RequestError(f"`{name}` is not supported: {reason}", param=name, code="unsupported_parameter")
    known = {name: item for name, item in value.items() if not (name in UNSUPPORTED and item is None)}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise from_validation(error, known) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply", code="too_deep") from error
