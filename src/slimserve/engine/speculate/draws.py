"""How drafters draw their tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from slimserve.engine.config import Acceptance, DraftDraw, SpeculationConfig
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.sample import Purpose, SamplingRow, TokenCounts, build_batch, host, sample
from slimserve.engine.speculate.distribution import Distribution, distribution
from slimserve.ops.reference.random import gumbel, random_bits


class DraftSampler:
    """Draws draft tokens for requests, with the edits and filters that the target's draw will have.

    Exact acceptance: the draft is a guess of the target's own draw. COUPLED draws with the target's noise for the
    position, so that two similar distributions mostly give the same token; GREEDY takes the likeliest one.
    Rejection: drafts are drawn from the drafter's distribution with noise of their own, and the distributions kept.
    """

    def __init__(self, config: SpeculationConfig, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self._rejects = config.acceptance is Acceptance.REJECTION
        self._greedy = config.draw is DraftDraw.GREEDY and not self._rejects
        self.vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._kept: dict[str, list[Distribution]] = {}

    def start(self, requests: Sequence[Request]) -> None:
        """New proposals begin: what the last ones were drawn from is forgotten."""
        for request in requests:
            self._kept[request.request_id] = []

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._kept.pop(request_id, None)

    def distributions(self, request_id: str) -> Sequence[Distribution]:
        """See Probabilistic."""
        return self._kept.get(request_id, ())

    def draw(self, logits: torch.Tensor, requests: Sequence[Request], offset: int) -> torch.Tensor:
        """Tokens [R] int64 for logits [R, V] float32, `offset` drafts behind the committed tokens, where logits are."""
        rows = [self.row(request, offset) for request in requests]
        if not self._rejects:
            return sample(logits, build_batch(rows, self.vocab_size)).token_ids
        batch = build_batch(rows, self.vocab_size, Purpose.DRAFT)
        table = logits.cpu().numpy()
        tokens = []
        for r, (row, edit) in enumerate(zip(rows, batch.edits, strict=True)):
            drawn_from = distribution(table[r], row, edit)
            self._kept.setdefault(requests[r].request_id, []).append(drawn_from)
            tokens.append(drawn_from.draw(row.seed, row.position, Purpose.DRAFT))
        return torch.tensor(tokens, dtype=torch.int64).to(logits.device)

    def draw_among(
        self, request: Request, offset: int, ids: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]
    ) -> int:
        """The place of the token drawn among candidates ids [C] with scores [C] in place of logits."""
        row = self.row(request, offset)
        order = np.argsort(ids)
        x, ids = host.sanitize(scores[order]), ids[order]
        if self._rejects:
            local = distribution(x, row, None)
            drawn_from = Distribution(ids[local.token_ids], local.probabilities)
            self._kept.setdefault(request.request_id, []).append(drawn_from)
            token = drawn_from.draw(row.seed, row.position, Purpose.DRAFT)
            return int(order[np.searchsorted(ids, token)])
        if row.params.temperature < host.GREEDY_BELOW:
            return int(order[x.argmax()])
        kept = host.kept_tokens(x, row.params)
        kept = np.arange(x.size) if kept is None else np.sort(kept)
        noise = gumbel(random_bits(ids[kept], row.seed, row.position, Purpose.TARGET))
        return int(order[kept[((x[kept] - x.max()) * np.float32(1.0 / row.params.temperature) + noise).argmax()]])

    def row(self, request: Request, offset: int) -> SamplingRow:
        """The draw `offset` drafts behind the committed tokens.

        Earlier drafts count towards min_tokens but not for penalties: their ids may still be on the device.
        """
        params: SamplingParams = request.sampling
        if self._greedy or params.logprobs is not None:
            params = replace(params, logprobs=None, temperature=0.0 if self._greedy else params.temperature)
        ends: frozenset[int] = frozenset()
        if params.min_tokens:
            ends = request.stop_token_ids if request.ignore_eos else request.stop_token_ids | self._end_token_ids
        row = SamplingRow(
            params,
            request.seed,
            request.num_tokens + offset,
            num_output_tokens=len(request.output_token_ids) + offset,
            end_token_ids=ends,
            counts=request.counts,
        )
        if row.needs_counts and request.counts is None:
            request.counts = TokenCounts(request.prompt_token_ids, request.output_token_ids)
            return replace(row, counts=request.counts)
        return row
