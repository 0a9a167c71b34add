"""From a PackedTensor with side scales back to the tensors and the configuration of a safetensors checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slimserve.errors import RefusalError
from slimserve.quant.schemes import NVFP4_GROUP, SchemeKind
from slimserve.quant.tensor import PackedTensor


def stored_tensors(packed: PackedTensor, kind: SchemeKind) -> dict[str, torch.Tensor]:
    """The stored tensors of one weight [N, K], by full name; the inverse of `schemes.build`."""
    name, scale = packed.name, packed.scales["weight_scale"]
    module = name.removesuffix(".weight")
    if kind is SchemeKind.NVFP4_COMPRESSED:
        divisor = 1.0 / packed.scales["global_scale"]
        return {f"{name}_packed": packed.data, f"{name}_scale": scale, f"{name}_global_scale": divisor}
    if kind is SchemeKind.NVFP4_MODELOPT:
        return {name: packed.data, f"{name}_scale": scale, f"{name}_scale_2": packed.scales["global_scale"].reshape(())}
    if kind in (SchemeKind.FP8_CHANNEL, SchemeKind.FP8_TENSOR):
        return {name: packed.data, f"{name}_scale": scale}
    if kind is SchemeKind.FP8_BLOCK:
        return {name: packed.data, f"{name}_scale_inv": scale}
    words = packed.data.view(torch.int32)  # [N, K / 8]
    if kind is SchemeKind.INT4_COMPRESSED:
        shape = torch.tensor(packed.shape, dtype=torch.int64)
        return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
    rows, groups = scale.shape
    if rows % 8:
        raise RefusalError(f"tensor {name!r}: GPTQ layout needs rows in multiples of 8, not {rows}")
    zeros = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
    order = (torch.arange(packed.shape[1]) // (packed.shape[1] // groups)).to(torch.int32)
    parts = {"qweight": words.t().contiguous(), "scales": scale.t().contiguous(), "qzeros": zeros, "g_idx": order}
    return {f"{module}.{key}": value for key, value in parts.items()}


def _group(kind: SchemeKind, targets: Sequence[str]) -> dict[str, Any]:
    """One config group of compressed-tensors."""
    weights: dict[str, Any] = {"dynamic": False, "symmetric": True, "group_size": None}
    activations: dict[str, Any] | None = None
    if kind is SchemeKind.NVFP4_COMPRESSED:
        weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
        form = "nvfp4-pack-quantized"
    elif kind is SchemeKind.INT4_COMPRESSED:
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
        form = "pack-quantized"
    else:
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        form = "float-quantized"
    return {"targets": list(targets), "weights": weights, "input_activations": activations, "format": form}


def _pattern(module: str) -> str:
    """A module name as compressed-tensors' pattern, with or without the wrapper that multimodal classes put around."""
    return "re:^" + re.escape(module).replace(r"language_model\.", r"(language_model\.)?") + "$"


def mixed_quantization_config(modules: Mapping[SchemeKind, Sequence[str]], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with several compressed-tensors schemes, module by module."""
    groups = {
        f"group_{number}": _group(kind, [_pattern(name) for name in names])
        for number, (kind, names) in enumerate(modules.items())
    }
    forms = {group["format"] for group in groups.values()}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    form = forms.pop() if len(forms) == 1 else "mixed-precision"
    return common | {"format": form, "config_groups": groups, "ignore": [_pattern(name) for name in ignored]}


def quantization_config(kind: SchemeKind, modules: Sequence[str], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for a checkpoint whose `modules` are quantized as `kind`.

    modules: module names without ".weight"; ignored: linear modules left as they were.
    """
    if kind in (SchemeKind.NVFP4_COMPRESSED, SchemeKind.FP8_CHANNEL, SchemeKind.INT4_COMPRESSED):
        group = _group(kind, ["Linear"])
        common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": group["format"]}
        return common | {"config_groups": {"group_0": group}, "ignore": [_pattern(name) for name in ignored]}
    if kind is SchemeKind.NVFP4_MODELOPT:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4_GROUP, "ignore": list(ignored)}
    if kind is SchemeKind.FP8_TENSOR:
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": list(ignored)}
    if kind is SchemeKind.FP8_BLOCK:
        common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return common | {"weight_block_size": [128, 128], "modules_to_not_convert": list(ignored)}
    common = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    return common | {"checkpoint_format": "gptq", "modules_in_block_to_quantize": [list(modules)] if modules else []}
