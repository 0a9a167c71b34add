"""Drafting with a smaller model of the same vocabulary, which has caches and a prefix index of its own.

It needs tokens only, so its caches never shorten what the target restores: what it does not hold it reads again, and
a request for which it has no memory is decoded plainly. It reads nothing until a request drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slimserve.cache.budget import CacheDemand
from slimserve.cache.manager import CacheManager, CacheSequence
from slimserve.engine.inputs import InputBuffers, InputRow, Padding
from slimserve.engine.job import tokens_of
from slimserve.engine.request import Request
from slimserve.engine.speculate.distribution import Distribution
from slimserve.engine.speculate.draws import DraftSampler
from slimserve.engine.speculate.recursion import draft_one_by_one
from slimserve.layers.contract import Caches, StepInput
from slimserve.models.contract import CacheSpec, Model
from slimserve.models.recurrent import MAX_DRAFT_TOKENS

MOST_READ = 256
"""Tokens that one call may read of requests whose text the drafter does not know yet; replies wait for them."""


def companion_demand(target: CacheDemand, max_context: int) -> CacheDemand:
    """What the drafter's own caches must carry; max_context: the drafter's longest sequence."""
    return CacheDemand(target.max_sequences, min(target.max_context, max_context), MOST_READ, target.snapshot_spacing)


def buffer_tokens(max_sequences: int) -> tuple[int, int]:
    """Tokens of the drafter's two input buffers: for reading known text, and for drafts one by one."""
    return MOST_READ + max_sequences * (MAX_DRAFT_TOKENS + 1), max_sequences


@dataclass(slots=True, eq=False)
class _Follower:
    """The drafter's sequence of one request. `drafted` tokens stand behind its committed ones in the caches."""

    request: Request
    sequence: CacheSequence
    drafted: tuple[int, ...] = ()


