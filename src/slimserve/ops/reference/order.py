"""Reductions whose order is a function of the length alone.

torch's own sums may split a reduction by thread count and number of outputs, so a row's bits could depend on how
many rows stand beside it; these references are also served where no kernel is built, and must not.
"""

from __future__ import annotations

import torch


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: element i is added to element i + n // 2 until one is left."""
    total = values
    while (count := total.shape[-1]) > 1:
        half = count // 2
        folded = total[..., :half] + total[..., half : 2 * half]
        total = torch.cat((folded, total[..., 2 * half :]), dim=-1) if count % 2 else folded
    return total[..., 0]
