"""Chat templates: messages in, the prompt that the model was trained to read out."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from slimserve.errors import FormatError, RequestError
from slimserve.weights.chat_sandbox import ChatEnvironment, TemplateLimitError, limits
from slimserve.weights.small_file import read_small_file
from slimserve.weights.tokenizer.base import Tokenizer
from slimserve.weights.tokenizer.hf_json import read_json
from slimserve.weights.tokenizer.prompt import LookAlikeGuard, Marking, RenderedPrompt
from slimserve.weights.tokenizer.text import clean_text

NO_TEMPLATE = "the model's files hold no chat template, so it can only complete text"

_MAX_SOURCE = 1 << 20
_MAX_SECONDS = 3.0
_MAX_DEPTH = 100
_MAX_VALUES = 2_000_000
# Characters that a render may print, and may produce in all on the way: so many, and so many per character of input.
_OUTPUT_BASE, _OUTPUT_FACTOR = 4 << 20, 16
_WORK_BASE, _WORK_FACTOR = 128 << 20, 64
# A role is part of the template's own markup (`<|{{ role }}|>`), so only known ones may be written.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
_NONE_TEST = re.compile(r"content(?:['\"]\])?\s+is\s+(?:not\s+)?none", re.IGNORECASE)
_SPECIAL_VARIABLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class ChatTemplate:
    """The chat template of one model, compiled; rendering is thread-safe.

    problem: why no conversation can be rendered (the template does not compile); None if it can.
    variables: names that the template reads from outside, such as "tools" or "enable_thinking".
    """

    def __init__(self, source: str, tokenizer: Tokenizer, *, named: Mapping[str, str] | None = None) -> None:
        """`named`: further templates of the model; "tool_use" is the one for requests with tools."""
        texts = tokenizer.vocabulary.texts
        self.source = source
        self._tokenizer = tokenizer
        self._guard = LookAlikeGuard(texts[index] for index in tokenizer.control_ids)
        self._special = {
            name: texts[index]
            for name, field in _SPECIAL_VARIABLES.items()
            if (index := getattr(tokenizer.special, field)) is not None
        }
        self._environment = ChatEnvironment()
        self.problem: str | None = None
        self.variables: frozenset[str] = frozenset()
        self._default = self._compile(source, "the chat template")
        tool_source = (named or {}).get("tool_use")
        self._for_tools = self._default if tool_source is None else self._compile(tool_source, "the tool template")
        self._keeps_none = _NONE_TEST.search(source + (tool_source or "")) is not None

    def _compile(self, source: str, what: str) -> jinja2.Template | None:
        if len(source) > _MAX_SOURCE:
            self.problem = f"{what} is {len(source):,} characters long (limit {_MAX_SOURCE:,})"
            return None
        try:
            with limits(seconds=_MAX_SECONDS, characters=_WORK_BASE):
                self.variables |= jinja2.meta.find_undeclared_variables(self._environment.parse(source))
                return self._environment.from_string(source)
        except Exception as error:  # the template is foreign code; whatever it breaks is its own fault
            self.problem = f"{what} does not compile: {_one_line(error)}"
            return None

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self.variables

    def describe(self) -> list[str]:
        """Lines for start-up."""
        if self.problem is not None:
            return [f"chat: not available, {self.problem}; completions work"]
        options = sorted(
            self.variables & {"tools", "enable_thinking", "reasoning_effort", "documents", "preserve_thinking"}
        )
        return [
            f"chat: template of {len(self.source):,} characters" + (f", reads {', '.join(options)}" if options else "")
        ]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedPrompt:
        """The prompt of a conversation; see tokenizer.prompt for how its control tokens are kept apart.

        messages: OpenAI's format; a call's `arguments` may be a JSON text or an object.
        continue_final_message: the prompt ends inside the last message, which the model continues.
        variables: further names that the template may read (`enable_thinking`, ...).
        Raises RequestError naming the field, or with what the template itself had to say.
        """
        template = self._default if tools is None else self._for_tools
        if template is None:
            raise RequestError(f"this model cannot chat: {self.problem}", param="messages", code="no_chat")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "`continue_final_message` excludes `add_generation_prompt`",
                param="continue_final_message",
                code="invalid_value",
            )
        request = _Request(prepare_messages(messages, keeps_none=self._keeps_none), tools, variables)
        request.values["add_generation_prompt"] = add_generation_prompt
        if all(map(self._guard.is_harmless, request.strings)):
            text = self._run(template, request, Marking.NONE, "", continue_final_message)
            return RenderedPrompt.of(text)
        return self._render_marked(template, request, continue_final_message)

    def _render_marked(self, template: jinja2.Template, request: _Request, continued: bool) -> RenderedPrompt:
        mark = self._guard.choose_mark([*request.strings, self.source])
        if mark is None:
            raise RequestError(
                "the messages use all of the characters U+FDD0 to U+FDEF; leave one out", param="messages"
            )
        full = RenderedPrompt.of(self._run(template, request, Marking.FULL, mark, continued), mark)
        light = RenderedPrompt.of(self._run(template, request, Marking.LIGHT, mark, continued), mark)
        if full.text == light.text:
            return full
        # The template looked into the content and found less in the fully marked one. The lightly marked prompt is
        # right, unless an edit of the template made a control token out of content: then it has more of them.
        if self._control_tokens(full) != self._control_tokens(light):
            raise RequestError(
                "the messages spell a control token once the chat template has edited them",
                param="messages",
                code="control_token",
            )
        return light

    def _control_tokens(self, prompt: RenderedPrompt) -> list[int]:
        return [piece for piece in self._tokenizer.control_matcher.split(prompt.marked_text) if isinstance(piece, int)]

    def _run(self, template: jinja2.Template, request: _Request, marking: Marking, mark: str, continued: bool) -> str:
        def protect(string: str) -> str:
            return self._guard.protect(string, mark, marking)

        values = request.protected(protect)
        end = _mark_final_message(values, protect) if continued else None
        output_limit = _OUTPUT_BASE + _OUTPUT_FACTOR * request.size
        work_limit = _WORK_BASE + _WORK_FACTOR * request.size
        try:
            with limits(seconds=_MAX_SECONDS, characters=work_limit, mark=mark) as budget:
                context = template.new_context({**self._special, **values})
                pieces, length = [], 0
                for piece in template.root_render_func(context):
                    pieces.append(piece)
                    length += len(piece)
                    budget.tick()
                    if length > output_limit:
                        raise TemplateLimitError("the template prints too much text")
        except Exception as error:  # foreign code again
            message = _one_line(error).replace(mark, "") if mark else _one_line(error)
            raise RequestError(
                f"the chat template cannot render these messages: {message}", param="messages", code="template_error"
            ) from error
        text = "".join(pieces)
        return text if end is None else _cut_at(text, end)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:300] or type(error).__name__) if not isinstance(error, RecursionError) else "it is nested too deeply"


class _Request:
    """Everything of a request that a template sees, cleaned and counted. size: characters in all strings."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> None:
        self.strings: list[str] = []
        self._values = 0
        self.values: dict[str, Any] = {name: self._clean(value, name, 0) for name, value in variables.items()}
        self.values["messages"] = [self._clean(message, f"messages.{i}", 0) for i, message in enumerate(messages)]
        self.values["tools"] = (
            None if tools is None else [self._clean(tool, f"tools.{i}", 0) for i, tool in enumerate(tools)]
        )
        self.size = sum(map(len, self.strings))

    def _clean(self, value: Any, path: str, depth: int) -> Any:
        """A copy of plain JSON values: valid text, bounded depth and count."""
        self._values += 1
        if depth > _MAX_DEPTH or self._values > _MAX_VALUES:
            what = f"is nested deeper than {_MAX_DEPTH}" if depth > _MAX_DEPTH else f"has over {_MAX_VALUES:,} values"
            raise RequestError(f"`{path}` {what}", param=path, code="invalid_value")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            text = clean_text(str(value))
            self.strings.append(text)
            return text
        if isinstance(value, Mapping):
            return {
                self._clean(str(key), path, depth + 1): self._clean(item, path, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._clean(item, path, depth + 1) for item in value]
        raise RequestError(f"`{path}` holds a {type(value).__name__}", param=path, code="invalid_value")

    def protected(self, protect: Any) -> dict[str, Any]:
        """The values with `protect` on every string, except roles, which are known words."""

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return protect(value)
            if isinstance(value, dict):
                return {protect(key): walk(item) for key, item in value.items()}
            if isinstance(value, list):
                return [walk(item) for item in value]
            return value

        result = {name: walk(value) for name, value in self.values.items()}
        for message, original in zip(result["messages"], self.values["messages"], strict=True):
            message["role"] = original["role"]
        return result


def _mark_final_message(values: dict[str, Any], protect: Any) -> str:
    """Put an end mark behind the last message's text; the mark."""
    messages = values["messages"]
    if not messages or messages[-1]["role"] != "assistant" or not isinstance(messages[-1].get("content"), str):
        raise RequestError(
            "`continue_final_message` needs a last message of the assistant with text",
            param="continue_final_message",
            code="invalid_value",
        )
    end = "\ufdef\ufdee\ufdef"
    messages[-1]["content"] += end + " "
    return end


def _cut_at(text: str, end: str) -> str:
    place = text.rfind(end)
    if place < 0:
        raise RequestError(
            "the chat template does not print the last message as it is, so it cannot be continued",
            param="continue_final_message",
            code="template_error",
        )
    # A template that trims content has taken the space behind the mark; then it would have trimmed the text, too.
    return text[:place] if text[place + len(end) :].startswith(" ") else text[:place].rstrip()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def parse_arguments(value: Any, path: str) -> dict[str, Any]:
    """A call's arguments as an object, from JSON text or as given; null and empty text mean none.

    Raises RequestError naming `path`.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(clean_text(value), parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            raise RequestError(f"`{path}` is not valid JSON: {error}", param=path, code="invalid_arguments") from error
        except RecursionError as error:
            raise RequestError(f"`{path}` is nested too deeply", param=path, code="invalid_arguments") from error
        except ValueError as error:  # a number of thousands of digits, or NaN
            raise RequestError(
                f"`{path}` holds a number that cannot be read", param=path, code="invalid_arguments"
            ) from error
    if value is None or value == "":
        return {}
    if isinstance(value, str) and not value.strip():
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"`{path}` must be a JSON object", param=path, code="invalid_arguments")
    return dict(value)


def prepare_messages(messages: Sequence[Mapping[str, Any]], *, keeps_none: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them: known roles, calls with objects as arguments, `reasoning_content`.

    keeps_none: the template asks whether an assistant turn with calls has content at all.
    Raises RequestError naming the field.
    """
    if not messages:
        raise RequestError("`messages` is empty", param="messages", code="invalid_value")
    return [_prepare_message(message, f"messages.{index}", keeps_none) for index, message in enumerate(messages)]


def _prepare_message(message: Mapping[str, Any], path: str, keeps_none: bool) -> dict[str, Any]:
    if message.get("role") not in _ROLES:
        raise RequestError(
            f"`{path}.role` must be one of {', '.join(sorted(_ROLES))}", param=f"{path}.role", code="invalid_value"
        )
    prepared = {key: value for key, value in message.items() if value is not None}
    calls = prepared.get("tool_calls")
    if calls is not None:
        prepared["tool_calls"] = [_prepare_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(calls)]
    content = prepared.get("content", "")
    prepared["content"] = None if keeps_none and calls and not content else _plain_content(content, path)
    reasoning = next((prepared[key] for key in ("reasoning_content", "reasoning", "thinking") if key in prepared), None)
    if reasoning is not None:
        prepared["reasoning_content"] = reasoning
    return prepared


def _plain_content(content: Any, path: str) -> str:
    """Content as one text; parts are joined as templates that take parts do."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content if isinstance(content, list | tuple) else [content]):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            where = f"{path}.content.{index}" if isinstance(content, list | tuple) else f"{path}.content"
            raise RequestError(
                f"`{where}` is not text; this server reads text only", param=where, code="unsupported_content"
            )
        texts.append(text)
    return "".join(texts)


def _prepare_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"`{path}.function.name` is required", param=f"{path}.function.name", code="missing_field")
    arguments = parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _named_templates(entries: Any, where: str) -> Iterator[tuple[str, str]]:
    """(name, source) of a template value: one text, or a list of named ones."""
    if isinstance(entries, str):
        yield "default", entries
    elif isinstance(entries, list):
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
                raise FormatError(f"{where}: an entry of chat_template is not a named template")
            yield str(entry.get("name", "default")), entry["template"]
    elif entries is not None:
        raise FormatError(f"{where}: chat_template is a {type(entries).__name__}")


def _build(templates: dict[str, str], tokenizer: Tokenizer) -> ChatTemplate | None:
    if not templates:
        return None
    source = templates.get("default") or next(iter(templates.values()))
    return ChatTemplate(source, tokenizer, named=templates)


def chat_template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a GGUF file (`tokenizer.chat_template` and named ones beside it); None if there is none."""
    key = "tokenizer.chat_template"
    templates = {
        (name[len(key) + 1 :] or "default"): value
        for name, value in metadata.items()
        if (name == key or name.startswith(key + ".")) and isinstance(value, str)
    }
    return _build(templates, tokenizer)


def chat_template_from_folder(folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a Hugging Face folder; None if there is none.

    chat_template.jinja comes before chat_template.json, and that before tokenizer_config.json.
    """
    folder = Path(folder)
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        document = read_json(folder / name)
        entries = document.get("chat_template") if isinstance(document, dict) else None
        templates.update(_named_templates(entries, str(folder / name)))
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        with contextlib.suppress(FileNotFoundError):
            templates[name] = read_small_file(path, 4 * _MAX_SOURCE).decode("utf-8", "replace")
    return _build(templates, tokenizer)
