"""What proposes tokens for a step to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slimserve.engine.request import Request


class Drafter(Protocol):
    """Proposes tokens that may follow the committed ones of requests.

    Drafts cost time when they are wrong and never change a reply: a step verifies them as rows of 1 + k tokens, and
    a draft stands only where it equals the token that plain decoding draws at its position. A drafter sees committed
    tokens alone, so what it proposes cannot depend on how its last proposal fared in the caches.
    """

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """For each request at most `limits[i]` tokens; () where nothing is worth trying."""
        ...

    def release(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        ...
