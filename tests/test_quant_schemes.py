"""Quantization schemes of safetensors checkpoints: detection, conventions, decode by definition, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimserve.errors import FormatError, RefusalError
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import E2M1_G16, F8_E4M3, FORMATS, INT4, NVFP4, PLAIN_DTYPES
from slimserve.quant.scales import check_weight
from slimserve.quant.schemes import SchemeKind, Stored, build, detect
from slimserve.quant.tensor import BlockFormat, PackedTensor
from slimserve.weights.safetensors import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
Tensors = dict[str, torch.Tensor]


def e4m3_value(code: int) -> float:
    """E4M3 (fn) by its definition: bias 7, subnormals at exponent 0, 0x7F and 0xFF are NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def nibble_value(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


def header(tensors: Tensors) -> dict[str, Stored]:
    return {name: Stored(tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in tensors.items()}


def load(tensors: Tensors, name: str = "m.weight", config: dict[str, Any] | None = None) -> PackedTensor:
    table = detect(header(tensors), config)
    return build(table.weights[name], lambda key: tensors[key])


def kind_of(tensors: Tensors, config: dict[str, Any] | None = None) -> SchemeKind:
    return detect(header(tensors), config).weights["m.weight"].kind


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def group_scales(seed: int, *shape: int) -> torch.Tensor:
    """Random E4M3 codes from 1 to 126: every subnormal and normal, no zero, no NaN, no sign."""
    codes = torch.randint(1, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return codes.view(torch.float8_e4m3fn)


def compressed(seed: int = 0, rows: int = 6, columns: int = 64, divisor: float = 700.0) -> Tensors:
    return {
        "m.weight_packed": random_bytes(seed, rows, columns // 2),
        "m.weight_scale": group_scales(seed, rows, columns // 16),
        "m.weight_global_scale": torch.tensor([divisor]),
        "m.input_global_scale": torch.tensor([900.0]),
    }


def modelopt(seed: int = 0, multiplier: float = 1.25e-3) -> Tensors:
    tensors = compressed(seed)
    return {
        "m.weight": tensors["m.weight_packed"],
        "m.weight_scale": tensors["m.weight_scale"],
        "m.weight_scale_2": torch.tensor(multiplier),
        "m.input_scale": torch.tensor(0.5),
    }


def nvfp4_by_definition(data: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    rows, half = data.shape
    out = torch.empty(rows, half * 2)
    codes = scale.view(torch.uint8)
    for row in range(rows):
        for k in range(half * 2):
            byte = int(data[row, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            out[row, k] = nibble_value(code) * e4m3_value(int(codes[row, k // 16]))
    return out * factor


def test_nvfp4_of_both_producers() -> None:
    first, second = compressed(), modelopt()
    assert kind_of(first) is SchemeKind.NVFP4_COMPRESSED and kind_of(second) is SchemeKind.NVFP4_MODELOPT
    data, scale = first["m.weight_packed"], first["m.weight_scale"]
    expected = nvfp4_by_definition(data, scale, 1.0 / first["m.weight_global_scale"])
    packed = load(first)
    assert packed.format is E2M1_G16 and packed.shape == (6, 64)
    assert packed.data.data_ptr() == data.data_ptr()
    assert torch.equal(dequantize(packed), expected)
    assert torch.equal(dequantize(load(second)), nvfp4_by_definition(data, scale, second["m.weight_scale_2"]))


def test_all_group_scale_codes() -> None:
    """All 127 non-negative E4M3 codes scale exactly, subnormals included."""
    codes = torch.arange(127, dtype=torch.uint8)
    scale = codes.view(torch.float8_e4m3fn).reshape(127, 1)
    data = torch.full((127, 8), 0x21, dtype=torch.uint8)
    packed = PackedTensor(E2M1_G16, (127, 16), data, "w", {"weight_scale": scale})
    expected = torch.tensor([[e4m3_value(c) * v for v in (0.5, 1.0)] * 8 for c in range(127)])
    assert torch.equal(dequantize(packed), expected)


def test_every_fp8_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    packed = PackedTensor(F8_E4M3, (1, 256), codes.view(torch.float8_e4m3fn))
    expected = torch.tensor([[e4m3_value(code) for code in range(256)]])
    assert torch.equal(dequantize(packed).nan_to_num(7777.0), expected.nan_to_num(7777.0))


def fp8_weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)


def test_fp8_per_channel_tensor_and_block() -> None:
    weight = fp8_weight(200, 300)
    channel = torch.rand(200, 1).to(torch.bfloat16) + 0.01
    for stored in (channel, channel.reshape(-1)):
        packed = load({"m.weight": weight, "m.weight_scale": stored})
        assert packed.format is F8_E4M3 and packed.scales["weight_scale"].shape == (200, 1)
        assert torch.equal(dequantize(packed), weight.float() * channel.float())
    for scalar in (torch.tensor(0.25), torch.tensor([0.25])):
        tensors = {"m.weight": weight, "m.weight_scale": scalar, "m.input_scale": torch.tensor(1.0)}
        assert kind_of(tensors) is SchemeKind.FP8_TENSOR
        assert torch.equal(dequantize(load(tensors)), weight.float() * 0.25)
    block = torch.rand(2, 3) + 0.01
    for name in ("m.weight_scale_inv", "m.weight_scale"):
        tensors = {"m.weight": weight, name: block}
        assert kind_of(tensors) is SchemeKind.FP8_BLOCK
        decoded = dequantize(load(tensors))
        for row, column in ((0, 0), (127, 128), (128, 255), (199, 299)):
            expected = weight.float()[row, column] * block[row // 128, column // 128]
            assert decoded[row, column] == expected


def test_stacked_experts() -> None:
    weight = fp8_weight(3, 200, 300)
    block = torch.rand(3, 2, 3) + 0.01
    decoded = dequantize(load({"m.weight": weight, "m.weight_scale_inv": block}))
    for expert in range(3):
        one = dequantize(load({"m.weight": weight[expert], "m.weight_scale_inv": block[expert]}))
        assert torch.equal(decoded[expert], one)
    parts = [load(compressed(seed, divisor=500.0 + seed)) for seed in range(3)]
    scales = {key: torch.stack([part.scales[key] for part in parts]) for key in parts[0].scales}
    stacked = PackedTensor(E2M1_G16, (3, 6, 64), torch.stack([part.data for part in parts]), "e", scales)
    assert torch.equal(dequantize(stacked), torch.stack([dequantize(part) for part in parts]))


def int4_words(codes: torch.Tensor) -> torch.Tensor:
    """uint4 codes [N, K] as int32 words [N, K / 8], lowest nibble first."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= codes[:, place::8].long() << (4 * place)
    return words.to(torch.int32)


def int4_tensors(codes: torch.Tensor, scale: torch.Tensor, zero_word: int = 0x77777777) -> Tensors:
    """GPTQ tensors of symmetric codes: words along K, transposed."""
    words = int4_words(codes).t().contiguous()
    groups = scale.shape[1]
    return {
        "m.qweight": words,
        "m.scales": scale.t().contiguous(),
        "m.qzeros": torch.full((groups, codes.shape[0] // 8), zero_word, dtype=torch.int64).to(torch.int32),
        "m.g_idx": (torch.arange(codes.shape[1]) // (codes.shape[1] // groups)).to(torch.int32),
    }


def test_int4_of_both_layouts() -> None:
    codes = torch.randint(0, 16, (16, 256), generator=torch.Generator().manual_seed(4))
    scale = (torch.rand(16, 2) + 0.1).half()
    expected = (codes.float() - 8.0) * scale.float().repeat_interleave(128, dim=1)
    for zero_word in (0x77777777, 0x88888888):
        tensors = int4_tensors(codes, scale, zero_word)
        assert kind_of(tensors) is SchemeKind.INT4_GPTQ
        packed = load(tensors, config={"quantization_config": {"quant_method": "auto-round", "bits": 4, "sym": True}})
        assert packed.format is INT4 and packed.shape == (16, 256) and packed.data.shape == (16, 128)
        assert torch.equal(dequantize(packed), expected)
    tensors = {"m.weight_packed": int4_words(codes), "m.weight_scale": scale, "m.weight_shape": torch.tensor([16, 256])}
    assert kind_of(tensors) is SchemeKind.INT4_COMPRESSED
    assert torch.equal(dequantize(load(tensors)), expected)


def test_against_compressed_tensors_package() -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: no second opinion")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    tensors = compressed(9)
    theirs = unpack_fp4_from_uint8(tensors["m.weight_packed"], 6, 64).float()
    theirs = theirs.reshape(6, 4, 16) * (tensors["m.weight_scale"].float() / 700.0)[..., None]
    torch.testing.assert_close(dequantize(load(tensors)), theirs.reshape(6, 64), rtol=3e-7, atol=0.0)
    values = torch.randint(-8, 8, (4, 128), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    stored = {"m.weight_packed": pack_to_int32(values, 4), "m.weight_scale": torch.ones(4, 1)}
    assert torch.equal(dequantize(load(stored)), values.float())


def test_gguf_nvfp4_with_a_global_scale() -> None:
    data = random_bytes(3, 4, 72) & 0x7F
    plain = PackedTensor(NVFP4, (4, 128), data, "w")
    scaled = PackedTensor(NVFP4, (4, 128), data, "w", {"global_scale": torch.tensor([0.5])})
    assert torch.equal(dequantize(scaled), dequantize(plain) * 0.5)


def test_mixed_checkpoint_and_its_other_scales() -> None:
    """Gate and up keep their own global scales; activation and KV scales are set apart; plain tensors stay."""
    tensors = {f"gate.{k[2:]}": v for k, v in compressed(1, divisor=600.0).items()}
    tensors |= {f"up.{k[2:]}": v for k, v in compressed(2, divisor=1500.0).items()}
    tensors |= {"head.weight": fp8_weight(8, 64), "head.weight_scale": torch.rand(8, 1).bfloat16() + 0.1}
    tensors |= {"norm.weight": torch.ones(64), "attn.k_scale": torch.ones(1), "attn.v_scale": torch.ones(1)}
    table = detect(header(tensors), {"quantization_config": {"quant_method": "compressed-tensors"}})
    assert table.shapes == {"gate.weight": (6, 64), "up.weight": (6, 64), "head.weight": (8, 64), "norm.weight": (64,)}
    assert table.kinds() == {SchemeKind.NVFP4_COMPRESSED: 2, SchemeKind.FP8_CHANNEL: 1}
    assert table.activation_scales == ("gate.input_global_scale", "up.input_global_scale")
    assert table.kv_scales == ("attn.k_scale", "attn.v_scale")
    gate = build(table.weights["gate.weight"], lambda key: tensors[key])
    up = build(table.weights["up.weight"], lambda key: tensors[key])
    assert float(gate.scales["global_scale"]) == pytest.approx(1 / 600)
    assert float(up.scales["global_scale"]) == pytest.approx(1 / 1500)


def test_a_plain_checkpoint_is_untouched() -> None:
    tensors = {"a.weight": torch.ones(2, 2), "hc.base_scale": torch.ones(3), "b.k_scale": torch.ones(1)}
    table = detect(header(tensors), {})
    assert (
        not table.weights and set(table.shapes) == {"a.weight", "hc.base_scale"} and table.kv_scales == ("b.k_scale",)
    )


def changed(tensors: Tensors, **changes: torch.Tensor | None) -> Tensors:
    """`tensors` with m.<key> replaced, or removed where the value is None."""
    result = dict(tensors)
    for key, value in changes.items():
        if value is None:
            del result[f"m.{key}"]
        else:
            result[f"m.{key}"] = value
    return result


def poisoned(scale: torch.Tensor, value: float) -> torch.Tensor:
    copy = scale.clone()
    copy.reshape(-1)[-1] = value
    return copy


def zero_row(scale: torch.Tensor) -> torch.Tensor:
    copy = scale.clone()
    copy[1] = 0
    return copy


CT, MO = compressed(), modelopt()
FP8 = {"m.weight": fp8_weight(4, 32), "m.weight_scale": torch.rand(4, 1) + 0.1}
CODES = torch.randint(0, 8, (16, 256), generator=torch.Generator().manual_seed(4))
GPTQ = int4_tensors(CODES, torch.ones(16, 2).half())
NAN, INF = float("nan"), float("inf")
DAMAGED: list[tuple[Tensors, str]] = [
    (changed(CT, weight_scale=None), r"'m\.weight_packed'.*'m\.weight_scale' is missing"),
    (changed(CT, weight_global_scale=None), r"'m\.weight_global_scale' is missing"),
    (changed(CT, weight_scale=poisoned(CT["m.weight_scale"], NAN)), r"'m\.weight_scale' holds nan at \[5, 3\]"),
    (changed(CT, weight_scale=poisoned(CT["m.weight_scale"], -1.0)), r"'m\.weight_scale' holds -1"),
    (changed(CT, weight_scale=torch.zeros(6, 4).to(torch.float8_e4m3fn)), "nothing but zeros"),
    (changed(CT, weight_scale=zero_row(CT["m.weight_scale"])), "zero in row 1"),
    (changed(CT, weight_scale=group_scales(0, 6, 5)), r"shape \[6, 5\], expected \[6, 4\]"),
    (changed(CT, weight_global_scale=torch.tensor([1e-3])), "stores a divisor, at least 1"),
    (changed(CT, weight_global_scale=torch.tensor([INF])), "'m.weight_global_scale' holds inf"),
    (changed(CT, weight_global_scale=torch.tensor([0.0])), "nothing but zeros"),
    (changed(CT, weight_global_scale=torch.tensor([700.0, 1.0])), "expected one value per matrix"),
    (changed(MO, weight_scale_2=torch.tensor(700.0)), "stores a multiplier, at most 1"),
    (changed(MO, weight_scale_2=torch.tensor(torch.finfo(torch.float32).min)), "are not negative"),
    (changed(FP8, weight_scale=None), r"'m\.weight'.*is missing"),
    (changed(FP8, weight_scale=poisoned(FP8["m.weight_scale"], NAN)), "holds nan"),
    (changed(FP8, weight_scale=zero_row(FP8["m.weight_scale"])), "zero in row 1"),
    (changed(FP8, weight_scale=1.0 / (FP8["m.weight_scale"] * 1e-4)), "too large for a multiplier"),
    (changed(FP8, weight_scale=torch.ones(3, 1)), r"shape \[3, 1\]"),
    (changed(GPTQ, scales=None), r"'m\.qweight'.*'m\.scales' is missing"),
    (changed(GPTQ, scales=torch.full((2, 16), INF).half()), r"'m\.scales' holds inf"),
    ({"m.weight": torch.ones(2, 2).bfloat16(), "m.weight_scale": torch.ones(1)} | {"n.weight": FP8["m.weight"],
      "n.weight_scale": FP8["m.weight_scale"]}, r"'m\.weight_scale' is a scale without"),
    (CT | {"m.weight": torch.ones(6, 64)}, "stored twice"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_damaged_scales(tensors: Tensors, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load(tensors)


def quantization(**keys: Any) -> dict[str, Any]:
    return {"quantization_config": keys}


def group(**weights: Any) -> dict[str, Any]:
    return quantization(quant_method="compressed-tensors", config_groups={"group_0": {"weights": weights}})


REFUSED: list[tuple[Tensors, dict[str, Any], str]] = [
    (CT, quantization(quant_method="awq"), "'awq' is not supported"),
    (CT, group(num_bits=8, type="int"), "8-bit int"),
    (CT, group(num_bits=4, type="int", symmetric=False), "symmetric=False"),
    (GPTQ, quantization(quant_method="gptq", bits=8), "8-bit"),
    (GPTQ, quantization(quant_method="gptq", bits=4, sym=False), "sym=False"),
    (GPTQ, quantization(quant_method="auto-round", packing_format="auto_round:auto_awq"), "auto_awq' is not supported"),
    (changed(GPTQ, qzeros=torch.full((2, 2), 0x66666666, dtype=torch.int32)), {}, r"'m\.qzeros' holds zero points"),
    (changed(GPTQ, g_idx=torch.randperm(256)), {}, r"'m\.g_idx' re-orders columns"),
    (FP8, quantization(quant_method="fp8", weight_block_size=[64, 64]), r"\[64, 64\]"),
    (changed(CT, weight_scale=torch.ones(6, 4)), {}, "F8_E4M3 group scales"),
    (changed(CT, weight_packed=torch.ones(6, 32)), {}, "packed weights of dtype F32"),
]


@pytest.mark.parametrize(("tensors", "config", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused_variants(tensors: Tensors, config: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusalError, match=message):
        load(tensors, config=config)


def test_zero_groups_of_zero_weights_pass() -> None:
    tensors = compressed(5)
    tensors["m.weight_packed"][2] = 0
    tensors["m.weight_scale"] = zero_row(tensors["m.weight_scale"])
    tensors["m.weight_packed"][1] = 0x80
    assert bool((dequantize(load(tensors))[1] == 0).all())


def test_a_float8_weight_that_is_no_number_is_found() -> None:
    codes = torch.full((4, 8), 0x7E, dtype=torch.uint8)
    check_weight(PackedTensor(F8_E4M3, (4, 8), codes.view(torch.float8_e4m3fn), "w"))
    codes[2, 3] = 0xFF
    with pytest.raises(FormatError, match="'w' holds a value that is not finite at element 19"):
        check_weight(PackedTensor(F8_E4M3, (4, 8), codes.view(torch.float8_e4m3fn), "w"))


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.supported and f.type_id is not None], ids=lambda f: f.name)
def test_weights_that_are_not_finite_are_found(fmt: BlockFormat) -> None:
    """A block whose decode has NaN or infinity is named, and no other block is."""
    generator = torch.Generator().manual_seed(fmt.type_id or 0)
    if fmt.name in PLAIN_DTYPES:
        dtype = PLAIN_DTYPES[fmt.name]
        if not dtype.is_floating_point:
            check_weight(PackedTensor(fmt, (2, 2), torch.ones(2, 2, dtype=dtype), "w"))
            return
        values = torch.ones(4, 8, dtype=dtype)
        check_weight(PackedTensor(fmt, (4, 8), values, "w"))
        values[2, 3] = INF
        with pytest.raises(FormatError, match="'w' holds a value that is not finite at element 19"):
            check_weight(PackedTensor(fmt, (4, 8), values, "w"))
        return
    data = torch.randint(0, 256, (4000, fmt.block_bytes), dtype=torch.uint8, generator=generator)
    decoded = dequantize(PackedTensor(fmt, (4000, fmt.block_size), data, "w"))
    bad = ~torch.isfinite(decoded).all(dim=1)
    if fmt.name == "MXFP4":
        bad = data[:, 0] == 255
    if fmt.name == "Q8_K":  # a finite scale near the largest float may still overflow
        bad = ~torch.isfinite(data[:, :4].contiguous().view(torch.float32).flatten())
    clean = data[~bad]
    check_weight(PackedTensor(fmt, (clean.shape[0], fmt.block_size), clean, "w"))
    assert bool(bad.any()) or fmt.name == "NVFP4"
    for block in bad.nonzero().flatten().tolist()[:20]:
        spoiled = torch.cat((clean[:5], data[block : block + 1]))
        with pytest.raises(FormatError, match=r"'w'.*block 5 \(row 5\) is not finite"):
            check_weight(PackedTensor(fmt, (6, fmt.block_size), spoiled, "w"))
