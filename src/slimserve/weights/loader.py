"""Loading a model from any container: every parameter filled, every tensor of the file accounted for.

This is the one module of its floor that stands above models/: it reads a container, asks the registry for the
architecture, fills the parameter table and builds the forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch

from slimserve.errors import FormatError
from slimserve.models.contract import Model, ModelConfig, ParameterSpec, Role
from slimserve.models.parameters import MadeTensor, Parameters
from slimserve.models.registry import Architecture, find_drafter, find_gguf, find_hf
from slimserve.ops import NumericsConfig
from slimserve.quant.decode import dequantize
from slimserve.quant.scales import check_weight
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.sidecar import with_sidecar
from slimserve.weights.source import Container, Source, open_source
from slimserve.weights.transforms import RULES, plain_float32

SCANNED_ROLES = (Role.NORM, Role.BIAS, Role.SMALL, Role.ROUTER, Role.CONV)
"""Small tensors that are searched for NaN and infinity: one bad value there spoils every token."""

FINGERPRINT_SAMPLE = 4096
"""Bytes hashed at the start, the middle and the end of every tensor."""

Progress = Callable[[int, int], None]
"""Called with (bytes prepared so far, bytes in all)."""


@dataclass(frozen=True, slots=True)
class FamilyBytes:
    """Bytes of one family of parameters in one storage format."""

    role: Role
    format: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is known about where it came from.

    `source` holds path, container, metadata (GGUF keys or config.json) for tokenizer and templates.
    `fingerprint` names these weights in cache keys. `kernels` maps each prepared weight to its kernel's name.
    `memory` counts bytes as stored, `resident_bytes` what kernels hold (mapped weights included) after relayout.
    """

    model: Model
    config: ModelConfig
    architecture: Architecture
    source: Source
    numerics: NumericsConfig
    device: torch.device
    fingerprint: str
    memory: tuple[FamilyBytes, ...]
    resident_bytes: int
    kernels: Mapping[str, str]
    ignored: tuple[str, ...]


@dataclass(slots=True)
class _Assignment:
    """Which file tensors fill which parameter, and everything that does not fit."""

    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    numerics: NumericsConfig | None = None,
    progress: Progress | None = None,
    sidecar: str | Path | None = None,
    drafter: bool = False,
) -> LoadedModel:
    """Load the model at `path`: a GGUF file (or the first of a set), a safetensors file, or a model folder.

    `sidecar` is a file of `slimserve quantize --swap` whose tensors take the place of the model's own. `drafter`: the
    files hold a drafter for another model, and `model` of the result is not a Model. On the CPU packed weights stay in
    the file's memory mapping wherever the kernel reads that layout. Raises FormatError naming tensors that
    are missing, extra, misshaped or not finite; RefusalError naming an architecture, configuration feature or format
    that is not supported; UsageError for a path that is no model.
    """
    source = open_source(Path(path))
    if sidecar is not None:
        source = replace(source, packed=with_sidecar(source.shapes, source.packed, Path(sidecar)))
    return load_source(source, device=device, numerics=numerics, progress=progress, drafter=drafter)


def load_source(
    source: Source,
    *,
    device: torch.device | str = "cpu",
    numerics: NumericsConfig | None = None,
    progress: Progress | None = None,
    drafter: bool = False,
) -> LoadedModel:
    """Load the model of an opened container; see `load_model`. One parameter at a time where tensors are made."""
    architecture, config = read_config(source, drafter=drafter)
    target = torch.device(device)
    chosen = numerics or default_numerics(target)
    specs = config.parameters()
    assignment = _assign(specs, source, architecture)
    _raise_unless_complete(source, assignment)
    held = [(spec, assignment.sources[spec.name]) for spec in specs if spec.name in assignment.sources]
    families = _Families()
    tensors: dict[str, PackedTensor | MadeTensor] = {}
    for spec, names in held:
        if source.identity:
            tensors[spec.name] = MadeTensor(partial(_made, spec, source, names, families))
        else:
            tensors[spec.name] = families.count(spec, _parameter(spec, source, names))
    total = sum(tensor.num_bytes for tensor in tensors.values() if isinstance(tensor, PackedTensor))
    parameters = Parameters(
        tensors, device=target, numerics=chosen, progress=progress, total_bytes=total or source.num_bytes
    )
    del tensors
    model = architecture.build(config, parameters)
    parameters.finish()
    weights_name = source.identity or fingerprint(source)
    source.forget_pages()
    return LoadedModel(
        model=model,
        config=config,
        architecture=architecture,
        source=source,
        numerics=chosen,
        device=target,
        fingerprint=weights_name,
        memory=families.listed(specs),
        resident_bytes=parameters.resident_bytes,
        kernels={name: weight.kernel for name, weight in parameters.prepared.items()},
        ignored=tuple(assignment.ignored),
    )


def default_numerics(device: torch.device) -> NumericsConfig:
    """float32 activations on the CPU, bfloat16 elsewhere."""
    return NumericsConfig() if device.type == "cpu" else NumericsConfig(activation_dtype=torch.bfloat16)


def read_config(source: Source, *, drafter: bool = False) -> tuple[Architecture, ModelConfig]:
    """The architecture and the config of an opened container; raises RefusalError or FormatError."""
    if drafter:
        architecture = find_drafter(source.architecture_name())
        read = architecture.from_gguf if source.container is Container.GGUF else architecture.from_hf
        return architecture, read(source.metadata, source.shapes)
    if source.container is Container.GGUF:
        architecture = find_gguf(source.architecture_name())
        return architecture, architecture.from_gguf(source.metadata, source.shapes)
    architecture = find_hf(source.metadata)
    return architecture, architecture.from_hf(source.metadata, source.shapes)