class ModelDrafter:
    """See the module. Drafts of the last call that came true are kept: their entries need no second computation."""

    def __init__(
        self,
        model: Model,
        cache: CacheManager,
        caches: Caches,
        specs: Sequence[CacheSpec],
        sampler: DraftSampler,
        *,
        device: torch.device,
    ) -> None:
        """`cache` and `caches` belong to this drafter alone; `specs` are all of its groups."""
        demand = cache.plan.demand
        self.cache = cache
        self.preparation_seconds = 0.0
        """What reading unknown text took in the last call."""
        self._model = model
        self._caches = caches
        self._sampler = sampler
        self._vocab_size = sampler.vocab_size
        self._known_tokens = model.config.vocab_size
        self._followers: dict[str, _Follower] = {}
        self._strangers: dict[str, Request] = {}
        # Two, because the host does not wait for the device between reading and drafting.
        self._reading, self._single = (
            InputBuffers(specs, demand.max_sequences, tokens, demand.max_context, device)
            for tokens in buffer_tokens(demand.max_sequences)
        )

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def buffer_bytes(self) -> int:
        """See Holder."""
        return self._reading.num_bytes + self._single.num_bytes

    @torch.inference_mode()
    def compute_widest(self, max_draft: int) -> torch.Tensor:
        """See Holder."""
        buffers = self._reading
        length = min(buffers.max_tokens // buffers.max_rows, buffers.max_context)
        step = buffers.fill_rows((), self.cache, Padding(buffers.max_rows, length, buffers.max_context))
        hidden = self._model(step, self._caches)[step.row_offsets[1:] - 1]  # [R, H]
        return self._model.logits(hidden)[:, : self._vocab_size]

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[tuple[int, ...]]:
        """See Drafter."""
        self.preparation_seconds = 0.0
        started = time.perf_counter()
        places = sorted(range(len(requests)), key=lambda place: -limits[place])
        ready: list[tuple[int, _Follower]] = []
        rows: list[InputRow] = []
        budget = MOST_READ
        for place in places:
            follower = self._follow(requests[place], requests)
            if follower is None:
                continue
            length = self._to_read(follower, budget)
            if not length or not self.cache.reserve(follower.sequence, follower.sequence.committed + length):
                continue
            budget -= length if length > MAX_DRAFT_TOKENS + 1 else 0
            start = follower.sequence.committed
            tokens = tokens_of(requests[place], start, start + length)
            if max(tokens) >= self._known_tokens:
                self._give_up(requests[place])
                continue
            rows.append(InputRow(follower.sequence, start, tokens))
            ready.append((place, follower))
        proposals: list[tuple[int, ...]] = [()] * len(requests)
        if not rows:
            return proposals
        hidden = self._read(rows)
        drafting = [
            (index, place, follower)
            for index, (place, follower) in enumerate(ready)
            if follower.sequence.committed == requests[place].num_tokens and self._make_room(follower, limits[place])
        ]
        if max(len(row.token_ids) for row in rows) > MAX_DRAFT_TOKENS + 1:
            self.preparation_seconds = time.perf_counter() - started
        if drafting:
            chosen = torch.tensor([index for index, _, _ in drafting]).to(hidden.device)
            drawn = self._draft(
                [requests[place] for _, place, _ in drafting],
                [follower for _, _, follower in drafting],
                [limits[place] for _, place, _ in drafting],
                hidden[chosen],
            )
            for (_, place, follower), tokens in zip(drafting, drawn, strict=True):
                proposals[place] = follower.drafted = tuple(tokens)
        return proposals

    def _follow(self, request: Request, present: Sequence[Request]) -> _Follower | None:
        """The follower of a request, its drafts that came true committed; None where it is past the drafter's range
        or has no memory here."""
        follower = self._followers.get(request.request_id)
        if self._strangers.get(request.request_id) is request:
            return None
        if request.num_tokens + MAX_DRAFT_TOKENS > self.cache.max_request_tokens:
            self.release(request.request_id)
            return None
        if follower is not None and follower.request is request:
            self._settle(follower)
            return follower
        self.release(request.request_id)
        prompt = self.cache.prompt(tokens_of(request, 0, request.num_tokens), request.cache_salt)
        admission = self.cache.admit(prompt)
        if admission is None:
            here = {other.request_id for other in present}
            for request_id in [known for known in self._followers if known not in here]:
                self.release(request_id)
            admission = self.cache.admit(prompt)
        if admission is None:
            return None
        follower = self._followers[request.request_id] = _Follower(request, admission[0])
        return follower

    def _give_up(self, request: Request) -> None:
        """A request with a token that only the target knows: its table may be padded further than the drafter's."""
        self.release(request.request_id)
        self._strangers[request.request_id] = request

    def _settle(self, follower: _Follower) -> None:
        """Keep the entries of drafts that are now tokens of the reply; forget the others."""
        sequence, drafted = follower.sequence, follower.drafted
        follower.drafted = ()
        start = sequence.committed
        actual = tokens_of(follower.request, start, min(start + len(drafted), follower.request.num_tokens))
        held = 0
        # The last draft was never fed, so it has no entry.
        while held < min(len(actual), len(drafted) - 1) and actual[held] == drafted[held]:
            held += 1
        if held:
            self.cache.commit(sequence, drafted[:held])
        else:
            self.cache.rollback(sequence)

    @staticmethod
    def _to_read(follower: _Follower, budget: int) -> int:
        """Known tokens to read now: a few always, many as far as the budget goes."""
        missing = follower.request.num_tokens - follower.sequence.committed
        return missing if missing <= MAX_DRAFT_TOKENS + 1 else min(missing, budget)

    def _make_room(self, follower: _Follower, limit: int) -> bool:
        """Positions of all drafts but the last, which is not fed."""
        if limit == 1:
            return True
        return self.cache.reserve(follower.sequence, follower.sequence.committed + limit - 1, limit - 1)

    def _read(self, rows: Sequence[InputRow]) -> torch.Tensor:
        """Entries of known tokens; the hidden state [R, H] of each row's last one."""
        step = self._reading.fill_rows(rows, self.cache)
        hidden = self._model(step, self._caches)[step.logit_indices]
        for row in rows:
            self.cache.commit(row.sequence, row.token_ids)
        return hidden

    def _draft(
        self, requests: Sequence[Request], followers: Sequence[_Follower], limits: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        def first_step(num_rows: int) -> StepInput:
            rows = [InputRow(f.sequence, f.sequence.committed, (0,)) for f in followers[:num_rows]]
            return self._single.fill_rows(rows, self.cache)

        def forward(tokens: torch.Tensor, hidden: torch.Tensor, step: StepInput) -> torch.Tensor:
            step.token_ids = tokens
            return self._model(step, self._caches)

        def logits_of(hidden: torch.Tensor) -> torch.Tensor:
            return self._model.logits(hidden)[:, : self._vocab_size]

        return draft_one_by_one(requests, limits, hidden, self._sampler, logits_of, first_step, forward)

    def distributions(self, request_id: str) -> Sequence[Distribution]:
        """See Probabilistic."""
        return self._sampler.distributions(request_id)

    def release(self, request_id: str) -> None:
        """See Drafter."""
        self._strangers.pop(request_id, None)
        follower = self._followers.pop(request_id, None)
        if follower is not None:
            self.cache.release(follower.sequence)
        self._sampler.release(request_id)

    def audit(self) -> None:
        """Raise AssertionError unless the drafter's memory is owned as its books say."""
        self.cache.audit()
