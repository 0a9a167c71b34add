"""/v1/completions: text or token ids in, continuation out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from slimserve.engine.messages import EngineInfo
from slimserve.engine.request import TokenLogprob
from slimserve.errors import RequestError
from slimserve.serve import admission, limits
from slimserve.serve.body import HeldBody, read_checked
from slimserve.serve.choice import ChoiceDelta
from slimserve.serve.generation import Generation
from slimserve.serve.log import RequestRow
from slimserve.serve.logprobs import CompletionLogprobs, join_parts
from slimserve.serve.protocol import CompletionBody, parse_body
from slimserve.serve.respond import respond
from slimserve.serve.state import Place, ServerState
from slimserve.serve.text import TextModel
from slimserve.serve.threads import off_loop

_DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class Prompt:
    """One prompt: its token ids, and its text as the client would read it."""

    token_ids: list[int]
    text: str


def read_prompts(value: Any, model: TextModel) -> list[str | list[int]]:
    """The prompts of a body: a string, strings, token ids, or lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError("`prompt` must be text, token ids, or a list of either", param="prompt")
    if not value:
        raise RequestError("`prompt` is empty", param="prompt", code="empty_prompt")
    if all(type(item) is int for item in value):
        admission.check_token_ids(value, model.vocab_size, "prompt")
        return [value]
    if len(value) > limits.MAX_PROMPTS:
        raise RequestError(f"`prompt` has {len(value)} prompts; at most {limits.MAX_PROMPTS} are taken", param="prompt")
    if all(isinstance(item, str) for item in value):
        return list(value)
    for index, item in enumerate(value):
        if not isinstance(item, list) or not all(type(token_id) is int for token_id in item):
            raise RequestError(
                f"`prompt.{index}` must be token ids; a list holds only texts, only token ids, or only lists of token "
                "ids",
                param=f"prompt.{index}",
            )
        admission.check_token_ids(item, model.vocab_size, f"prompt.{index}")
    return list(value)


def encode_prompts(
    prompts: list[str | list[int]], model: TextModel, info: EngineInfo, *, with_text: bool
) -> list[Prompt]:
    """Tokenize what is text; decode what is ids where the client wants its text back."""
    found: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            admission.check_characters(len(prompt), model, info, "prompt")
            found.append(Prompt(model.encode(prompt, most=info.max_request_tokens), prompt if with_text else ""))
        else:
            found.append(Prompt(prompt, model.decode(prompt) if with_text else ""))
    return found


