"""Drafting with a model's own MTP layer (nextn), any number of tokens by recursion.

Entry p of the layer is made from the trunk's final hidden state h_p and token p + 1, and its output says token p + 2.
Fed back as h_{p+1} together with that draft it says token p + 3, and so on. Entries of drafts are written behind the
committed ones and overwritten when the tokens are known.

Row 64 b - 1 of a published page was made with the token that followed in the request that published it. A request
that leaves the shared prefix exactly there, with another token, restores a page whose last entry stands for the other
token: one entry of the context, in one of 64 branches. It may cost a draft, never a token of a reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slimserve.cache.manager import CacheManager
from slimserve.engine.inputs import InputBuffers, InputRow
from slimserve.engine.request import Request
from slimserve.engine.speculate.distribution import Distribution
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.engine.speculate.recursion import draft_one_by_one
from slimserve.engine.speculate.tracking import Track, Tracker, buffer_tokens
from slimserve.engine.step import StepPlan, StepResult
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import CacheSpec


class NextNDrafter:
    """See the module. All requests of a step are drafted together: k - 1 forwards of one row each, and one sync."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Any,
        cache: CacheManager,
        caches: Caches,
        specs: Sequence[CacheSpec],
        first_group: int,
        sampler: DraftSampler,
        *,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`specs` are the MTP layer's groups, from `first_group` on in the manager; max_tokens those of a step."""
        demand = cache.plan.demand
        self._model = model
        self._layer = model.nextn[0]
        self._cache = cache
        self._caches = caches
        self._sampler = sampler
        hidden_size = model.config.hidden_size
        self._tracker = Tracker(cache, demand.max_sequences, hidden_size, dtype, device)
        self._heads = torch.zeros(demand.max_sequences, hidden_size, dtype=dtype, device=device)

        def buffers(num_tokens: int) -> InputBuffers:
            return InputBuffers(
                specs, demand.max_sequences, num_tokens, demand.max_context, device, first_group=first_group
            )

        sizes = buffer_tokens(max_tokens, demand.max_sequences, 1)
        # Three, because a buffer may not be filled again before the device has read it: the host waits for the device
        # between one step's `propose` and the next one's, but not between these three uses.
        self._observed, self._waiting, self._single = (buffers(size) for size in sizes)

    @property
    def buffer_bytes(self) -> int:
        """See Holder."""
        held = self._tracker.num_bytes + self._heads.nbytes
        return held + sum(buffers.num_bytes for buffers in (self._observed, self._waiting, self._single))

    @torch.inference_mode()
    def compute_widest(self, max_draft: int) -> torch.Tensor:
        """See Holder."""
        logits: torch.Tensor = self._model.logits(self._heads)
        return logits

    def observe(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> None:
        """See Observer."""
        self._write(*self._tracker.take_in(plan, result, hidden), self._observed)

    def _write(
        self, rows: Sequence[InputRow], hidden: torch.Tensor, tracks: Sequence[Track], buffers: InputBuffers
    ) -> None:
        """Make the entries of rows, and keep what the layer says after each row's last one."""
        if not rows:
            return
        step = buffers.fill_rows(rows, self._cache)
        out = self._layer(step.token_ids, hidden, step, self._caches)  # [T, H]
        self._heads[self._slots(tracks)] = out[step.logit_indices]

    def _slots(self, tracks: Sequence[Track]) -> torch.Tensor:
        return torch.tensor([track.slot for track in tracks]).to(self._heads.device, non_blocking=True)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """See Drafter."""
        found = [(place, track) for place, r in enumerate(requests) if (track := self._tracker.find(r)) is not None]
        found.sort(key=lambda pair: -limits[pair[0]])
        proposals: list[tuple[int, ...]] = [()] * len(requests)
        if not found:
            return proposals
        tracks = [track for _, track in found]
        self._write(*self._tracker.due_for(tracks), self._waiting)
        drawn = self._draft([requests[place] for place, _ in found], tracks, [limits[place] for place, _ in found])
        for (place, _), tokens in zip(found, drawn, strict=True):
            proposals[place] = tuple(tokens)
        return proposals

    def _draft(self, requests: Sequence[Request], tracks: Sequence[Track], limits: Sequence[int]) -> list[list[int]]:
        def first_step(num_rows: int) -> StepInput:
            rows = [InputRow(track.sequence, track.known, (0,)) for track in tracks[:num_rows]]
            return self._single.fill_rows(rows, self._cache)

        def forward(tokens: torch.Tensor, hidden: torch.Tensor, step: StepInput) -> torch.Tensor:
            out: torch.Tensor = self._layer(tokens, hidden, step, self._caches)
            return out

        hidden = self._heads[self._slots(tracks)]  # [R, H]
        return draft_one_by_one(requests, limits, hidden, self._sampler, self._model.logits, first_step, forward)

    def distributions(self, request_id: str) -> Sequence[Distribution]:
        """See Probabilistic."""
        return self._sampler.distributions(request_id)

    def release(self, request_id: str) -> None:
        """See Drafter."""
        self._tracker.release(request_id)
        self._sampler.release(request_id)
