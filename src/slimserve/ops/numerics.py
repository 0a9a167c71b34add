"""Which arithmetic a model runs in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Activations(Enum):
    """What CPU matrix products multiply packed weights with."""

    INT8 = "int8"
    FLOAT = "float"


@dataclass(frozen=True, slots=True)
class NumericsConfig:
    """Arithmetic: activation dtype of the device path and of CPU products."""

    activation_dtype: torch.dtype = torch.float32
    cpu_activations: Activations = Activations.INT8
