"""A record's model with synthetic weights."""

from __future__ import annotations

from slimserve.errors import RefusalError
from slimserve.profiles.record import ProfileRecord
from slimserve.weights.synthetic import SyntheticModel

SYNTHETIC = "synthetic"
"""The one value of --weights."""


def synthetic_model(record: ProfileRecord, seed: int = 0) -> SyntheticModel:
    """What to make for a record; RefusalError where it does not hold config and format map."""
    model = record.model
    if not model.config or not model.formats:
        raise RefusalError(
            f"{record.name} cannot have synthetic weights: its record holds no "
            f"{'format map' if model.config else 'config'}"
        )
    return SyntheticModel(record.name, model.config, model.formats, model.present, seed)
