"""Talking to an engine without HTTP: one reply at a time, as an iterator; for `-p`, chat and library users."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimserve.engine.messages import EngineInfo, Rejection, Submit
from slimserve.engine.process import EngineClient
from slimserve.engine.request import SamplingParams
from slimserve.engine.step import RequestOutput
from slimserve.errors import RequestError, RunError
from slimserve.serve import admission
from slimserve.serve.choice import ChoiceText
from slimserve.serve.text import ReplyDelta, TextModel


class Mailboxes:
    """The EngineListener of callers that wait on threads of their own: one queue per request."""

    def __init__(self) -> None:
        self._boxes: dict[str, queue.SimpleQueue[RequestOutput | Exception]] = {}

    def open(self, request_id: str) -> queue.SimpleQueue[RequestOutput | Exception]:
        """A queue for a request's outputs."""
        box: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
        self._boxes[request_id] = box
        return box

    def close(self, request_id: str) -> None:
        """Nobody waits for this request any more."""
        self._boxes.pop(request_id, None)

    def on_accepted(self, request_ids: Sequence[str]) -> None:
        """Nothing waits for this."""

    def on_rejected(self, rejections: Sequence[Rejection]) -> None:
        """The request ends with the engine's reason."""
        for rejection in rejections:
            if (box := self._boxes.get(rejection.request_id)) is not None:
                box.put(
                    RequestError(rejection.message, param=rejection.param, code=rejection.code, status=rejection.status)
                )

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand on."""
        for output in outputs:
            if (box := self._boxes.get(output.request_id)) is not None:
                box.put(output)

    def on_down(self, reason: str) -> None:
        """Every request ends with the reason."""
        for box in list(self._boxes.values()):
            box.put(RunError(f"the engine stopped: {reason}"))


@dataclass(slots=True)
class Rates:
    """What one reply cost. Seconds from submit to the first token, and from there to the last."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish: str | None = None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed per second."""
        computed = self.num_prompt_tokens - self.num_cached_tokens
        return computed / self.first_token_seconds if self.first_token_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first."""
        return (self.num_output_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else None

    def line(self) -> str:
        """One line for a person."""
        prefill = "" if self.prefill_rate is None else f", {self.prefill_rate:.1f} tok/s"
        decode = "" if self.decode_rate is None else f", {self.decode_rate:.1f} tok/s"
        return (
            f"prefill {self.num_prompt_tokens} tokens ({self.num_cached_tokens} cached){prefill} | "
            f"decode {self.num_output_tokens} tokens{decode} | {self.finish or 'stopped'}"
        )


@dataclass(slots=True)
class Reply:
    """A reply in progress: iterate it for its pieces; closing or leaving the loop early ends it in the engine."""

    model: LocalModel
    submission: Submit
    stops: Sequence[str]
    chat: bool
    rates: Rates = field(default_factory=Rates)
    token_ids: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[ReplyDelta]:
        request_id = self.submission.request_id
        box = self.model.mailboxes.open(request_id)
        try:
            started = time.monotonic()
            self.model.client.submit(self.submission)
            yield from self._pieces(box, started)
        finally:
            self.model.mailboxes.close(request_id)
            if self.rates.finish is None:
                self.model.client.abort(request_id)

    def _pieces(self, box: queue.SimpleQueue[RequestOutput | Exception], started: float) -> Iterator[ReplyDelta]:
        text = self.model.text
        prompt = self.submission.prompt_token_ids
        choice = ChoiceText(text, prompt, self.stops, chat=self.chat)
        parser = text.reply_parser(prompt_token_ids=prompt, tools=None) if self.chat else None
        self.rates.num_prompt_tokens = len(prompt)
        first_at: float | None = None
        while not choice.finished:
            item = box.get()
            if isinstance(item, Exception):
                raise item
            now = time.monotonic()
            delta = choice.feed(item)
            self.rates.num_cached_tokens = item.num_cached_tokens
            if delta.token_ids and first_at is None:
                first_at = now
                self.rates.first_token_seconds = now - started
            self.token_ids.extend(delta.token_ids)
            self.rates.num_output_tokens = len(self.token_ids)
            self.rates.decode_seconds = 0.0 if first_at is None else now - first_at
            if delta.stopped_here:
                self.model.client.abort(self.submission.request_id)
            self.rates.finish = delta.finish
            pieces = [ReplyDelta(content=delta.text)] if parser is None else [parser.push(delta.text)]
            if parser is not None and delta.finish is not None:
                pieces.append(parser.flush())
            yield from (piece for piece in pieces if not piece.empty)


class LocalModel:
    """A loaded model in this process or beside it, for one caller at a time or several threads."""

    def __init__(self, text: TextModel, client: EngineClient, mailboxes: Mailboxes) -> None:
        self.text = text
        self.client = client
        self.mailboxes = mailboxes

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself."""
        return self.client.info

    def complete(
        self, prompt: str, sampling: SamplingParams, *, max_tokens: int | None = None, stops: Sequence[str] = ()
    ) -> Reply:
        """Continue a text."""
        return self._reply(self.text.encode(prompt), sampling, max_tokens, stops, chat=False)

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams,
        *,
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> Reply:
        """Answer a conversation; RequestError if the model has no usable template."""
        if self.text.chat_problem is not None:
            raise RequestError(f"this model cannot chat: {self.text.chat_problem}", code="no_chat")
        prompt = self.text.encode_chat(messages, None, template_kwargs or {})
        return self._reply(prompt, sampling, max_tokens, stops, chat=True)

    def _reply(
        self, prompt: list[int], sampling: SamplingParams, max_tokens: int | None, stops: Sequence[str], *, chat: bool
    ) -> Reply:
        limit = admission.check_length(len(prompt), max_tokens, self.info, param="prompt", tokens_param="max_tokens")
        submission = Submit(uuid.uuid4().hex, prompt, sampling, limit)
        return Reply(self, submission, tuple(stops), chat)
