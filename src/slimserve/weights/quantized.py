"""A container's tensors as a model names them: quantized weights whole, their scales folded into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimserve.errors import FormatError
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import F8_E4M3, I8, NVFP4
from slimserve.quant.scales import check_scale
from slimserve.quant.schemes import SchemeTable, Stored, build, detect
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.safetensors import SafetensorsFolder


@dataclass(frozen=True, slots=True)
class LogicalTensors:
    """Logical names: `shapes` of all tensors, `packed(name)` builds one; `schemes` says how safetensors weights lie."""

    shapes: dict[str, tuple[int, ...]]
    packed: Callable[[str], PackedTensor]
    schemes: SchemeTable | None = None


def safetensors_tensors(folder: SafetensorsFolder) -> LogicalTensors:
    """The weights of a safetensors model; raises FormatError or RefusalError as `quant.schemes` says."""
    stored = {name: Stored(info.shape, info.dtype) for name, info in folder.tensors.items()}
    table = detect(stored, folder.config)

    def packed(name: str) -> PackedTensor:
        scheme = table.weights.get(name)
        return folder.packed(name) if scheme is None else build(scheme, folder.tensor)

    return LogicalTensors(table.shapes, packed, table)


def scale_name(weight: str) -> str:
    """GGUF name of the multiplier that belongs to an NVFP4 weight."""
    return f"{weight.removesuffix('.weight')}.scale"


def gguf_tensors(file: GgufFile) -> LogicalTensors:
    """The weights of a GGUF model, where two forms keep scales apart.

    FP8: an I8 tensor of E4M3 payloads with `<name>_scale_inv` per 128 x 128 block. NVFP4: `<module>.scale`, one
    multiplier per matrix, beside `<module>.weight` (and `<module>.input_scale` for activations, not applied).
    """
    shapes = {name: info.shape for name, info in file.tensors.items()}
    scales: dict[str, str] = {}
    for name, info in file.tensors.items():
        module = name.removesuffix(".weight")
        scale = f"{name}_scale_inv" if info.format is I8 else scale_name(name) if info.format is NVFP4 else None
        if scale is not None and scale in shapes:
            scales[name] = scale
            del shapes[scale]
            shapes.pop(f"{module}.input_scale", None)

    def packed(name: str) -> PackedTensor:
        tensor = file.packed(name)
        return _with_scale(tensor, file.packed(scales[name])) if name in scales else tensor

    return LogicalTensors(shapes, packed)


def _with_scale(tensor: PackedTensor, scale: PackedTensor) -> PackedTensor:
    values = dequantize(scale)
    check_scale(scale.name, values)
    lead = tensor.shape[:-2]
    if tensor.format is NVFP4:
        if values.numel() not in (1, torch.Size(lead).numel()):
            raise FormatError(f"scale {scale.name!r} has shape {list(scale.shape)}, expected one value per matrix")
        factor = values.reshape(*lead, 1) if values.numel() > 1 else values.reshape(1)
        return PackedTensor(NVFP4, tensor.shape, tensor.data, tensor.name, {"global_scale": factor})
    expected = (*lead, -(-tensor.shape[-2] // 128), -(-tensor.shape[-1] // 128))
    if tuple(scale.shape) != expected:
        raise FormatError(f"scale {scale.name!r} has shape {list(scale.shape)}, expected {list(expected)}")
    data = tensor.data.view(torch.float8_e4m3fn)
    return PackedTensor(F8_E4M3, tensor.shape, data, tensor.name, {"weight_scale": values})
