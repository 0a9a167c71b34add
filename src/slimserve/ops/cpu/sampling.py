"""Which tokens a Gumbel draw over a whole vocabulary can choose, found in one fast pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slimserve.ops.cpu.library import load_or_warn

_ROOM = 256


def gumbel_candidates(
    x: npt.NDArray[np.float32], inverse: float, seed: int, position: int, purpose: int
) -> npt.NDArray[np.int64] | None:
    """Ids, ascending, whose (x - max x) * inverse + Gumbel draw may be the largest of x [V] float32.

    The caller decides among them in the reference arithmetic of `ops.reference.random`, whose draws these are, so
    the token chosen does not depend on this function. None where the library is not built, or the candidates are
    more than a few hundred (equal logits in masses).
    """
    library = load_or_warn()
    if library is None:
        return None
    x = np.ascontiguousarray(x, dtype=np.float32)
    ids = np.empty(_ROOM, dtype=np.int64)
    count = library.slim_gumbel_candidates(
        x.ctypes.data,
        x.size,
        float(x.max()),
        inverse,
        seed & 0xFFFFFFFFFFFFFFFF,
        position,
        purpose,
        ids.ctypes.data,
        _ROOM,
    )
    return ids[:count] if count >= 0 else None
