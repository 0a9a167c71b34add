"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slimserve.engine.request import TokenLogprob
from slimserve.serve.text import TextModel


def token_text(model: TextModel, token_id: int) -> str:
    """A token's text; a token that is only part of a character is shown as `bytes:\\x..`."""
    data = model.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(
    model: TextModel, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], num_top: int
) -> list[msgspec.Raw]:
    """Entries of `logprobs.content`, one per token, as JSON: a tenth of what the objects would take until the end."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = model.token_bytes(token_id)
        return {"token": token_text(model, token_id), "logprob": logprob, "bytes": list(data)}

    return [
        _as_json({**entry(token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top[:num_top]]})
        for token_id, item in zip(token_ids, logprobs, strict=True)
    ]


def _as_json(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


class CompletionLogprobs:
    """Builds the parallel lists of a completion's `logprobs`; text offsets run on from part to part."""

    def __init__(self, model: TextModel, num_top: int) -> None:
        self._model = model
        self._num_top = num_top
        self._offset = 0

    def part(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The lists for these tokens; None marks a token without a prediction (the first of a prompt)."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, item in zip(token_ids, logprobs, strict=True):
            text = token_text(self._model, token_id)
            part["tokens"].append(text)
            part["token_logprobs"].append(None if item is None else item.logprob)
            part["top_logprobs"].append(None if item is None else self._top(item))
            part["text_offset"].append(self._offset)
            self._offset += len(text)
        return part

    def _top(self, item: TokenLogprob) -> msgspec.Raw:
        # Two tokens may show the same text; the better one keeps its place.
        best: dict[str, float] = {}
        for token_id, logprob in item.top[: self._num_top]:
            best.setdefault(token_text(self._model, token_id), logprob)
        return _as_json(best)


def join_parts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One `logprobs` object from the parts of a stream."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for part in parts for entry in part[name]] for name in names}
