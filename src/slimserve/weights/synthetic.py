"""Synthetic weights: any architecture at its real geometry in a record's formats, made where they are used.

A synthetic model is a `Source` like a file, except that its tensors are made when they are asked for, from (seed,
tensor name) alone: on a GPU, on the CPU and in a file written by `synthesize` they have the same bits. Values have
the spread of ordinary weights, so that activations stay finite through any number of layers and steps; what such a
model says means nothing. Stands above models/ like the loader.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimserve.errors import UsageError
from slimserve.models import glm5_gguf, qwen3_5_gguf
from slimserve.models.contract import ModelConfig, ParameterSpec, Role
from slimserve.models.format_map import FormatRule, find_rule, parameter_bytes
from slimserve.models.glm5_config import Glm5Config
from slimserve.models.qwen3_5 import Qwen35Config
from slimserve.models.registry import find_hf
from slimserve.quant.formats import F32, find_format
from slimserve.quant.synthetic import RandomBits, random_packed
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.loader import names_of
from slimserve.weights.source import Container, Source
from slimserve.weights.transforms import RULES

FASTEST_DECAY = 16.0
"""Decay rates lie between 1 and this, as linear-attention models are initialised."""


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """What to make: a config.json, tensor names that it counts on being there, a map of formats, and a seed."""

    name: str
    config: Mapping[str, Any]
    rules: tuple[FormatRule, ...]
    present: tuple[str, ...] = ()
    seed: int = 0

    def identity(self) -> str:
        """Names the weights in cache keys."""
        rules = [[rule.match, rule.format, rule.layers, rule.scales] for rule in self.rules]
        content = json.dumps([dict(self.config), rules, list(self.present), self.seed], sort_keys=True)
        return hashlib.sha256(f"slimserve synthetic 1 {content}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Maker:
    """How one tensor of the container is made."""

    spec: ParameterSpec
    rule: FormatRule
    transform: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """A synthetic model laid out as a container; `source(device)` makes its tensors on a device."""

    model: SyntheticModel
    container: Container
    parsed: ModelConfig
    metadata: Mapping[str, Any]
    makers: Mapping[str, _Maker] = field(default_factory=dict)

    def source(self, device: torch.device | str = "cpu") -> Source:
        """What the loader reads."""
        shapes = {name: maker.shape for name, maker in self.makers.items()}
        specs = {maker.spec.name: maker for maker in self.makers.values()}
        num_bytes = sum(parameter_bytes(maker.rule, maker.spec) for maker in specs.values())
        here = Path()
        return Source(
            here, here, self.container, self.metadata, shapes, self.packed(device), num_bytes, None,
            identity=self.model.identity(),
        )  # fmt: skip

    def packed(self, device: torch.device | str) -> Callable[[str], PackedTensor]:
        """Makes the tensor of a name."""
        return partial(self._make, torch.device(device))

    def _make(self, device: torch.device, name: str) -> PackedTensor:
        maker = self.makers[name]
        bits = RandomBits(self.model.seed, name, device)
        fmt = find_format(maker.rule.format)
        if fmt is None:
            raise UsageError(f"format {maker.rule.format!r} of {name} is not known")
        if maker.spec.keep is torch.float32:
            values = _small(maker.spec, maker.transform, maker.shape, bits)
            return PackedTensor(F32, maker.shape, values, name)
        if device.type == "cuda":
            # Nothing may be cut out of what the tensors before this one leave: the rest would be filled with weights.
            torch.cuda.empty_cache()
        spread = 1.0 / sqrt(maker.spec.shape[-1])
        made = random_packed(fmt, maker.shape, spread, bits, scales=maker.rule.scales, name=name)
        if device.type != "cuda":
            return made
        kept = {part: _from_shared(tensor) for part, tensor in {"": made.data, **made.scales}.items()}
        del made
        torch.cuda.empty_cache()
        kept = {part: _apart(tensor, device) for part, tensor in kept.items()}
        return PackedTensor(fmt, maker.shape, kept.pop(""), name, kept)


_SHARED_FROM, _SHARED_BELOW = 1 << 20, 20 << 20
"""torch's CUDA allocator puts tensors of 1 to 10 MiB side by side into segments of 20 MiB, and larger ones into what
is left of these where they fit."""


def _from_shared(made: torch.Tensor) -> torch.Tensor:
    """A tensor of a size that shares segments on the host, so that none of what it was made in stays taken."""
    return made.cpu() if _SHARED_FROM < made.numel() * made.element_size() < _SHARED_BELOW else made


def _apart(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Such a tensor on the device in a segment of its own: what is laid out from it must not lie beside it, or a hole
    of its size stays among the weights, which those of a file, made on the CPU, do not leave."""
    if made.device.type == device.type:
        return made
    size = made.numel() * made.element_size()
    held = torch.empty(_SHARED_BELOW, dtype=torch.uint8, device=device)[:size].view(made.dtype).view(made.shape)
    return held.copy_(made)


