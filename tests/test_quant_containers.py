"""Quantized tensors through the containers: a folder's weights by logical name, GGUF's separate scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_quant_schemes import compressed, fp8_weight, random_bytes

from slimserve.errors import FormatError
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import F32, I8, NVFP4
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf import GgufFile
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.quantized import gguf_tensors
from slimserve.weights.safetensors_write import StoredPlan, write_safetensors
from slimserve.weights.source import open_source


def test_mixed_folder_by_logical_names(tmp_path: Path) -> None:
    tensors = {f"mlp.gate.{key[2:]}": value for key, value in compressed(1).items()}
    tensors |= {"lm_head.weight": fp8_weight(8, 64), "lm_head.weight_scale": torch.rand(8, 1).bfloat16() + 0.1}
    tensors["norm.weight"] = torch.ones(64).bfloat16()
    write_safetensors(tmp_path / "model.safetensors", [StoredPlan.of(name, value) for name, value in tensors.items()])
    config = {"model_type": "toy", "quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    assert source.shapes == {"mlp.gate.weight": (6, 64), "lm_head.weight": (8, 64), "norm.weight": (64,)}
    assert [source.packed(name).format.name for name in source.shapes] == ["E2M1_G16", "F8_E4M3", "BF16"]
    expected = tensors["lm_head.weight"].float() * tensors["lm_head.weight_scale"].float()
    assert torch.equal(dequantize(source.packed("lm_head.weight")), expected)


def write_scaled_gguf(path: Path, scale: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fp8, nvfp4 = fp8_weight(200, 300), random_bytes(1, 4, 72) & 0x7F
    plans = [
        TensorPlan.of(PackedTensor(I8, (200, 300), fp8.view(torch.int8), "blk.0.a.weight")),
        TensorPlan.of(PackedTensor(F32, tuple(block.shape), block, "blk.0.a.weight_scale_inv")),
        TensorPlan.of(PackedTensor(NVFP4, (4, 128), nvfp4, "blk.0.b.weight")),
        TensorPlan.of(PackedTensor(F32, (1,), scale, "blk.0.b.scale")),
        TensorPlan.of(PackedTensor(F32, (1,), torch.ones(1), "blk.0.b.input_scale")),
        TensorPlan.of(PackedTensor(I8, (4,), torch.ones(4, dtype=torch.int8), "table")),
    ]
    write_gguf(path, {"general.architecture": "toy"}, plans)
    return fp8, nvfp4


def test_gguf_scales_beside_weights(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    block = torch.rand(2, 3) + 0.1
    fp8, nvfp4 = write_scaled_gguf(path, torch.tensor([0.25]), block)
    tensors = gguf_tensors(GgufFile.open(path))
    assert set(tensors.shapes) == {"blk.0.a.weight", "blk.0.b.weight", "table"}
    first, second = tensors.packed("blk.0.a.weight"), tensors.packed("blk.0.b.weight")
    assert first.format.name == "F8_E4M3" and tensors.packed("table").format is I8
    assert dequantize(first)[199, 299] == fp8[199, 299].float() * block[1, 2]
    assert torch.equal(dequantize(second), dequantize(PackedTensor(NVFP4, (4, 128), nvfp4)) * 0.25)


@pytest.mark.parametrize(
    ("scale", "block", "message"),
    [
        (torch.tensor([float("nan")]), torch.ones(2, 3), r"'blk\.0\.b\.scale' holds nan"),
        (torch.tensor([0.0]), torch.ones(2, 3), r"'blk\.0\.b\.scale' holds nothing but zeros"),
        (torch.tensor([1.0]), torch.ones(3, 2), r"'blk\.0\.a\.weight_scale_inv' has shape"),
    ],
)
def test_gguf_scales_are_checked(tmp_path: Path, scale: torch.Tensor, block: torch.Tensor, message: str) -> None:
    write_scaled_gguf(tmp_path / "m.gguf", scale, block)
    tensors = gguf_tensors(GgufFile.open(tmp_path / "m.gguf"))
    with pytest.raises(FormatError, match=message):
        for name in tensors.shapes:
            tensors.packed(name)
