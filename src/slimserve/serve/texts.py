"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from slimserve.errors import RequestError
from slimserve.serve import admission, limits
from slimserve.serve.body import HeldBody, read_checked
from slimserve.serve.chat import check_template_kwargs, template_messages, template_tools, written_size
from slimserve.serve.log import RequestRow
from slimserve.serve.protocol import DetokenizeBody, TokenizeBody, parse_body
from slimserve.serve.state import ServerState
from slimserve.serve.stream import json_response
from slimserve.serve.threads import off_loop

_CHARACTERS_PER_TOKEN = 8


def _check_size(size: int, most: int, param: str) -> None:
    if size > most:
        raise RequestError(
            f"`{param}` has {size} characters; at most {most} are tokenized at once", param=param, code="too_long"
        )


def _read(state: ServerState, value: dict[str, Any]) -> tuple[int, Callable[[], list[int]]]:
    """How much there is to tokenize, and what does it; runs off the event loop where the body is large."""
    body = parse_body(TokenizeBody, value)
    state.check_model(body.model)
    most = max(limits.MAX_TOKENIZE_CHARACTERS, _CHARACTERS_PER_TOKEN * state.router.info.max_request_tokens)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either `prompt` or `messages`", param="prompt", code="invalid_value")
    if body.messages is None:
        prompt = body.prompt or ""
        _check_size(len(prompt), most, "prompt")
        add_special = body.add_special_tokens is not False
        return len(prompt), partial(state.text.encode, prompt, add_special=add_special)
    if state.text.chat_problem is not None:
        raise RequestError(f"this model cannot chat: {state.text.chat_problem}", param="messages", code="no_chat")
    messages = template_messages(body.messages)
    tools, kwargs = template_tools(body.tools), check_template_kwargs(body.chat_template_kwargs)
    size = written_size(messages, tools, kwargs)
    _check_size(size, most, "messages")
    return size, partial(state.text.encode_chat, messages, tools, kwargs)


def _read_tokens(state: ServerState, value: dict[str, Any]) -> list[int]:
    body = parse_body(DetokenizeBody, value)
    state.check_model(body.model)
    admission.check_token_ids(body.tokens, state.text.vocab_size, "tokens")
    return body.tokens


async def tokenize(state: ServerState, request: Request, row: RequestRow, held: HeldBody) -> Response:
    """Token ids of a text or of a rendered conversation."""
    size, encode = await read_checked(request, state.limits.max_body_bytes, held, lambda value: _read(state, value))
    tokens = await off_loop(size, encode)
    row.num_prompt_tokens = len(tokens)
    row.end("done")
    return json_response(
        {"tokens": tokens, "count": len(tokens), "max_model_len": state.router.info.max_request_tokens}
    )


async def detokenize(state: ServerState, request: Request, row: RequestRow, held: HeldBody) -> Response:
    """Text of token ids."""
    tokens = await read_checked(request, state.limits.max_body_bytes, held, lambda value: _read_tokens(state, value))
    text = await off_loop(len(tokens), state.text.decode, tokens, keep_control=True)
    row.num_prompt_tokens = len(tokens)
    row.end("done")
    return json_response({"prompt": text})
