"""A record's model with synthetic weights."""

from __future__ import annotations

from slimserve.errors import RefusalError, UsageError
from slimserve.profiles.record import ProfileRecord
from slimserve.profiles.resolve import ResolvedProfile
from slimserve.weights.synthetic import SyntheticModel

SYNTHETIC = "synthetic"
"""The one value of --weights."""

SYNTHETIC_NAME = "synthetic-weights"
"""How the served name of such a model ends."""


def weights_of(served_name: str) -> str:
    """What a report says of the weights behind a served name: "synthetic weights", or nothing."""
    return "synthetic weights" if served_name.endswith(SYNTHETIC_NAME) else ""


def weights_label(served_name: str) -> str:
    """The same in brackets, to stand behind the name."""
    return f" [{weights_of(served_name)}]" if weights_of(served_name) else ""


def synthetic_model(record: ProfileRecord, seed: int = 0) -> SyntheticModel:
    """What to make for a record; RefusalError where it does not hold config and format map."""
    model = record.model
    if not model.config or not model.formats:
        raise RefusalError(
            f"{record.name} cannot have synthetic weights: its record holds no "
            f"{'format map' if model.config else 'config'}"
        )
    return SyntheticModel(record.name, model.config, model.formats, model.present, seed)


def synthetic_of(resolved: ResolvedProfile, weights: str | None) -> SyntheticModel | None:
    """What --weights asks to make in place of a profile's files; None where it is not given.

    Raises UsageError for another value, or where a model of one's own is given.
    """
    if weights is None:
        return None
    if weights != SYNTHETIC:
        raise UsageError(f"--weights {weights!r} is not known; the only value is {SYNTHETIC}")
    if resolved.record is None or resolved.path is not None:
        raise UsageError("--weights synthetic makes the weights of a profile; leave out --model")
    return synthetic_model(resolved.record)
