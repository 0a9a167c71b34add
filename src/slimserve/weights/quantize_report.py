"""What a quantization did, and how it tells its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from slimserve.weights.imatrix import Importances

Progress = Callable[[str, int, int], None]
"""Called with (tensor name, work done, work in all) before each tensor."""


@dataclass(slots=True)
class QuantizeReport:
    """What was done: formats with tensor counts, bytes before and after, weights without importances."""

    formats: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    without_importance: list[str] = field(default_factory=list)

    def importance_of(self, importances: Importances, name: str) -> torch.Tensor | None:
        """The importances of a weight; notes the weight where others have some and it has none."""
        found = importances.get(name)
        if importances and found is None:
            self.without_importance.append(name)
        return found

    def count(self, name: str, num_bytes: int) -> None:
        """Add one tensor of format `name`."""
        self.formats[name] = self.formats.get(name, 0) + 1
        self.bytes_out += num_bytes