def names_of(spec: ParameterSpec, container: Container) -> tuple[tuple[str, ...], str, int]:
    """(tensors of the container that make the parameter, transform kind, its argument)."""
    gguf = container is Container.GGUF
    name = spec.gguf_name if gguf else spec.hf_name
    transform = spec.gguf_transform if gguf else spec.hf_transform
    if transform.kind == "stack_experts":
        return tuple(name.format(expert=expert) for expert in range(transform.argument)), "none", 0
    return (name,), transform.kind, transform.argument


def _assign(specs: Sequence[ParameterSpec], source: Source, architecture: Architecture) -> _Assignment:
    """Match the parameter table with the file by name and shape, before any data is read."""
    result = _Assignment()
    for spec in specs:
        names, kind, argument = names_of(spec, source.container)
        absent = [name for name in names if name not in source.shapes]
        if absent:
            if not spec.optional or len(absent) < len(names):
                result.missing += [name or f"(parameter {spec.name})" for name in absent]
            continue
        own_shape = spec.shape[1:] if len(names) > 1 else spec.shape
        expected = RULES[kind].source_shape(own_shape, argument)
        for name in names:
            if source.shapes[name] != expected:
                found = "x".join(map(str, source.shapes[name])) or "a scalar"
                result.misshaped.append(f"{name} is {found}, expected {'x'.join(map(str, expected))}")
        result.sources[spec.name] = names
    used = {name for names in result.sources.values() for name in names}
    patterns = architecture.ignored_gguf if source.container is Container.GGUF else architecture.ignored_hf
    for name in source.shapes:
        if name in used or name in result.missing:
            continue
        ignored = any(fnmatchcase(name, pattern) for pattern in patterns)
        (result.ignored if ignored else result.extra).append(name)
    return result


def _raise_unless_complete(source: Source, assignment: _Assignment) -> None:
    complaints = []
    for word, names in (
        ("missing", assignment.missing),
        ("misshaped", assignment.misshaped),
        ("not part of this architecture", assignment.extra),
    ):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            complaints.append(f"{len(names)} {word}: {', '.join(names[:4])}{more}")
    if complaints:
        raise FormatError(f"{source.path}: the tensors do not fit the configuration; {'; '.join(complaints)}")


def _parameter(spec: ParameterSpec, source: Source, names: tuple[str, ...]) -> PackedTensor:
    """Read, transform and check one parameter."""
    _, kind, argument = names_of(spec, source.container)
    parts = [RULES[kind].apply(source.packed(name), argument) for name in names]
    tensor = parts[0] if len(parts) == 1 and len(spec.shape) == len(parts[0].shape) else _stack(parts)
    if spec.keep is torch.float32 and tensor.data.dtype is not torch.float32:
        tensor = plain_float32(tensor, dequantize(tensor, torch.float32))
    if spec.role in SCANNED_ROLES:
        _check_finite(tensor)
    elif not source.identity:
        check_weight(tensor)
    return tensor


def _stack(parts: Sequence[PackedTensor]) -> PackedTensor:
    """[N, K] tensors of one format as one [E, N, K] tensor."""
    first = parts[0]
    for part in parts:
        if part.format.name != first.format.name:
            raise FormatError(
                f"tensors {first.name} ({first.format.name}) and {part.name} ({part.format.name}) must share a format"
            )
    scales = {key: torch.stack([part.scales[key] for part in parts]) for key in first.scales}
    data = torch.stack([part.data for part in parts])
    return PackedTensor(first.format, (len(parts), *first.shape), data, first.name, scales)


def _check_finite(tensor: PackedTensor) -> None:
    values = dequantize(tensor, torch.float32).flatten()
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        raise FormatError(f"tensor {tensor.name} holds {values[index].item()} at element {index}; the file is damaged")


def _made(spec: ParameterSpec, source: Source, names: tuple[str, ...], families: _Families) -> PackedTensor:
    return families.count(spec, _parameter(spec, source, names))


class _Families:
    """Counts bytes per (role, format) as parameters come."""

    def __init__(self) -> None:
        self._table: dict[tuple[Role, str], tuple[int, int]] = {}

    def count(self, spec: ParameterSpec, tensor: PackedTensor) -> PackedTensor:
        """Count a parameter and hand it on."""
        count, size = self._table.get((spec.role, tensor.format.name), (0, 0))
        self._table[(spec.role, tensor.format.name)] = (count + 1, size + tensor.num_bytes)
        return tensor

    def listed(self, specs: Sequence[ParameterSpec]) -> tuple[FamilyBytes, ...]:
        """All families, in the order in which the table names their roles, then by format."""
        order = {role: place for place, role in enumerate(dict.fromkeys(spec.role for spec in specs))}
        entries = sorted(self._table.items(), key=lambda entry: (order[entry[0][0]], entry[0][1]))
        return tuple(FamilyBytes(role, name, count, size) for (role, name), (count, size) in entries)


def fingerprint(source: Source) -> str:
    """A hash that names these weights: metadata, tensor names, formats and shapes, and sampled bytes of each tensor."""
    digest = hashlib.sha256(b"slimserve weights 1")
    digest.update(source.container.value.encode())
    digest.update(source.header_digest())
    for name in sorted(source.shapes):
        tensor = source.packed(name)
        digest.update(f"\0{name}\0{tensor.format.name}\0{tensor.shape}\0".encode())
        for part in (tensor.data, *(tensor.scales[key] for key in sorted(tensor.scales))):
            flat = part.contiguous().reshape(-1).view(torch.uint8)
            size = flat.numel()
            for start in sorted({0, size // 2, max(size - FINGERPRINT_SAMPLE, 0)}):
                digest.update(flat[start : start + FINGERPRINT_SAMPLE].numpy().tobytes())
    return digest.hexdigest()
