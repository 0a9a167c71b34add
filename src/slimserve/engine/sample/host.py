"""The sampler on the host, row by row in numpy: the reference, and what serves CPU logits.

numpy works on one thread and walks a row in one order, so a row's result cannot depend on the rows beside it.
No step sorts a whole vocabulary unless the kept set really reaches that far.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slimserve.engine.request import SamplingParams
from slimserve.engine.sample.batch import FloatArray, IntArray, RowEdit, SamplingRow
from slimserve.ops.cpu.sampling import gumbel_candidates
from slimserve.ops.reference.random import GUMBEL_MAX, Purpose, gumbel, random_bits

LOGPROB_FLOOR = -9999.0
"""Log probabilities are never below this, so that they stay finite and printable."""

GREEDY_BELOW = 1e-5
"""Temperatures below this draw greedily: dividing by them would overflow float32."""

_FIRST_CANDIDATES = 1024


def sanitize(x: FloatArray) -> FloatArray:
    """x [V], or a copy with NaN and -inf as -1e30 and +inf as 1e30 where its maximum is not finite."""
    if np.isfinite(x.max()):
        return x
    result: FloatArray = np.nan_to_num(x, nan=-1e30, posinf=1e30, neginf=-1e30)
    return result


def apply_edit(x: FloatArray, edit: RowEdit) -> FloatArray:
    """A changed copy of x [V]."""
    changed = x.copy()
    old = x[edit.token_ids]
    with np.errstate(all="ignore"):  # the smallest repetition penalties overflow; `sanitize` comes behind
        changed[edit.token_ids] = np.where(old > 0, old / edit.divisor, old * edit.divisor) + edit.addend
    if edit.allowed is not None:
        kept = changed[edit.allowed]
        changed.fill(-np.inf)
        changed[edit.allowed] = kept
    return changed


def largest(x: FloatArray, count: int) -> IntArray:
    """Ids of the `count` largest values, best first, equal values by lowest id."""
    if count < x.size:
        bound = np.partition(x, x.size - count)[x.size - count]
        ids = np.flatnonzero(x >= bound)
    else:
        ids = np.arange(x.size)
    order = np.argsort(-x[ids], kind="stable")[:count]
    return ids[order].astype(np.int64)


def kept_tokens(x: FloatArray, params: SamplingParams) -> IntArray | None:
    """Ids that top-k, then top-p, then min-p keep of finite-maximum logits x [V], best first; None = all.

    top-p keeps the shortest run of best tokens whose share of the mass left by top-k reaches top_p; min-p keeps
    tokens with at least min_p times the best one's probability.
    """
    has_top_k = 0 < params.top_k < x.size
    if not has_top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    best = x.max()
    inverse = np.float32(1.0 / params.temperature)
    if has_top_k:
        ids = largest(x, params.top_k)
        mass = None
    elif params.top_p < 1.0:
        mass = float(np.exp((x - best) * inverse).sum(dtype=np.float64))
        ids = largest(x, min(_FIRST_CANDIDATES, x.size))
        while ids.size < x.size and _mass(x[ids], best, inverse)[-1] < params.top_p * mass:
            ids = largest(x, min(ids.size * 8, x.size))
    else:
        bound = best + np.float32(params.temperature * np.log(params.min_p))
        ids = np.flatnonzero(x >= bound).astype(np.int64)
        return ids
    if params.top_p < 1.0:
        cumulative = _mass(x[ids], best, inverse)
        goal = params.top_p * (cumulative[-1] if mass is None else mass)
        ids = ids[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
    if params.min_p > 0.0:
        ids = ids[x[ids] >= best + np.float32(params.temperature * np.log(params.min_p))]
    return ids


def _mass(x: FloatArray, best: np.float32, inverse: np.float32) -> npt.NDArray[np.float64]:
    return np.cumsum(np.exp((x - best) * inverse), dtype=np.float64)


def draw(x: FloatArray, row: SamplingRow, purpose: Purpose) -> int:
    """One token from edited logits x [V]: the lowest id of the largest logit, or of the largest Gumbel-shifted one."""
    params = row.params
    if params.temperature < GREEDY_BELOW:
        return int(x.argmax())
    ids = kept_tokens(x, params)
    inverse = np.float32(1.0 / params.temperature)
    best = x.max()
    if ids is None:
        ids = gumbel_candidates(x, float(inverse), row.seed, row.position, purpose)
    if ids is None:
        # A token further below the best one than the largest possible draw cannot win: skip its random number.
        top = np.asarray([x.argmax()])
        lead = float(gumbel(random_bits(top, row.seed, row.position, purpose))[0])
        ids = np.flatnonzero((x - best) * inverse >= np.float32(lead - GUMBEL_MAX))
    ids = np.sort(ids)
    noise = gumbel(random_bits(ids, row.seed, row.position, purpose))
    return int(ids[((x[ids] - best) * inverse + noise).argmax()])


def log_probabilities(x: FloatArray, token: int, count: int) -> tuple[float, IntArray, FloatArray]:
    """Natural log probability of `token` and of the `count` best ids of raw logits x [V], floored."""
    x = sanitize(x)
    best = x.max()
    norm = np.float32(best + np.log(np.exp(x - best).sum(dtype=np.float64)))
    top = largest(x, min(count, x.size)) if count else np.empty(0, dtype=np.int64)
    floor = np.float32(LOGPROB_FLOOR)
    return float(max(x[token] - norm, floor)), top, np.maximum(x[top] - norm, floor)


def sample_row(x: FloatArray, row: SamplingRow, edit: RowEdit | None, purpose: Purpose) -> int:
    """Edit, filter and draw one raw row x [V]."""
    edited = sanitize(x)
    if edit is not None:
        edited = sanitize(apply_edit(edited, edit))
    return draw(edited, row, purpose)
