"""What proposes tokens for a step to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from slimserve.engine.request import Request
from slimserve.engine.speculate.distribution import Distribution
from slimserve.engine.step import StepPlan, StepResult


class Drafter(Protocol):
    """Proposes tokens that may follow the committed ones of requests.

    Drafts cost time when they are wrong and never change a reply: a step verifies them as rows of 1 + k tokens, and
    a draft stands only where it equals the token that plain decoding draws at its position. A drafter sees committed
    tokens alone, so what it proposes cannot depend on how its last proposal fared in the caches.
    """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """For each request at most `limits[i]` tokens; () where nothing is worth trying.

        The requests' sequences have room for `limits[i]` positions behind their next token.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A drafter that takes in what the model computed for committed tokens, into cache groups of its own.

    `taps` are the model's layers whose outputs it reads. `observe` comes after every step and before its commit, so
    that entries of a block are there when the block is published.
    """

    taps: tuple[int, ...]

    def observe(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> None:
        """hidden [T, H] after the final norm and one tapped [T, H] per layer of `taps`, of the plan's tokens."""
        ...


@runtime_checkable
class Holder(Protocol):
    """A drafter that holds memory of its own besides weights and caches."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device of its input buffers and of rows that wait."""
        ...

    def compute_widest(self, max_draft: int) -> torch.Tensor:
        """The logits [L, V] of its widest forward with max_draft drafts a row, from null rows; nothing is kept."""
        ...


@runtime_checkable
class Probabilistic(Protocol):
    """A drafter that can say from which distributions it drew its last proposal for a request."""

    def distributions(self, request_id: str) -> Sequence[Distribution]:
        """One per proposed token, in order."""
        ...