@dataclass(slots=True)
class _Choice:
    """What a choice has said so far."""

    prompt: Prompt
    logprobs: CompletionLogprobs | None
    echo_pending: bool
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class CompletionReply:
    """Turns deltas into chunks; the whole reply is the sum of the chunks."""

    def __init__(self, state: ServerState, body: CompletionBody, prompts: list[Prompt], n: int) -> None:
        self._state = state
        self._body = body
        self._id = f"cmpl-{state.fingerprint}"
        self._created = int(time.time())
        self._choices = [
            _Choice(
                prompt,
                None if body.logprobs is None else CompletionLogprobs(state.text, body.logprobs),
                bool(body.echo),
            )
            for prompt in prompts
            for _ in range(n)
        ]

    def add(self, index: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Take a delta; the chunk for it, or None if there is nothing to say yet."""
        choice = self._choices[index]
        choice.prompt_logprobs.extend(delta.prompt_logprobs)
        text, token_ids, part = delta.text, list(delta.token_ids), None
        if choice.echo_pending:
            # The prompt's own logprobs are complete once the first token is there.
            if not token_ids and delta.finish is None:
                return None
            choice.echo_pending = False
            text = choice.prompt.text + text
            if choice.logprobs is not None:
                part = choice.logprobs.part(*self._prompt_entries(choice))
                choice.prompt_logprobs = []
        if choice.logprobs is not None and token_ids:
            own = choice.logprobs.part(token_ids, delta.logprobs)
            part = own if part is None else join_parts([part, own])
        choice.finish = delta.finish
        if not self._body.stream:
            choice.text.append(text)
            choice.token_ids.extend(token_ids)
            if part is not None:
                choice.parts.append(part)
        if not (text or part or delta.finish or (token_ids and self._body.return_token_ids)):
            return None
        return self._envelope([self._choice_object(index, text, token_ids, part, delta.finish)])

    def finish_of(self, index: int) -> str | None:
        """How a choice ended."""
        return self._choices[index].finish

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed."""
        objects = [
            self._choice_object(
                index,
                "".join(choice.text),
                choice.token_ids,
                None if choice.logprobs is None else join_parts(choice.parts),
                choice.finish,
            )
            for index, choice in enumerate(self._choices)
        ]
        return {**self._envelope(objects), "usage": usage}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        return {**self._envelope([]), "usage": usage}

    def _prompt_entries(self, choice: _Choice) -> tuple[list[int], list[TokenLogprob | None]]:
        token_ids = choice.prompt.token_ids
        missing = len(token_ids) - len(choice.prompt_logprobs)
        entries: list[TokenLogprob | None] = [None] * missing
        return token_ids, entries + list(choice.prompt_logprobs)

    def _choice_object(
        self, index: int, text: str, token_ids: list[int], part: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": part, "finish_reason": finish}
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._body.model or self._state.names[0],
            "choices": choices,
        }


def _read(state: ServerState, value: dict[str, Any]) -> tuple[CompletionBody, list[str | list[int]]]:
    """A checked body and its prompts; runs off the event loop where it is large."""
    body = parse_body(CompletionBody, value)
    state.check_model(body.model)
    admission.check_stream_options(body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise RequestError(
            f"`best_of` is {body.best_of}; only the value of `n` ({n}) is served", param="best_of", code="unsupported"
        )
    if body.max_tokens == 0 and not body.echo and body.logprobs is None:
        raise RequestError("`max_tokens` 0 needs `echo` or `logprobs`", param="max_tokens", code="invalid_value")
    inputs = read_prompts(body.prompt, state.text)
    body.prompt = None
    if len(inputs) * n > limits.MAX_CHOICES:
        raise RequestError(f"{len(inputs)} prompts times n = {n} is more than {limits.MAX_CHOICES} choices", param="n")
    return body, inputs


async def completions(state: ServerState, request: Request, row: RequestRow, held: HeldBody) -> Response:
    """Serve one completion request."""
    body, inputs = await read_checked(request, state.limits.max_body_bytes, held, lambda value: _read(state, value))
    n = body.n or 1
    place = state.enter(len(inputs) * n)
    try:
        prompts = await off_loop(
            sum(len(item) for item in inputs),
            encode_prompts,
            inputs,
            state.text,
            state.router.info,
            with_text=bool(body.echo),
        )
        check_scored(body, prompts, n)
        generation = _prepare(state, row, place, body, prompts, n)
        inputs.clear()
        held.release()
        reply = CompletionReply(state, body, prompts, n)
        await generation.start()
    except BaseException:
        place.leave()
        raise
    return await respond(state, request, row, body, generation, reply)


def check_scored(body: CompletionBody, prompts: Sequence[Prompt], n: int) -> None:
    """Refuse prompts whose own log probabilities, which wait for the reply's first token, would fill memory."""
    if not body.echo or body.logprobs is None:
        return
    num_tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
    wanted = num_tokens * (1 + body.logprobs)
    if wanted > limits.MAX_SCORED:
        raise RequestError(
            f"`echo` with `logprobs` {body.logprobs} asks for {wanted} log probabilities of {num_tokens} "
            f"prompt tokens; at most {limits.MAX_SCORED} are given at once",
            param="logprobs",
            code="too_many",
        )


def _prepare(
    state: ServerState, row: RequestRow, place: Place, body: CompletionBody, prompts: list[Prompt], n: int
) -> Generation:
    info = state.router.info
    submissions = []
    for prompt in prompts:
        room = admission.check_length(
            len(prompt.token_ids), body.max_tokens, info, param="prompt", tokens_param="max_tokens"
        )
        max_tokens = min(_DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else room
        for choice in range(n):
            params = admission.sampling(
                body,
                info.vocab_size,
                choice=choice,
                logprobs=body.logprobs,
                prompt_logprobs=bool(body.echo) and body.logprobs is not None,
            )
            submissions.append(admission.submission(body, prompt.token_ids, info, params, max_tokens))
    return Generation(
        state,
        row,
        place,
        submissions,
        num_choices=n,
        stops=admission.stop_strings(body),
        chat=False,
    )
