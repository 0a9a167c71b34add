"""Drafting a whole block at once with DFlash2, from the target's hidden states of committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slimserve.cache.manager import CacheManager
from slimserve.engine.inputs import InputBuffers, InputRow, Padding
from slimserve.engine.request import Request
from slimserve.engine.sample import build_batch
from slimserve.engine.sample.device import best_candidates, edited
from slimserve.engine.speculate.distribution import Distribution
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.engine.speculate.tracking import Track, Tracker, buffer_tokens
from slimserve.engine.step import StepPlan, StepResult
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import CacheSpec
from slimserve.models.dflash2 import BlockInput, DFlash2Model


class BlockDrafter:
    """See models.dflash2. One forward and one sync for all requests of a step, however many tokens they draft."""

    def __init__(
        self,
        model: DFlash2Model,
        target: Any,
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
        """`caches` are the storage of the drafter's layers, `specs` its groups, from `first_group` on in `cache`."""
        demand, config = cache.plan.demand, model.config
        self.taps = config.taps
        self._model = model
        self._target = target
        self._cache = cache
        self._caches = caches
        self._sampler = sampler
        self._tracker = Tracker(cache, demand.max_sequences, len(self.taps) * config.hidden_size, dtype, device)

        def buffers(num_tokens: int) -> InputBuffers:
            return InputBuffers(
                specs, demand.max_sequences, num_tokens, demand.max_context, device, first_group=first_group
            )

        # Three, because the host does not wait for the device between these uses.
        sizes = buffer_tokens(max_tokens, demand.max_sequences, config.block_size)
        self._observed, self._waiting, self._blocks = (buffers(size) for size in sizes)

    @property
    def buffer_bytes(self) -> int:
        """See Holder."""
        buffers = (self._observed, self._waiting, self._blocks)
        return self._tracker.num_bytes + sum(part.num_bytes for part in buffers)

    @torch.inference_mode()
    def compute_widest(self, max_draft: int) -> torch.Tensor:
        """See Holder."""
        buffers, count = self._blocks, min(max_draft, self._model.config.max_draft)
        padding = Padding(buffers.max_rows, 1 + count, buffers.max_context)
        step = buffers.fill_rows((), self._cache, padding)
        return self._logits(self._hidden(step, [count] * buffers.max_rows))

    def observe(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> None:
        """See Observer."""
        source = tapped[0] if len(tapped) == 1 else torch.cat(list(tapped), dim=1)  # [T, taps * H]
        self._write(*self._tracker.take_in(plan, result, source), self._observed)

    def _write(
        self, rows: Sequence[InputRow], tapped: torch.Tensor, tracks: Sequence[Track], buffers: InputBuffers
    ) -> None:
        if rows:
            self._model.write_context(tapped, buffers.fill_rows(rows, self._cache), self._caches)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """See Drafter."""
        config = self._model.config
        proposals: list[tuple[int, ...]] = [()] * len(requests)
        found: list[tuple[int, Track, int]] = []
        for place, request in enumerate(requests):
            track = self._tracker.find(request)
            count = min(limits[place], config.max_draft)
            if track is not None and track.known + 1 + count <= config.max_context:
                found.append((place, track, count))
        if not found:
            return proposals
        self._write(*self._tracker.due_for([track for _, track, _ in found]), self._waiting)
        chosen = [requests[place] for place, _, _ in found]
        counts = [count for _, _, count in found]
        ids, scores = self._candidates(chosen, [track for _, track, _ in found], counts)
        self._sampler.start(chosen)
        first = 0
        for (place, _, count), request in zip(found, chosen, strict=True):
            proposals[place] = self._walk(request, ids[first : first + count], scores[first : first + count])
            first += count
        return proposals

    def _candidates(
        self, requests: Sequence[Request], tracks: Sequence[Track], counts: Sequence[int]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Per drafted position the ids [N, C] of its best candidates, and scores [N, P, C] by what stands before."""
        mask = self._model.config.mask_token_id
        anchors = [request.output_token_ids[-1] for request in requests]
        rows = [
            InputRow(track.sequence, track.known, (anchor, *(mask,) * count))
            for track, anchor, count in zip(tracks, anchors, counts, strict=True)
        ]
        hidden = self._hidden(self._blocks.fill_rows(rows, self._cache), counts)
        sampling = [
            self._sampler.row(request, i) for request, count in zip(requests, counts, strict=True) for i in range(count)
        ]
        logits = edited(self._logits(hidden), build_batch(sampling, self._sampler.vocab_size))
        logits = torch.nan_to_num(logits, nan=-1e30, posinf=1e30, neginf=-1e30)
        values, ids = best_candidates(logits, self._model.config.selector_top_k)  # [N, C]
        previous = torch.empty_like(ids)
        previous[1:] = ids[:-1]
        starts = torch.tensor([sum(counts[:r]) for r in range(len(counts))]).to(ids.device)
        previous[starts] = torch.tensor(anchors).to(ids.device).unsqueeze(1)
        scores = self._model.transitions(hidden, previous, ids, values)
        return ids.cpu().numpy(), scores.cpu().numpy()

    def _hidden(self, step: StepInput, counts: Sequence[int]) -> torch.Tensor:
        """States after the final norm [N, H] of the drafted positions of blocks of 1 + counts[r] rows."""
        block = BlockInput.of(step, [1 + count for count in counts])
        hidden = self._model.hidden(self._target.embedding(step.token_ids), block, self._caches)
        drafted: list[int] = []
        for r, count in enumerate(counts):
            first = r + sum(counts[:r]) + 1  # behind the anchors of the blocks so far
            drafted.extend(range(first, first + count))
        return hidden[torch.tensor(drafted).to(hidden.device)]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] float32 of states [N, H]."""
        head = self._target.logits if self._model.head is None else self._model.head
        return self._model.finish_logits(head(hidden))

    def _walk(self, request: Request, ids: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> tuple[int, ...]:
        """From the anchor on, each token drawn among its candidates by the scores behind the one before."""
        tokens: list[int] = []
        place = 0
        for offset in range(ids.shape[0]):
            place = self._sampler.draw_among(request, offset, ids[offset], scores[offset, place])
            tokens.append(int(ids[offset, place]))
        return tuple(tokens)

    def distributions(self, request_id: str) -> Sequence[Distribution]:
        """See Probabilistic."""
        return self._sampler.distributions(request_id)

    def release(self, request_id: str) -> None:
        """See Drafter."""
        self._tracker.release(request_id)
        self._sampler.release(request_id)
