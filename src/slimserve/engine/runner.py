"""Runs one plan: inputs, model, logits, draws. The same code on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimserve.cache.manager import CacheManager
from slimserve.engine.inputs import InputBuffers
from slimserve.engine.request import TokenLogprob
from slimserve.engine.sample import SamplingRow, TokenCounts, build_batch, sample, score
from slimserve.engine.step import Row, RowResult, StepPlan, StepResult
from slimserve.layers.contract import Caches
from slimserve.models.contract import Model

_NOT_FINITE = "the model produced values that are not finite for this request; its reply cannot be trusted"


class Runner:
    """Holds the model, its caches and the persistent input buffers."""

    def __init__(
        self,
        model: Model,
        cache: CacheManager,
        caches: Caches,
        buffers: InputBuffers,
        *,
        vocab_size: int,
        end_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._cache = cache
        self._caches = caches
        self._buffers = buffers
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's rows. A row whose values are not finite gets an error; the others are not affected."""
        step = self._buffers.fill(plan, self._cache)
        hidden = self._model(step, self._caches)  # [T, H]
        wanted = step.logit_indices.numel() > 0
        logits = self._model.logits(hidden[step.logit_indices]) if wanted else hidden.new_zeros((0, self._vocab_size))
        finite = _finite_rows(plan, hidden, logits)
        drawn = self._draw(plan.rows, logits, finite) if wanted else {}
        rows = []
        first = 0
        for r, row in enumerate(plan.rows):
            if not finite[r]:
                rows.append(RowResult(error=_NOT_FINITE))
            else:
                scored = self._score(row, logits[first : first + row.num_scored]) if row.num_scored else ()
                rows.append(_accept(row, drawn[r], scored) if r in drawn else RowResult(prompt_logprobs=scored))
            first += row.num_logits
        return StepResult(tuple(rows))

    def _draw(
        self, rows: Sequence[Row], logits: torch.Tensor, finite: Sequence[bool]
    ) -> dict[int, list[tuple[int, TokenLogprob | None]]]:
        """Per row that samples: the target's draw after each of its drafts, and after the row's known tokens."""
        sampling: list[SamplingRow] = []
        indices: list[int] = []
        owners: list[int] = []
        first = 0
        for r, row in enumerate(rows):
            if finite[r]:
                for i in range(row.num_samples):
                    sampling.append(self._sampling_row(row, i))
                    indices.append(first + row.num_scored + i)
                    owners.append(r)
            first += row.num_logits
        if not sampling:
            return {}
        chosen = logits if len(indices) == len(logits) else logits[indices]
        batch = build_batch(sampling, self._vocab_size)
        tokens, logprobs = sample(chosen, batch).to_host(batch)
        drawn: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        for owner, token, logprob in zip(owners, tokens, logprobs, strict=True):
            drawn.setdefault(owner, []).append((token, logprob))
        return drawn

    def _sampling_row(self, row: Row, num_drafts: int) -> SamplingRow:
        """The draw that follows the row's known tokens and num_drafts of its drafts."""
        request = row.request
        params = request.sampling
        ends: frozenset[int] = frozenset()
        if params.min_tokens:
            ends = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._end_token_ids
        sampling = SamplingRow(
            params,
            request.seed,
            request.num_tokens + num_drafts,
            num_output_tokens=len(request.output_token_ids),
            end_token_ids=ends,
            counts=request.counts,
            drafted=row.draft[:num_drafts],
        )
        if sampling.needs_counts and request.counts is None:
            request.counts = TokenCounts(request.prompt_token_ids, request.output_token_ids)
            return self._sampling_row(row, num_drafts)
        return sampling

    @staticmethod
    def _score(row: Row, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the prompt tokens that follow the scored positions."""
        first = row.start_position + row.q_len - row.num_logits + 1
        prompt = row.request.prompt_token_ids
        token_ids = torch.tensor(prompt[first : first + row.num_scored])
        num_top = row.request.sampling.logprobs or 0
        scored = score(logits, token_ids, num_top)
        assert scored.logprobs is not None and scored.top_ids is not None and scored.top_logprobs is not None
        return tuple(
            TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
            for logprob, ids, values in zip(
                scored.logprobs.tolist(), scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True
            )
        )


def _accept(row: Row, drawn: Sequence[tuple[int, TokenLogprob | None]], scored: tuple[TokenLogprob, ...]) -> RowResult:
    """A draft holds when it equals the draw that plain decoding would have made at its position."""
    accepted = 0
    while accepted < len(row.draft) and drawn[accepted][0] == row.draft[accepted]:
        accepted += 1
    kept = drawn[: accepted + 1]
    logprobs = tuple(logprob for _, logprob in kept if logprob is not None)
    return RowResult(tuple(token for token, _ in kept), logprobs, scored, accepted)


def _finite_rows(plan: StepPlan, hidden: torch.Tensor, logits: torch.Tensor) -> list[bool]:
    """Which rows have only finite hidden states and logits (a sum is finite exactly when all its terms are)."""
    of_tokens = torch.isfinite(hidden.float().sum(dim=-1))  # [T]
    of_logits = torch.isfinite(logits.sum(dim=-1))  # [L]
    both = torch.cat((of_tokens, of_logits)).tolist()
    if all(both):
        return [True] * len(plan.rows)
    finite = []
    token, logit = 0, plan.num_tokens
    for row in plan.rows:
        finite.append(all(both[token : token + row.q_len]) and all(both[logit : logit + row.num_logits]))
        token += row.q_len
        logit += row.num_logits
    return finite
