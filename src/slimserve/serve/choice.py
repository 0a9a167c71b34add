"""One choice of a reply, from engine outputs to text: the only place where streamed and whole replies are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slimserve.engine.request import FinishReason, TokenLogprob
from slimserve.engine.step import RequestOutput
from slimserve.errors import RequestError
from slimserve.serve.text import TextModel


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one engine output adds: text that may be sent, the tokens behind it, and the end if it ended.

    `finish` is "stop" or "length" at the end. `stopped_here` says that a stop string ended the choice while the
    engine would go on.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stopped_here: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class ChoiceText:
    """Detokenizes one choice and ends it at stop strings, token by token, however the engine grouped them."""

    def __init__(self, model: TextModel, prompt_token_ids: Sequence[int], stops: Sequence[str], *, chat: bool) -> None:
        """`chat`: a parser reads the text, so markup of the model's reply format stays in it."""
        self._text = model.text_stream(prompt_token_ids, markup=chat)
        self._stops = model.stop_stream(stops)
        self.num_tokens = 0
        self.finished = False

    def feed(self, output: RequestOutput) -> ChoiceDelta:
        """Take one output; RequestError if the engine says that the request failed or was taken away."""
        if output.finish_reason is FinishReason.ERROR:
            raise RequestError(output.error or "the request failed", code="generation_failed", status=500)
        if output.finish_reason is FinishReason.ABORT:
            raise RequestError(output.error or "the server ended the request", code="aborted", status=503)
        pieces: list[str] = []
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            piece, stopped = self._stops.push(self._text.push(token_id))
            pieces.append(piece)
            if stopped:
                self.finished = True
                taken = index + 1
                return ChoiceDelta(
                    "".join(pieces),
                    tuple(output.token_ids[:taken]),
                    tuple(output.logprobs[:taken]),
                    "stop",
                    stopped_here=output.finish_reason is None,
                    prompt_logprobs=tuple(output.prompt_logprobs),
                )
        finish = None
        if output.finish_reason is not None:
            self.finished = True
            finish = output.finish_reason.value
            piece, stopped = self._stops.push(self._text.flush())
            pieces.append(piece if stopped else piece + self._stops.flush())
            finish = "stop" if stopped else finish
        return ChoiceDelta(
            "".join(pieces),
            tuple(output.token_ids),
            tuple(output.logprobs),
            finish,
            prompt_logprobs=tuple(output.prompt_logprobs),
        )
