"""/v1/chat/completions: messages in, a reply with content, reasoning and tool calls out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slimserve.errors import RequestError
from slimserve.serve import admission
from slimserve.serve.body import HeldBody, read_checked
from slimserve.serve.choice import ChoiceDelta
from slimserve.serve.generation import Generation
from slimserve.serve.log import RequestRow
from slimserve.serve.logprobs import chat_entries
from slimserve.serve.protocol import ChatBody, Message, Tool, parse_body
from slimserve.serve.respond import respond
from slimserve.serve.state import Place, ServerState
from slimserve.serve.text import ReplyDelta, ReplyParser, ToolCallDelta
from slimserve.serve.threads import off_loop
from slimserve.weights.chat_template import parse_arguments

_ROLES = {"developer": "system"}


def message_text(message: Message, path: str) -> str | None:
    """The text of a message's content; parts that are not text are refused by name."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for index, part in enumerate(message.content):
        where = f"{path}.content.{index}"
        if part.type != "text":
            raise RequestError(
                f"`{where}.type` is {part.type!r}; this server reads text only",
                param=f"{where}.type",
                code="unsupported_content",
            )
        extra = dict(part.model_extra or {})
        text = extra.pop("text", None)
        if not isinstance(text, str) or extra:
            raise RequestError(
                f"`{where}` must hold exactly `type` and a string `text`", param=where, code="invalid_value"
            )
        texts.append(text)
    return "".join(texts)


def template_message(message: Message, path: str) -> dict[str, Any]:
    """One message as chat templates expect it."""
    result: dict[str, Any] = {"role": _ROLES.get(message.role, message.role)}
    text = message_text(message, path)
    if text is None:
        if message.role not in ("assistant", "tool"):
            raise RequestError(f"`{path}.content` is required", param=f"{path}.content", code="missing_field")
        text = message.refusal
    if text is not None:
        result["content"] = text
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.role != "assistant":
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(message, name) is not None:
                raise RequestError(
                    f"`{path}.{name}` belongs to assistant messages only", param=f"{path}.{name}", code="invalid_value"
                )
        return result
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id or f"call_{index}",
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": parse_arguments(
                        call.function.arguments, f"{path}.tool_calls.{index}.function.arguments"
                    ),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return result


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """All messages as chat templates expect them."""
    return [template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def messages_size(messages: list[dict[str, Any]]) -> int:
    """Characters of all contents."""
    return sum(len(message.get("content", "")) for message in messages)


def written_size(*values: Any) -> int:
    """Characters of all strings and number of all values in them: how much work rendering and tokenizing is."""
    size = 0
    pending = list(values)
    while pending:
        value = pending.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += sum(map(len, value))
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return size


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as chat templates expect them: only what the client wrote, in its order."""
    if not tools:
        return None
    return [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def check_tool_choice(body: ChatBody) -> bool:
    """Whether calls are to be offered; RequestError for what cannot be promised."""
    choice = body.tool_choice
    names = [tool.function.name for tool in body.tools or []]
    if choice is None or choice == "auto":
        return bool(names)
    if choice == "none":
        return False
    if choice == "required":
        why = "needs `tools`" if not names else "cannot be enforced by this version; use `auto`"
        raise RequestError(
            f'`tool_choice` "required" {why}',
            param="tool_choice",
            code="invalid_value" if not names else "unsupported_parameter",
        )
    name = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = name.get("name") if isinstance(name, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            '`tool_choice` must be "auto", "none", "required" or a named function',
            param="tool_choice",
            code="invalid_value",
        )
    if name not in names:
        raise RequestError(
            f"`tool_choice` names {name[:64]!r}, which is not among `tools`", param="tool_choice", code="unknown_tool"
        )
    raise RequestError(
        "`tool_choice` with a named function cannot be enforced by this version; use `auto`",
        param="tool_choice",
        code="unsupported_parameter",
    )


def check_template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Extra template variables; those that the server sets itself are refused."""
    reserved = {
        "self",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
    }
    for name in kwargs or {}:
        if name in reserved:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"`{param}` is set by the server", param=param, code="invalid_value")
    return dict(kwargs or {})


