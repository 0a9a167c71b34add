"""Which quantization each weight of a safetensors checkpoint uses, and how it becomes a PackedTensor.

The tensors decide, per weight: a packed tensor and the scales beside it have only one reading. config.json must
not contradict them. Every scale becomes a multiplier here, once; activation and KV scales are listed apart.

Name suffixes and conventions: compressed-tensors (`weight_packed`, `weight_scale`, `weight_global_scale`, a divisor),
ModelOpt (`weight`, `weight_scale`, `weight_scale_2`, a multiplier), block FP8 (`weight_scale_inv`, a multiplier despite
its name), GPTQ and AutoRound (`qweight`, `qzeros`, `scales`, `g_idx`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any

import torch

from slimserve.errors import FormatError, RefusalError
from slimserve.quant.decode_scaled import SCALE_BLOCK
from slimserve.quant.formats import E2M1_G16, F8_E4M3, INT4
from slimserve.quant.scales import check_scale, check_unset_rows
from slimserve.quant.tensor import BlockFormat, PackedTensor

ReadTensor = Callable[[str], torch.Tensor]
Shape = tuple[int, ...]

KNOWN_METHODS = ("compressed-tensors", "modelopt", "modelopt_fp4", "fp8", "gptq", "auto-round", "intel/auto-round")
"""Values of `quantization_config.quant_method` whose tensors are understood."""

NVFP4_GROUP = 16
_SYMMETRIC_ZEROS = (0x77777777, -0x77777778)
"""Eight stored zero points as int32: 7 each (GPTQ version 1 stores value - 1) or 8 each (version 2)."""


_LARGEST_FP8_SCALE = 16.0
"""A multiplier amax / 448 of real weights is far below; its inverse, stored by mistake, is far above."""


class SchemeKind(Enum):
    """How a weight is stored."""

    NVFP4_COMPRESSED = "nvfp4 (compressed-tensors)"
    NVFP4_MODELOPT = "nvfp4 (ModelOpt)"
    FP8_TENSOR = "fp8 per tensor"
    FP8_CHANNEL = "fp8 per channel"
    FP8_BLOCK = "fp8 per 128 x 128 block"
    INT4_COMPRESSED = "int4 (compressed-tensors)"
    INT4_GPTQ = "int4 (GPTQ layout)"


@dataclass(frozen=True, slots=True)
class Stored:
    """What a container's header says about a tensor: shape and safetensors dtype name."""

    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One quantized weight: logical name and shape, and the stored tensors that make it."""

    name: str
    kind: SchemeKind
    format: BlockFormat
    shape: Shape
    data: str
    scale: str
    global_scale: str | None = None
    zero_point: str | None = None
    group_index: str | None = None
    stated_shape: str | None = None


@dataclass(frozen=True, slots=True)
class SchemeTable:
    """All tensors of a checkpoint as a model sees them.

    shapes: logical name -> shape, plain tensors included; weights: the quantized ones; activation_scales and
    kv_scales: stored names of scales that belong to activations and to the KV cache (not applied to weights).
    """

    shapes: dict[str, Shape]
    weights: dict[str, WeightScheme]
    activation_scales: tuple[str, ...] = ()
    kv_scales: tuple[str, ...] = ()

    def kinds(self) -> dict[SchemeKind, int]:
        """How many weights have each scheme."""
        counts: dict[SchemeKind, int] = {}
        for weight in self.weights.values():
            counts[weight.kind] = counts.get(weight.kind, 0) + 1
        return counts


@dataclass(slots=True)
class _Detector:
    """Walks the stored tensors; `used` holds the side tensors that found their weight."""

    stored: Mapping[str, Stored]
    used: set[str] = field(default_factory=set)

    def side(self, owner: str, *names: str) -> str:
        """The first of `names` that exists; FormatError naming `owner` when none does."""
        for name in names:
            if name in self.stored:
                self.used.add(name)
                return name
        raise FormatError(f"tensor {owner!r}: its scale {names[0]!r} is missing")

    def optional(self, name: str) -> str | None:
        if name not in self.stored:
            return None
        self.used.add(name)
        return name

    def weight_of(self, name: str, info: Stored) -> WeightScheme | None:
        """The quantized weight whose data is `name`, or None for a plain or side tensor."""
        if name.endswith("_packed"):
            return self._packed(name, info)
        if name.endswith(".qweight"):
            return self._gptq(name, info)
        if info.dtype == "U8" and f"{name}_scale" in self.stored:
            return self._nvfp4(name, name, info, SchemeKind.NVFP4_MODELOPT, self.optional(f"{name}_scale_2"))
        if info.dtype == "F8_E4M3" and not _is_side(name):
            return self._fp8(name, info)
        return None

    def _packed(self, name: str, info: Stored) -> WeightScheme:
        base = name.removesuffix("_packed")
        if info.dtype == "U8":
            scale = self.optional(f"{base}_global_scale")
            if scale is None:
                raise FormatError(f"tensor {name!r}: its scale {base + '_global_scale'!r} is missing")
            return self._nvfp4(base, name, info, SchemeKind.NVFP4_COMPRESSED, scale)
        if info.dtype == "I32":
            return self._int4_compressed(base, name, info)
        raise RefusalError(f"tensor {name!r}: packed weights of dtype {info.dtype} are not supported")

    def _nvfp4(self, base: str, name: str, info: Stored, kind: SchemeKind, global_scale: str | None) -> WeightScheme:
        if len(info.shape) < 2:
            raise FormatError(f"tensor {name!r} has shape {list(info.shape)}, expected a matrix")
        shape = (*info.shape[:-1], info.shape[-1] * 2)
        scale = self.side(name, f"{base}_scale")
        found, groups = self.stored[scale], shape[-1] // NVFP4_GROUP
        if found.dtype != "F8_E4M3":
            raise RefusalError(f"tensor {scale!r} has dtype {found.dtype}; 4-bit floats need F8_E4M3 group scales")
        self._expect(scale, (*shape[:-1], groups), shape[-1] % NVFP4_GROUP == 0)
        return WeightScheme(base, kind, E2M1_G16, shape, name, scale, global_scale)

    def _int4_compressed(self, base: str, name: str, info: Stored) -> WeightScheme:
        shape = (*info.shape[:-1], info.shape[-1] * 8)
        scale = self.side(name, f"{base}_scale")
        groups = self.stored[scale].shape[-1] if self.stored[scale].shape else 0
        self._expect(scale, (*shape[:-1], groups), bool(groups) and shape[-1] % groups == 0)
        if self.optional(f"{base}_zero_point") is not None:
            raise RefusalError(f"tensor {name!r} is quantized with zero points; only symmetric int4 is supported")
        kind, index, stated = SchemeKind.INT4_COMPRESSED, f"{base}_g_idx", f"{base}_shape"
        order, size = self.optional(index), self.optional(stated)
        return WeightScheme(base, kind, INT4, shape, name, scale, group_index=order, stated_shape=size)

    def _gptq(self, name: str, info: Stored) -> WeightScheme:
        module = name.removesuffix(".qweight")
        if info.dtype != "I32" or len(info.shape) != 2:
            raise FormatError(f"tensor {name!r} is {info.dtype} {list(info.shape)}, expected an I32 matrix")
        columns, rows = info.shape[0] * 8, info.shape[1]
        scale = self.side(name, f"{module}.scales")
        groups = self.stored[scale].shape[0] if self.stored[scale].shape else 0
        self._expect(scale, (groups, rows), bool(groups) and columns % groups == 0)
        zeros, index = self.optional(f"{module}.qzeros"), self.optional(f"{module}.g_idx")
        kind, logical = SchemeKind.INT4_GPTQ, f"{module}.weight"
        return WeightScheme(logical, kind, INT4, (rows, columns), name, scale, zero_point=zeros, group_index=index)

    def _fp8(self, name: str, info: Stored) -> WeightScheme:
        scale = self.side(name, f"{name}_scale_inv", f"{name}_scale")
        found, rank = self.stored[scale].shape, len(info.shape)
        if rank < 2:
            raise FormatError(f"tensor {name!r} has shape {list(info.shape)}, expected a matrix")
        lead, rows, columns = info.shape[:-2], info.shape[-2], info.shape[-1]
        blocks = (*lead, ceil(rows / SCALE_BLOCK), ceil(columns / SCALE_BLOCK))
        if found in ((), (1,), lead, (*lead, 1)):
            kind = SchemeKind.FP8_TENSOR
        elif found in ((*lead, rows, 1), (*lead, rows)) and not scale.endswith("_inv"):
            kind = SchemeKind.FP8_CHANNEL
        elif found == blocks:
            kind = SchemeKind.FP8_BLOCK
        else:
            expected = f"[1], {[*lead, rows, 1]} or {list(blocks)}"
            raise FormatError(f"tensor {scale!r} has shape {list(found)}; a weight {list(info.shape)} needs {expected}")
        return WeightScheme(name, kind, F8_E4M3, info.shape, name, scale)

    def _expect(self, name: str, shape: Shape, possible: bool = True) -> None:
        if not possible or self.stored[name].shape != shape:
            raise FormatError(f"tensor {name!r} has shape {list(self.stored[name].shape)}, expected {list(shape)}")


_ACTIVATION_SUFFIXES = (".input_scale", ".input_global_scale", ".output_scale")
_KV_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
_SIDE_SUFFIXES = ("_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_g_idx", "_shape")
_GPTQ_SIDES = (".scales", ".qzeros", ".g_idx")


def _is_side(name: str) -> bool:
    stem = name.rpartition(".")[2]
    return any(stem.endswith(suffix) for suffix in _SIDE_SUFFIXES) or name.endswith(_GPTQ_SIDES)


def detect(stored: Mapping[str, Stored], config: Mapping[str, Any] | None = None) -> SchemeTable:
    """Find the scheme of every weight from the stored tensors, and check config.json against them.

    Raises FormatError naming a tensor whose scales are missing, orphaned or misshaped, RefusalError for a method
    or variant that is not supported.
    """
    quantization = _quantization_config(config or {})
    detector = _Detector(stored)
    weights: dict[str, WeightScheme] = {}
    for name, info in stored.items():
        scheme = detector.weight_of(name, info)
        if scheme is None:
            continue
        if scheme.name in weights or (scheme.name != name and scheme.name in stored):
            raise FormatError(f"weight {scheme.name!r} is stored twice, packed and plain")
        weights[scheme.name] = scheme
    data = {scheme.data for scheme in weights.values()}
    shapes, activations, kv = {name: scheme.shape for name, scheme in weights.items()}, [], []
    for name, info in stored.items():
        if name in data or name in detector.used:
            continue
        if name.endswith(_ACTIVATION_SUFFIXES):
            activations.append(name)
        elif name.endswith(_KV_SUFFIXES):
            kv.append(name)
        elif weights and _is_orphan(name, stored):
            raise FormatError(f"tensor {name!r} is a scale without a quantized weight beside it")
        else:
            shapes[name] = info.shape
    _check_config(quantization, weights)
    return SchemeTable(shapes, weights, tuple(activations), tuple(kv))


def _is_orphan(name: str, stored: Mapping[str, Stored]) -> bool:
    """A `weight_*` side tensor, or a GPTQ one, that no quantized weight claimed."""
    for suffix in _SIDE_SUFFIXES:
        if name.endswith(f".weight{suffix}"):
            return True
    return name.endswith((".qzeros", ".g_idx"))


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(found, Mapping):
        raise FormatError("config.json: quantization_config is not an object")
    method = found.get("quant_method")
    if found and method is not None and method not in KNOWN_METHODS:
        raise RefusalError(f"quantization method {method!r} is not supported; supported are {', '.join(KNOWN_METHODS)}")
    return found


def _check_config(quantization: Mapping[str, Any], weights: Mapping[str, WeightScheme]) -> None:
    """Refuse what the tensors cannot show: other bit widths, asymmetric or re-ordered int4, other FP8 blocks."""
    int4 = next((w for w in weights.values() if w.format is INT4), None)
    if int4 is not None and quantization.get("quant_method") != "compressed-tensors":
        bits, symmetric = quantization.get("bits", 4), quantization.get("sym", True)
        packing = str(quantization.get("packing_format", "")) + str(quantization.get("checkpoint_format", ""))
        if "awq" in packing or "marlin" in packing:
            raise RefusalError(f"{int4.name!r}: packing {packing!r} is not supported; only the GPTQ layout")
        if bits != 4 or symmetric is not True:
            raise RefusalError(f"{int4.name!r}: {bits}-bit, sym={symmetric} int weights are not supported (4, true)")
    block = quantization.get("weight_block_size")
    if block is not None and list(block) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise RefusalError(f"FP8 blocks of {block} are not supported; only {SCALE_BLOCK} x {SCALE_BLOCK}")
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        stated = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(stated, Mapping):
            continue
        bits, kind = stated.get("num_bits"), stated.get("type", "int")
        if (bits, kind) not in ((4, "float"), (8, "float"), (4, "int")) or stated.get("symmetric") is False:
            title = f"{bits}-bit {kind}, symmetric={stated.get('symmetric')}"
            raise RefusalError(f"config.json: quantization group {name!r} ({title}) is not supported")


def build(scheme: WeightScheme, read: ReadTensor) -> PackedTensor:
    """Make the packed tensor of one weight from its stored tensors; checks every scale.

    FP8 and NVFP4 data are views of what `read` returns; GPTQ data are transposed to [N, K/2] (the same bits).
    Raises FormatError naming the tensor whose scale is not finite, negative, unset or of the other convention.
    """
    if scheme.format is INT4:
        return _build_int4(scheme, read)
    if scheme.format is E2M1_G16:
        return _build_nvfp4(scheme, read)
    data, scale = read(scheme.data), read(scheme.scale).to(torch.float32)
    check_scale(scheme.scale, scale)
    if bool((scale > _LARGEST_FP8_SCALE).all()):
        found = float(scale.flatten()[0])
        raise FormatError(f"scale {scheme.scale!r} is {found:g}, too large for a multiplier (amax / 448): a divisor?")
    if scheme.kind is SchemeKind.FP8_CHANNEL:
        scale = scale.reshape(*scheme.shape[:-1], 1)
        check_unset_rows(scheme.scale, scale, data.view(torch.uint8), 0x7F)
    elif scheme.kind is SchemeKind.FP8_TENSOR:
        lead = scheme.shape[:-2]
        scale = scale.reshape(*lead, 1) if scale.numel() > 1 else scale.reshape(1)
        if bool((scale == 0).any()):
            raise FormatError(f"scale {scheme.scale!r} is zero, that is unset")
    return PackedTensor(F8_E4M3, scheme.shape, data, scheme.name, {"weight_scale": scale})


def _build_nvfp4(scheme: WeightScheme, read: ReadTensor) -> PackedTensor:
    data, scale = read(scheme.data), read(scheme.scale)
    check_scale(scheme.scale, scale)
    check_unset_rows(scheme.scale, scale, data, 0x77)
    scales = {"weight_scale": scale}
    if scheme.global_scale is not None:
        scales["global_scale"] = _global_multiplier(scheme, read(scheme.global_scale))
    return PackedTensor(E2M1_G16, scheme.shape, data, scheme.name, scales)


def _global_multiplier(scheme: WeightScheme, stored: torch.Tensor) -> torch.Tensor:
    """The per-tensor scale as a multiplier: about amax / (448 * 6), so well below one in either convention."""
    name = scheme.global_scale or ""
    value = stored.to(torch.float32)
    check_scale(name, value)
    lead = scheme.shape[:-2]
    if value.numel() != 1 and value.numel() != torch.Size(lead).numel():
        raise FormatError(f"scale {name!r} has shape {list(stored.shape)}, expected one value per matrix")
    if bool((value == 0).any()):
        raise FormatError(f"scale {name!r} is zero, that is unset")
    divisor = scheme.kind is SchemeKind.NVFP4_COMPRESSED
    multiplier = 1.0 / value if divisor else value
    if bool((multiplier > 1.0).any()) or not bool(torch.isfinite(multiplier).all()):
        found, kind = float(value.flatten()[0]), "divisor, at least 1" if divisor else "multiplier, at most 1"
        raise FormatError(f"scale {name!r} is {found:g} but {scheme.kind.value} stores a {kind}; is it the other kind?")
    return multiplier.reshape(*lead, 1) if multiplier.numel() > 1 else multiplier.reshape(1)


def _build_int4(scheme: WeightScheme, read: ReadTensor) -> PackedTensor:
    words, scale = read(scheme.data), read(scheme.scale)
    check_scale(scheme.scale, scale)
    if scheme.kind is SchemeKind.INT4_GPTQ:
        words, scale = words.t().contiguous(), scale.t().contiguous()
    if scheme.zero_point is not None:
        zeros = read(scheme.zero_point)
        if not any(bool((zeros == word).all()) for word in _SYMMETRIC_ZEROS):
            raise RefusalError(f"tensor {scheme.zero_point!r} holds zero points other than 8; only symmetric int4")
    if scheme.stated_shape is not None:
        stated = tuple(int(extent) for extent in read(scheme.stated_shape).tolist())
        if stated != scheme.shape:
            raise FormatError(f"tensor {scheme.stated_shape!r} says {list(stated)}, the data says {list(scheme.shape)}")
    if scheme.group_index is not None:
        columns, groups = scheme.shape[-1], scale.shape[-1]
        expected = torch.arange(columns) // (columns // groups)
        if not torch.equal(read(scheme.group_index).to(torch.int64).reshape(-1), expected):
            raise RefusalError(f"tensor {scheme.group_index!r} re-orders columns (desc_act), which is not supported")
    data = words.contiguous().view(torch.uint8)  # [..., K / 2]
    check_unset_rows(scheme.scale, scale, data ^ 0x88, 0xFF)
    return PackedTensor(INT4, scheme.shape, data, scheme.name, {"weight_scale": scale})