def lay_out(model: SyntheticModel) -> SyntheticSource:
    """Which tensors a synthetic model has; nothing is made yet.

    A map of ggml formats only becomes the architecture's GGUF form where this build knows how to write it, any other
    map the safetensors form. Raises UsageError naming a parameter that no rule covers.
    """
    parsed = find_hf(model.config).from_hf(model.config, dict.fromkeys(model.present, ()))
    metadata: Mapping[str, Any] = {**model.config}
    container = Container.SAFETENSORS
    formats = [find_format(rule.format) for rule in model.rules]
    if all(fmt is not None and fmt.type_id is not None for fmt in formats):
        if isinstance(parsed, Glm5Config):
            container, metadata, parsed = Container.GGUF, glm5_gguf.gguf_metadata(parsed), glm5_gguf.gguf_form(parsed)
        elif isinstance(parsed, Qwen35Config):
            metadata = qwen3_5_gguf.gguf_metadata(parsed)
            container, parsed = Container.GGUF, qwen3_5_gguf.gguf_form(parsed)
    if container is Container.GGUF:
        # A file holds floats in single precision: the model made in place must not know them better.
        single = {key: float(np.float32(value)) for key, value in metadata.items() if isinstance(value, float)}
        metadata = {**metadata, **single, "general.name": f"{model.name}, synthetic weights"}
    makers: dict[str, _Maker] = {}
    for spec in parsed.parameters():
        makers |= _makers_of(model, spec, container)
    return SyntheticSource(model, container, parsed, metadata, makers)


def _makers_of(model: SyntheticModel, spec: ParameterSpec, container: Container) -> dict[str, _Maker]:
    if spec.optional and spec.role is Role.HEAD:
        return {}
    names, kind, argument = names_of(spec, container)
    if not all(names):
        return {}
    rule = find_rule(model.rules, spec)
    if rule is None:
        raise UsageError(f"{model.name}: no format rule fits parameter {spec.name}")
    own = spec.shape[1:] if len(names) > 1 else spec.shape
    shape = RULES[kind].source_shape(own, argument)
    return {name: _Maker(spec, rule, kind, shape) for name in names}


def _small(spec: ParameterSpec, transform: str, shape: tuple[int, ...], bits: RandomBits) -> torch.Tensor:
    """A tensor that is held in float32, as its container stores it (before `transform`)."""
    part = spec.name.rpartition(".")[2]
    if part == "decay_rate":
        position = bits.uniform(prod(shape)).view(shape)
        # HF stores A with rate = exp(A); GGUF's llama.cpp form stores -rate.
        if transform == "negative_exp":
            return position * log(FASTEST_DECAY)
        return -1.0 - position * (FASTEST_DECAY - 1.0)
    if part == "dt_bias":
        return bits.uniform(prod(shape)).view(shape) * 4.0 - 6.0
    centre, spread = _centre_and_spread(spec, transform, part)
    values = torch.empty(shape, dtype=torch.float32, device=bits.device)
    return bits.bell(values, spread).add_(centre)


def _centre_and_spread(spec: ParameterSpec, transform: str, part: str) -> tuple[float, float]:
    if spec.role is Role.NORM:
        return (0.0 if transform == "add_one" else 1.0), 0.05
    if spec.role is Role.CONV:
        return 0.0, 0.4
    if spec.role is Role.ROUTER:
        return 0.0, (1.0 / sqrt(spec.shape[-1]) if len(spec.shape) > 1 else 0.01)
    if part in ("base", "ape"):
        return 0.0, 0.5
    if part in ("scale", "rope_factors"):
        return 1.0, 0.05
    return 0.0, 0.02


def check_cover(model: SyntheticModel) -> Sequence[str]:
    """Rules of the map that no parameter of the laid-out model uses; raises UsageError for uncovered parameters."""
    used = {maker.rule for maker in lay_out(model).makers.values()}
    return [rule.match for rule in model.rules if rule not in used]