def check_chat(state: ServerState, body: ChatBody) -> None:
    """Refuse what needs no tokenizing to be refused."""
    state.check_model(body.model)
    admission.check_stream_options(body)
    if state.text.chat_problem is not None:
        raise RequestError(f"this model cannot chat: {state.text.chat_problem}; use /v1/completions", code="no_chat")
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            f"`response_format` {body.response_format.type!r} is not supported: structured output is not served by "
            "this version",
            param="response_format",
            code="unsupported_parameter",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs`: true", param="top_logprobs", code="invalid_value")
    if body.parallel_tool_calls is False and body.tools:
        raise RequestError(
            "`parallel_tool_calls` false cannot be enforced by this version",
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"`max_tokens` {body.max_tokens} and `max_completion_tokens` {body.max_completion_tokens} disagree",
            param="max_completion_tokens",
            code="invalid_value",
        )


@dataclass(slots=True)
class _Choice:
    """What a choice has said so far."""

    parser: ReplyParser
    role_sent: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None


class ChatReply:
    """Turns deltas into chunks; the whole reply is the sum of the chunks."""

    def __init__(
        self,
        state: ServerState,
        body: ChatBody,
        prompt_token_ids: list[int],
        n: int,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._state = state
        self._body = body
        self._id = f"chatcmpl-{state.fingerprint}"
        self._created = int(time.time())
        self._choices = [
            _Choice(state.text.reply_parser(prompt_token_ids=prompt_token_ids, tools=tools)) for _ in range(n)
        ]

    def add(self, index: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Take a delta; the chunk for it, or None if there is nothing to say yet."""
        choice = self._choices[index]
        replies = [choice.parser.push(delta.text)]
        if delta.finish is not None:
            replies.append(choice.parser.flush())
        merged: dict[str, Any] = {}
        for reply in replies:
            self._merge(choice, reply, merged)
        entries = None
        if self._body.logprobs:
            entries = chat_entries(self._state.text, delta.token_ids, delta.logprobs, self._body.top_logprobs or 0)
            choice.logprobs.extend(() if self._body.stream else entries)
        choice.token_ids.extend(() if self._body.stream else delta.token_ids)
        if delta.finish is not None:
            # A call that was cut off by the length limit is a length end in both modes.
            choice.finish = "tool_calls" if choice.calls and delta.finish == "stop" else delta.finish
        wants_ids = bool(self._body.return_token_ids) and bool(delta.token_ids)
        if not (merged or entries or wants_ids or choice.finish):
            return None
        if not choice.role_sent:
            choice.role_sent = True
            merged = {"role": "assistant", "content": "", **merged}
        piece: dict[str, Any] = {
            "index": index,
            "delta": merged,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": choice.finish,
        }
        if self._body.return_token_ids:
            piece["token_ids"] = list(delta.token_ids)
        return self._envelope("chat.completion.chunk", [piece])

    def finish_of(self, index: int) -> str | None:
        """How a choice ended, in the API's words."""
        return self._choices[index].finish

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed."""
        objects = []
        for index, choice in enumerate(self._choices):
            content = "".join(choice.content)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if choice.calls and not content else content,
                "refusal": None,
            }
            if choice.reasoning:
                message["reasoning_content"] = "".join(choice.reasoning)
            if choice.calls:
                message["tool_calls"] = choice.calls
            piece: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
                "finish_reason": choice.finish,
            }
            if self._body.return_token_ids:
                piece["token_ids"] = choice.token_ids
            objects.append(piece)
        return {**self._envelope("chat.completion", objects), "usage": usage}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        return {**self._envelope("chat.completion.chunk", []), "usage": usage}

    def _merge(self, choice: _Choice, reply: ReplyDelta, merged: dict[str, Any]) -> None:
        if reply.content:
            choice.content.append(reply.content)
            merged["content"] = merged.get("content", "") + reply.content
        if reply.reasoning:
            choice.reasoning.append(reply.reasoning)
            merged["reasoning_content"] = merged.get("reasoning_content", "") + reply.reasoning
        for call in reply.tool_calls:
            self._merge_call(choice, call, merged.setdefault("tool_calls", []))

    def _merge_call(self, choice: _Choice, call: ToolCallDelta, pieces: list[dict[str, Any]]) -> None:
        """Id, type and name come once, with the first piece of an index; one entry per index in a chunk."""
        piece = next((piece for piece in pieces if piece["index"] == call.index), None)
        if piece is None:
            piece = {"index": call.index, "function": {"arguments": ""}}
            pieces.append(piece)
        if call.index == len(choice.calls):
            call_id = call.call_id or f"call_{self._state.fingerprint}"
            choice.calls.append(
                {"id": call_id, "type": "function", "function": {"name": call.name or "", "arguments": ""}}
            )
            piece.update(id=call_id, type="function")
            piece["function"] = {"name": call.name or "", "arguments": ""}
        choice.calls[call.index]["function"]["arguments"] += call.arguments
        piece["function"]["arguments"] += call.arguments

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model or self._state.names[0],
            "choices": choices,
        }


@dataclass(slots=True)
class _Asked:
    """A checked request as the template takes it; size: characters and values that rendering and tokenizing read."""

    body: ChatBody
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    size: int


def _read(state: ServerState, value: dict[str, Any]) -> _Asked:
    """Check a body; runs off the event loop where it is large."""
    body = parse_body(ChatBody, value)
    check_chat(state, body)
    tools = template_tools(body.tools) if check_tool_choice(body) else None
    if tools and not state.text.supports_tools:
        raise RequestError("this model's chat template has no tools", param="tools", code="unsupported_parameter")
    messages = template_messages(body.messages)
    kwargs = check_template_kwargs(body.chat_template_kwargs)
    admission.check_characters(messages_size(messages), state.text, state.router.info, "messages")
    return _Asked(body, messages, tools, kwargs, written_size(messages, tools, kwargs))


async def chat_completions(state: ServerState, request: Request, row: RequestRow, held: HeldBody) -> Response:
    """Serve one chat request."""
    asked = await read_checked(request, state.limits.max_body_bytes, held, lambda value: _read(state, value))
    body, tools = asked.body, asked.tools
    n = body.n or 1
    place = state.enter(n)
    try:
        most = state.router.info.max_request_tokens
        prompt = await off_loop(asked.size, state.text.encode_chat, asked.messages, tools, asked.kwargs, most)
        generation = _prepare(state, row, place, body, prompt, n)
        # What was asked is tokens now; the text need not live as long as the reply.
        asked.messages, body.messages, asked.kwargs, body.chat_template_kwargs = [], [], {}, None
        held.release()
        reply = ChatReply(state, body, prompt, n, tools)
        await generation.start()
    except BaseException:
        place.leave()
        raise
    return await respond(state, request, row, body, generation, reply)


def _prepare(
    state: ServerState, row: RequestRow, place: Place, body: ChatBody, prompt: list[int], n: int
) -> Generation:
    info = state.router.info
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = admission.check_length(len(prompt), getattr(body, name), info, param="messages", tokens_param=name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    submissions = [
        admission.submission(
            body, prompt, info, admission.sampling(body, info.vocab_size, choice=choice, logprobs=logprobs), max_tokens
        )
        for choice in range(n)
    ]
    return Generation(state, row, place, submissions, num_choices=n, stops=admission.stop_strings(body), chat=True)
