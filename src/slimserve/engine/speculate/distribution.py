"""Token distributions on the host, as rejection sampling needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slimserve.engine.sample import host
from slimserve.engine.sample.batch import RowEdit, SamplingRow
from slimserve.ops.reference.random import Purpose, gumbel, random_bits

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of the tokens that can be drawn: token_ids ascending, probabilities positive, sum 1."""

    token_ids: IntArray
    probabilities: FloatArray

    def of(self, token: int) -> float:
        """The probability of a token; 0 where it cannot be drawn."""
        place = int(np.searchsorted(self.token_ids, token))
        if place == self.token_ids.size or self.token_ids[place] != token:
            return 0.0
        return float(self.probabilities[place])

    def draw(self, seed: int, position: int, purpose: Purpose) -> int:
        """A token, by the largest Gumbel-shifted log probability."""
        noise = gumbel(random_bits(self.token_ids, seed, position, purpose))
        return int(self.token_ids[(np.log(self.probabilities) + noise).argmax()])

    def without(self, other: Distribution) -> Distribution:
        """max(0, self - other), normalized: what is left to draw from when a draft from `other` was refused.

        Where nothing is left (the two are equal up to rounding) it is self.
        """
        left = self.probabilities.copy()
        _, own, others = np.intersect1d(self.token_ids, other.token_ids, assume_unique=True, return_indices=True)
        left[own] -= other.probabilities[others]
        kept = left > 0
        if not kept.any():
            return self
        return Distribution(self.token_ids[kept], left[kept] / left[kept].sum())


def certain(token: int) -> Distribution:
    """All probability on one token: what a drafter without probabilities draws from."""
    return Distribution(np.asarray([token], dtype=np.int64), np.ones(1))


def distribution(x: host.FloatArray, row: SamplingRow, edit: RowEdit | None) -> Distribution:
    """What a request draws from, given raw logits x [V]: edited, divided by its temperature once, cut to its own
    top-k, top-p and min-p."""
    edited = host.sanitize(x)
    if edit is not None:
        edited = host.sanitize(host.apply_edit(edited, edit))
    if row.params.temperature < host.GREEDY_BELOW:
        return certain(int(edited.argmax()))
    ids = host.kept_tokens(edited, row.params)
    ids = np.arange(edited.size) if ids is None else np.sort(ids)
    weights = np.exp((edited[ids].astype(np.float64) - float(edited.max())) / row.params.temperature)
    drawable = weights > 0
    weights = weights[drawable]
    return Distribution(ids[drawable].astype(np.int64), weights / weights.sum())
