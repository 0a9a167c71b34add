"""What the trunk computed for committed tokens, kept until a drafter takes it into its own caches.

A drafter's entry for position p is made from the trunk's row p (and, for MTP layers, from token p + 1). Entries are
written for every committed token, drafted or not, prompt or reply: a hole would be read by every later draft and, once
its block is published, by later requests. Rows of prompts are written in the step that computes them. Rows of replies
wait until their request drafts, or until their block of 64 is complete, because then it is published: a request that
does not draft costs one write per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slimserve.cache.manager import CacheManager, CacheSequence
from slimserve.engine.inputs import InputRow
from slimserve.engine.job import tokens_of
from slimserve.engine.request import Request
from slimserve.engine.step import Row, RowResult, StepPlan, StepResult
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.recurrent import MAX_DRAFT_TOKENS

RING = BLOCK_TOKENS + MAX_DRAFT_TOKENS + 1
"""Rows that can wait: less than a block, and those of the step that completes it."""


def buffer_tokens(max_tokens: int, max_sequences: int, block: int) -> tuple[int, int, int]:
    """Tokens of a tracking drafter's three input buffers: for what a step of max_tokens brings, for rows that wait, and
    for its drafts, `block` rows of each sequence."""
    return max_tokens + max_sequences * RING, max_sequences * RING, max_sequences * block


@dataclass(slots=True, eq=False)
class Track:
    """One sequence: entries below `written` are in the drafter's caches, rows below `known` are here or there.

    `following` holds the tokens at positions written + 1 .. known. `slot` is the sequence's place in the buffers.
    """

    sequence: CacheSequence
    slot: int
    written: int
    known: int
    following: list[int] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Rows that are not written yet."""
        return self.known - self.written


class Tracker:
    """Tracks of all running sequences, and the rows [W] of each that wait."""

    def __init__(self, cache: CacheManager, max_sequences: int, width: int, dtype: torch.dtype, device: torch.device):
        self._cache = cache
        self._tracks: dict[str, Track] = {}
        self._free = list(range(max_sequences - 1, -1, -1))
        self._rows = torch.zeros(max_sequences * RING, width, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the waiting rows."""
        return self._rows.nbytes

    def __len__(self) -> int:
        return len(self._tracks)

    def find(self, request: Request) -> Track | None:
        """The track of a request whose committed tokens are all known here."""
        track = self._tracks.get(request.request_id)
        if track is None or track.sequence.released or track.known != request.num_computed:
            return None
        return track

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self._free.append(track.slot)

    def take_in(
        self, plan: StepPlan, result: StepResult, source: torch.Tensor
    ) -> tuple[list[InputRow], torch.Tensor, list[Track]]:
        """Note a step's committed tokens, whose rows are in source [T, W].

        Returns what must be written now: rows with the tokens that follow each position, their values [n, W], and
        their tracks, whose `written` is moved on.
        """
        now: list[tuple[Track, int, int]] = []
        kept_from: list[int] = []
        kept_to: list[int] = []
        waiting: list[Track] = []
        token, drafted = 0, False
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            first, token = token, token + row.q_len
            drafted |= bool(row.draft)
            track = self._track_of(row, outcome)
            if track is None:
                continue
            count = row.q_len - len(row.draft) + outcome.num_accepted_drafts
            track.following += _following(row, outcome, count)
            if row.num_samples and row.q_len <= MAX_DRAFT_TOKENS + 1:
                places = range(track.known, track.known + count)
                kept_from.extend(range(first, first + count))
                kept_to.extend(track.slot * RING + position % RING for position in places)
                waiting.append(track)
            else:
                assert not track.num_waiting, "a prompt goes on behind tokens of its reply"
                now.append((track, first, count))
            track.known += count
        if kept_from:
            self._rows[self._index(kept_to)] = source[self._index(kept_from)]
        due = [track for track in waiting if track.known // BLOCK_TOKENS > track.written // BLOCK_TOKENS]
        if drafted and (due or now):
            due = waiting  # they will be written before the next drafts anyway: one forward for all
        return self._collect(now, due, source)

    def due_for(self, tracks: Sequence[Track]) -> tuple[list[InputRow], torch.Tensor, list[Track]]:
        """Everything that waits of these tracks, as `take_in` returns it."""
        return self._collect([], [track for track in tracks if track.num_waiting], self._rows)

    def _collect(
        self, now: Sequence[tuple[Track, int, int]], due: Sequence[Track], source: torch.Tensor
    ) -> tuple[list[InputRow], torch.Tensor, list[Track]]:
        rows: list[InputRow] = []
        parts: list[torch.Tensor] = []
        for track, first, count in now:
            parts.append(source[first : first + count])
            rows.append(_input_row(track))
        if due:
            places = [
                track.slot * RING + position % RING for track in due for position in range(track.written, track.known)
            ]
            parts.append(self._rows[self._index(places)])
            rows.extend(_input_row(track) for track in due)
        if not rows:
            return [], source[:0], []
        tracks = [*(track for track, _, _ in now), *due]
        for track in tracks:
            track.written = track.known
            track.following = []
        return rows, parts[0] if len(parts) == 1 else torch.cat(parts), tracks

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        return torch.tensor(places, dtype=torch.int64).to(self._rows.device, non_blocking=True)

    def _track_of(self, row: Row, outcome: RowResult) -> Track | None:
        """The row's track; a new one where its sequence is new. None for a row that failed."""
        request_id = row.request.request_id
        if outcome.error is not None:
            self.release(request_id)
            return None
        track = self._tracks.get(request_id)
        if track is not None and track.sequence is row.sequence:
            assert track.known == row.start_position, "a drafter missed a step of this sequence"
            return track
        self.release(request_id)
        if not self._free:
            for stale in [key for key, old in self._tracks.items() if old.sequence.released]:
                self.release(stale)
        # A new sequence starts at what the prefix index restored, the drafter's own pages included.
        start = row.start_position
        track = self._tracks[request_id] = Track(row.sequence, self._free.pop(), start, start)
        return track


def _input_row(track: Track) -> InputRow:
    return InputRow(track.sequence, track.written, track.following)


def _following(row: Row, outcome: RowResult, count: int) -> list[int]:
    """Tokens at positions start + 1 .. start + count of a row of which `count` tokens are committed."""
    inside = list(row.token_ids[1:count])
    if outcome.token_ids:
        return [*inside, outcome.token_ids[-1]]
    end = row.start_position + count
    return [*inside, *tokens_of(row.request, end, end + 1)]
