"""Adds drafts to the rows of a step that decode: as many as the control, the request and the caches allow."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from slimserve.cache.manager import CacheManager
from slimserve.engine.request import Request
from slimserve.engine.speculate.contract import Drafter
from slimserve.engine.speculate.control import SpeculationControl
from slimserve.engine.step import Row

logger = logging.getLogger("slimserve.engine")


class DraftPlanner:
    """Asks the drafter once per step for all requests that decode.

    Drafts take only room that is free once every decoding row has its own. Positions of drafts are reserved
    before the drafter runs, because it may write entries of its own there.
    """

    def __init__(self, cache: CacheManager, drafter: Drafter, control: SpeculationControl) -> None:
        self._cache = cache
        self._drafter = drafter
        self._control = control
        self.seconds = 0.0
        """What the drafter took in the last step."""
        self._failed = False

    def extend(self, rows: dict[int, Row]) -> None:
        """Give drafts to rows of one token each, in place."""
        self.seconds = 0.0
        limit = self._control.draft_length(len(rows)) if rows and not self._failed else 0
        if not limit:
            return
        wanted: list[tuple[int, Row, int]] = []
        for serial, row in rows.items():
            count = min(limit, self._room(row))
            if count > 0 and self._cache.extend(row.sequence, count):
                wanted.append((serial, row, count))
        if not wanted:
            return
        started = time.perf_counter()
        drafts = self._propose([row.request for _, row, _ in wanted], [count for _, _, count in wanted])
        self.seconds = time.perf_counter() - started
        for (serial, row, count), draft in zip(wanted, drafts, strict=True):
            if len(draft) < count:
                self._cache.trim(row.sequence, row.start_position + 1 + len(draft))
            if draft:
                rows[serial] = replace(
                    row, token_ids=(*row.token_ids, *draft), draft=tuple(draft), num_logits=1 + len(draft)
                )

    def _propose(self, requests: Sequence[Request], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        try:
            return self._drafter.propose(requests, limits)
        except Exception:
            # Nobody needs drafts: the requests go on without, and so does every later step.
            logger.exception("the drafter failed; nothing is drafted from here on")
            self._failed = True
            return [()] * len(requests)

    def _room(self, row: Row) -> int:
        """Drafts that could still be of use: a reply ends at max_tokens and at the longest sequence."""
        request = row.request
        if not request.speculate or not request.output_token_ids:
            return 0
        left = request.max_tokens - len(request.output_token_ids)
        return min(left, self._cache.max_request_tokens - request.num_tokens) - 1

    def release(self, request_id: str) -> None:
        """A request has ended."""
        self._drafter.release(request_id)
