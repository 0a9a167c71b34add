"""Runs one plan: forward pass, draws, acceptance of drafts. The same code on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimserve.engine.forward import Computed, ForwardPass
from slimserve.engine.request import TokenLogprob
from slimserve.engine.sample import SamplingRow, TokenCounts, build_batch, sample, score
from slimserve.engine.speculate.acceptance import accept_by_ratio, accept_equal
from slimserve.engine.speculate.contract import Drafter, Observer, Probabilistic
from slimserve.engine.step import Row, RowResult, StepPlan, StepResult

_NOT_FINITE = "the model produced values that are not finite for this request; its reply cannot be trusted"


class Runner:
    """Computes a plan's rows: the model's forward pass, then the draws."""

    def __init__(
        self,
        forward: ForwardPass,
        *,
        end_token_ids: frozenset[int],
        drafter: Drafter | None = None,
        rejection: bool = False,
    ) -> None:
        """`rejection`: drafts stand by the ratio of probabilities instead of by equality with the target's draw."""
        self.forward = forward
        self._observer = drafter if isinstance(drafter, Observer) else None
        self._probabilities = drafter if isinstance(drafter, Probabilistic) else None
        self._rejection = rejection
        self._vocab_size = forward.vocab_size
        self._end_token_ids = end_token_ids

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's rows. A row whose values are not finite gets an error; the others are not affected."""
        computed = self.forward(plan)
        logits = computed.logits
        finite, drawn = self._draw(plan, computed)
        rows = []
        first = 0
        for r, row in enumerate(plan.rows):
            if not finite[r]:
                rows.append(RowResult(error=_NOT_FINITE))
            else:
                scored = self._score(row, logits[first : first + row.num_scored]) if row.num_scored else ()
                if r in drawn:
                    rows.append(accept_equal(row, drawn[r], scored))
                elif row.num_samples:
                    rows.append(self._accept_by_ratio(row, logits[first : first + row.num_logits]))
                else:
                    rows.append(RowResult(prompt_logprobs=scored))
            first += row.num_logits
        result = StepResult(tuple(rows))
        if self._observer is not None:
            self._observer.observe(plan, result, computed.hidden, computed.tapped)
        return result

    def _draw(
        self, plan: StepPlan, computed: Computed
    ) -> tuple[list[bool], dict[int, list[tuple[int, TokenLogprob | None]]]]:
        """Which rows are finite; per row that samples, the target's draw after each of its drafts and its known tokens.

        Rows that turn out not to be finite are drawn as well (the sampler gives them some token), so that flags and
        tokens come from the device together: the only wait of a step.
        """
        sampling: list[SamplingRow] = []
        indices: list[int] = []
        owners: list[int] = []
        first = 0
        for r, row in enumerate(plan.rows):
            if not (self._rejection and row.draft):
                for i in range(row.num_samples):
                    sampling.append(self._sampling_row(row, i))
                    indices.append(first + row.num_scored + i)
                    owners.append(r)
            first += row.num_logits
        if not sampling:
            return _finite_rows(plan, computed.finite.tolist()), {}
        chosen = computed.logits if len(indices) == len(computed.logits) else computed.logits[indices]
        batch = build_batch(sampling, self._vocab_size)
        output = sample(chosen, batch)
        together = torch.cat((computed.finite.to(torch.int64), output.token_ids)).tolist()
        flags, tokens = together[: len(computed.finite)], together[len(computed.finite) :]
        logprobs = output.logprobs_to_host(batch)
        drawn: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        for owner, token, logprob in zip(owners, tokens, logprobs, strict=True):
            drawn.setdefault(owner, []).append((token, logprob))
        return _finite_rows(plan, flags), drawn

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

    def _accept_by_ratio(self, row: Row, logits: torch.Tensor) -> RowResult:
        """logits [1 + k, V] of a row with drafts."""
        request = row.request
        drafted_from = self._probabilities.distributions(request.request_id) if self._probabilities is not None else ()
        sampling = [self._sampling_row(row, i) for i in range(row.num_samples)]
        tokens = accept_by_ratio(row.draft, drafted_from, logits, sampling, self._vocab_size)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = _score_tokens(logits[: len(tokens)], tokens, request.sampling.logprobs)
        return RowResult(tuple(tokens), logprobs, (), len(tokens) - 1)

    @staticmethod
    def _score(row: Row, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the prompt tokens that follow the scored positions."""
        first = row.start_position + row.q_len - row.num_logits + 1
        prompt = row.request.prompt_token_ids
        return _score_tokens(logits, prompt[first : first + row.num_scored], row.request.sampling.logprobs or 0)


def _score_tokens(logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of given tokens under logits [L, V]."""
    scored = score(logits, torch.tensor(tokens), num_top)
    assert scored.logprobs is not None and scored.top_ids is not None and scored.top_logprobs is not None
    return tuple(
        TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(
            scored.logprobs.tolist(), scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True
        )
    )


def _finite_rows(plan: StepPlan, flags: Sequence[bool | int]) -> list[bool]:
    """Which rows have only finite hidden states and logits, from a flag per token and per logits row."""
    if all(flags):
        return [True] * len(plan.rows)
    finite = []
    token, logit = 0, plan.num_tokens
    for row in plan.rows:
        finite.append(all(flags[token : token + row.q_len]) and all(flags[logit : logit + row.num_logits]))
        token += row.q_len
        logit += row.num_logits
    return finite
