"""Draws one token per logits row, on the device where the logits are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slimserve.engine.request import TokenLogprob
from slimserve.engine.sample import host
from slimserve.engine.sample.batch import SamplingBatch
from slimserve.engine.sample.device import sample_device, score_device


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """token_ids [L] int64; logprobs [L], top_ids [L, n] and top_logprobs [L, n] where a row wants them."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def to_host(self, batch: SamplingBatch) -> tuple[list[int], list[TokenLogprob | None]]:
        """Token ids, and per row its log probabilities if it asked for them."""
        return self.token_ids.tolist(), self.logprobs_to_host(batch)

    def logprobs_to_host(self, batch: SamplingBatch) -> list[TokenLogprob | None]:
        """Per row its log probabilities if it asked for them."""
        if self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return [None] * len(batch.rows)
        chosen, ids, values = self.logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist()
        found: list[TokenLogprob | None] = []
        for r, row in enumerate(batch.rows):
            count = row.params.logprobs
            if count is None:
                found.append(None)
            else:
                found.append(TokenLogprob(chosen[r], tuple(zip(ids[r][:count], values[r][:count], strict=True))))
        return found


def sample(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    """Draw a token for every row of logits [L, V] float32; log probabilities are of the raw distribution.

    Deterministic: temperature 0 takes the largest logit (lowest id of equals); otherwise the draw is a function of
    the row's logits, seed and position. NaN and infinite logits never produce an id outside [0, V).
    """
    if logits.shape != (len(batch.rows), batch.vocab_size) or logits.dtype != torch.float32:
        expected = (len(batch.rows), batch.vocab_size)
        raise ValueError(f"sample: logits {tuple(logits.shape)} {logits.dtype}, expected float32 {expected}")
    if logits.device.type != "cuda":
        return _sample_host(logits, batch)
    token_ids = sample_device(logits, batch)
    if batch.max_logprobs is None:
        return SampleOutput(token_ids)
    return SampleOutput(token_ids, *score_device(logits, token_ids, batch.max_logprobs))


def _sample_host(logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
    table = logits.cpu().numpy()
    tokens = [
        host.sample_row(table[r], row, edit, batch.purpose)
        for r, (row, edit) in enumerate(zip(batch.rows, batch.edits, strict=True))
    ]
    token_ids = torch.tensor(tokens, dtype=torch.int64)
    if batch.max_logprobs is None:
        return SampleOutput(token_ids)
    wanted = [row.params.logprobs is not None for row in batch.rows]
    return SampleOutput(token_ids, *_score_host(table, tokens, batch.max_logprobs, wanted))


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> SampleOutput:
    """Log probabilities of given tokens [L] and of the num_top best ids per row of logits [L, V] (prompt logprobs)."""
    if logits.device.type == "cuda":
        return SampleOutput(token_ids, *score_device(logits, token_ids.to(logits.device), num_top))
    table = logits.cpu().numpy()
    tokens = token_ids.tolist()
    return SampleOutput(token_ids, *_score_host(table, tokens, num_top, [True] * len(tokens)))


def _score_host(
    table: np.ndarray[tuple[int, ...], np.dtype[np.float32]], tokens: list[int], num_top: int, wanted: list[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_top = min(num_top, table.shape[1])
    logprobs = torch.zeros(len(tokens))
    top_ids = torch.zeros((len(tokens), num_top), dtype=torch.int64)
    top_logprobs = torch.zeros((len(tokens), num_top))
    for r, token in enumerate(tokens):
        if wanted[r]:
            value, ids, values = host.log_probabilities(table[r], token, num_top)
            logprobs[r] = value
            top_ids[r], top_logprobs[r] = torch.from_numpy(ids), torch.from_numpy(values)
    return logprobs, top_ids, top_logprobs
