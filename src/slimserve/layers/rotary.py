"""Rotary position embedding: the frequencies of each scaling, and the layer that applies them in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from slimserve import ops


class RopeKind(Enum):
    """How the base frequencies are changed; every kind is a function of the dimension alone, never of a length."""

    PLAIN = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """One rotary embedding: theta and rotary_dim give the base frequencies, the rest changes them.

    `factor` divides frequencies (linear), those of long wavelength (llama3), or those below the ramp (yarn).
    `attention_factor` multiplies cosine and sine (yarn; None: 0.1 ln(factor) + 1).
    Sources: RoPE arXiv:2104.09864, interpolation arXiv:2306.15595, YaRN arXiv:2309.00071, Llama 3 arXiv:2407.21783.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def scale(self) -> float:
        """The multiplier of cosine and sine."""
        if self.kind is not RopeKind.YARN:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def inverse_frequencies(self) -> torch.Tensor:
        """Angle per position for each pair of dimensions: float32 [rotary_dim / 2], on the CPU."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        plain = 1.0 / (self.theta**exponents)
        if self.kind is RopeKind.LINEAR:
            return plain / self.factor
        if self.kind is RopeKind.LLAMA3:
            return self._llama3(plain)
        if self.kind is RopeKind.YARN:
            return self._yarn(plain)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        turns = self.original_context * plain / (2 * math.pi)  # turns over the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * plain / self.factor + blend * plain
        return torch.where(
            turns < self.low_freq_factor,
            plain / self.factor,
            torch.where(turns > self.high_freq_factor, plain, blended),
        )

    def _yarn(self, plain: torch.Tensor) -> torch.Tensor:
        def dimension_of(turns: float) -> float:
            return (
                self.rotary_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            )

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


class Rotary:
    """Rotates heads in place by their tokens' absolute positions.

    Pairs are dimension i with i + rotary_dim / 2, or neighbours where `interleaved`. `factors` [rotary_dim / 2]
    are a file's own divisors of the frequencies. `sections` (pairs of time, height and width) turn pair
    i by the axis i mod 3 while that axis has pairs left, and by time after that (Qwen3-VL's interleaved M-RoPE).
    """

    def __init__(
        self,
        settings: RopeSettings,
        device: torch.device,
        *,
        factors: torch.Tensor | None = None,
        interleaved: bool = False,
        sections: Sequence[int] = (),
    ) -> None:
        frequencies = settings.inverse_frequencies()
        if factors is not None:
            frequencies = frequencies / factors.to("cpu", torch.float32)
        self.inv_freq = frequencies.to(device)
        self.rotary_dim = settings.rotary_dim
        self.scale = settings.scale()
        self.interleaved = interleaved
        # Frequencies of one axis each, zero elsewhere: a turn by zero changes no bit.
        self.of_axis = [self.inv_freq * mask.to(device) for mask in axis_masks(sections, len(frequencies))]

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate x [T, heads, D] in place by positions [T], or by one row per axis of positions [3, T].

        Equal rows (text) give the bits of one row.
        """
        if positions.dim() == 1:
            self._turn(x, positions, self.inv_freq, self.scale)
            return
        if not self.of_axis or positions.shape[0] != len(self.of_axis):
            raise ValueError(f"positions {tuple(positions.shape)} for a rotary embedding of {len(self.of_axis)} axes")
        for axis, frequencies in enumerate(self.of_axis):
            self._turn(x, positions[axis], frequencies, self.scale if axis == 0 else 1.0)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> None:
        ops.rope(
            x, positions, frequencies, rotary_dim=self.rotary_dim, interleaved=self.interleaved, scale=scale
        )  # fmt: skip


def axis_masks(sections: Sequence[int], num_pairs: int) -> list[torch.Tensor]:
    """Which pairs each of three axes turns: bool [num_pairs] per axis; none where there are no sections."""
    if not sections:
        return []
    pair = torch.arange(num_pairs)
    height, width = ((pair % 3 == axis) & (pair < 3 * sections[axis]) for axis in (1, 2))
    return [~(height | width), height, width]
