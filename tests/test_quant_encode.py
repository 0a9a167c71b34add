"""Encoders: error against ggml's encoder of the same type, exact fixed points, extreme inputs, refusals."""

from __future__ import annotations

import ggml_oracle
import numpy as np
import pytest
import torch
from test_quant_schemes import header

from slimserve.errors import RefusalError
from slimserve.quant.decode import dequantize
from slimserve.quant.encode import ENCODERS, encode
from slimserve.quant.encode_scaled import Fp8Scale, encode_fp8, encode_int4, encode_nvfp4
from slimserve.quant.export import stored_tensors
from slimserve.quant.formats import find_format
from slimserve.quant.schemes import SchemeKind, build, detect
from slimserve.quant.tensor import BlockFormat, PackedTensor

ALLOWED = 1.02
NEEDS_IMPORTANCE = ("IQ2_XXS",)


def format_of(name: str) -> BlockFormat:
    fmt = find_format(name)
    assert fmt is not None
    return fmt


def samples() -> dict[str, np.ndarray]:
    """Normal, heavy-tailed, uniform and shifted values; one with an outlier per row."""
    rng = np.random.default_rng(17)
    normal = rng.standard_normal((32, 1024))
    outlier = normal.copy() * 0.02
    outlier[:, 5] = 1.5
    heavy = rng.standard_t(3, (32, 1024)) * 0.01
    values = {"normal": normal, "heavy": heavy, "uniform": rng.uniform(-1, 1, (32, 1024)), "outlier": outlier}
    return {name: value.astype(np.float32) for name, value in (values | {"shifted": normal + 2.0}).items()}


def rms(values: np.ndarray, weights: np.ndarray | None) -> float:
    squares = values.astype(np.float64) ** 2
    return float(np.sqrt((squares if weights is None else squares * weights).mean()))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", list(ENCODERS))
def test_error_against_ggml(name: str, weighted: bool) -> None:
    fmt = format_of(name)
    rng = np.random.default_rng(3)
    importance = rng.gamma(0.7, 1.0, 1024).astype(np.float32) if weighted else None
    for kind, x in samples().items():
        ours = encode(torch.from_numpy(x), fmt, importance=None if importance is None else torch.from_numpy(importance))
        decoded = dequantize(ours).numpy()
        given = np.ones(1024, np.float32) if name in NEEDS_IMPORTANCE and importance is None else importance
        theirs = ggml_oracle.decode(fmt, ggml_oracle.encode(fmt, x, given)).reshape(x.shape)
        mine, peer = rms(decoded - x, importance), rms(theirs - x, importance)
        print(f"{name} {kind}: {mine:.6g} against {peer:.6g}, ratio {mine / peer:.3f}")
        assert mine <= ALLOWED * peer, f"{name} {kind}: error {mine:.6g} against ggml's {peer:.6g}"


@pytest.mark.parametrize("name", list(ENCODERS))
def test_decoded_blocks_encode_to_themselves(name: str) -> None:
    """Values that the format holds exactly come back almost exactly."""
    fmt = format_of(name)
    first = encode(torch.from_numpy(samples()["normal"]), fmt)
    values = dequantize(first)
    again = dequantize(encode(values, fmt))
    assert rms((again - values).numpy(), None) <= 0.25 * rms(
        (values - torch.from_numpy(samples()["normal"])).numpy(), None
    )


@pytest.mark.parametrize("name", list(ENCODERS))
def test_extreme_blocks(name: str) -> None:
    """Zeros, one value, huge and tiny magnitudes, constants: finite, the right size, zeros exact."""
    fmt = format_of(name)
    x = torch.zeros(8, 256)
    x[1, 7] = 3.0
    x[2] = 1e-30
    x[3] = 6e4
    x[4] = -4.0
    x[5, ::2] = 1.0
    x[6] = torch.linspace(-1e-4, 1e-4, 256)
    x[7, 0] = -2.5
    decoded = dequantize(encode(x, fmt))
    assert bool(torch.isfinite(decoded).all())
    assert bool((decoded[0] == 0).all())
    for row in (1, 3, 4, 7):
        if name not in ("IQ2_XXS", "NVFP4"):
            error = (decoded[row] - x[row]).abs().max() / x[row].abs().max()
            assert float(error) < 0.25, f"row {row}: relative error {float(error):.3f}"


def test_importance_per_expert_and_refusals() -> None:
    fmt = format_of("Q4_K")
    x = torch.randn(3, 4, 512, generator=torch.Generator().manual_seed(0))
    importance = torch.rand(3, 512, generator=torch.Generator().manual_seed(1)) ** 4
    stacked = encode(x, fmt, importance=importance)
    for expert in range(3):
        assert torch.equal(stacked.data[expert], encode(x[expert], fmt, importance=importance[expert]).data)
    with pytest.raises(RefusalError, match=r"'w' .* cannot use importances"):
        encode(x, fmt, importance=torch.ones(100), name="w")
    with pytest.raises(RefusalError, match="finite and not negative"):
        encode(x, fmt, importance=-torch.ones(512))
    with pytest.raises(RefusalError, match=r"'w': rows of 100 are no whole Q4_K blocks"):
        encode(torch.ones(2, 100), fmt, name="w")
    with pytest.raises(RefusalError, match=r"'w' holds values that are not finite"):
        encode(torch.full((1, 256), float("nan")), fmt, name="w")
    with pytest.raises(RefusalError, match="IQ1_S cannot be written"):
        encode(x, format_of("IQ1_S"))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = torch.from_numpy(samples()["heavy"])
    for name in ENCODERS:
        fmt = format_of(name)
        whole = encode(x, fmt).data
        assert torch.equal(whole[3:4], encode(x[3:4].clone(), fmt).data), name


def weights(rows: int = 40, columns: int = 384) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) * 0.03
    x[2] = 0.0
    x[3] *= 40.0
    return x


def relative(packed: PackedTensor, x: torch.Tensor) -> float:
    return float((dequantize(packed) - x).norm() / x.norm())


def check_stored(packed: PackedTensor, kind: SchemeKind) -> None:
    """Stored form, detected and built again, is the same tensor."""
    tensors = stored_tensors(packed, kind)
    table = detect(header(tensors))
    assert table.kinds() == {kind: 1}
    again = build(table.weights[packed.name], lambda name: tensors[name])
    torch.testing.assert_close(dequantize(again), dequantize(packed), rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("scale_of", list(Fp8Scale))
def test_fp8(scale_of: Fp8Scale) -> None:
    x = weights(200, 384)
    packed = encode_fp8(x, scale_of, "m.weight")
    kinds = {Fp8Scale.TENSOR: SchemeKind.FP8_TENSOR, Fp8Scale.CHANNEL: SchemeKind.FP8_CHANNEL}
    check_stored(packed, kinds.get(scale_of, SchemeKind.FP8_BLOCK))
    assert relative(packed, x) < 0.03
    assert float(dequantize(packed)[2].abs().max()) == 0.0
    peak = x.abs().max()
    assert dequantize(packed).abs().max() == pytest.approx(float(peak), rel=1e-6)
    stacked = encode_fp8(torch.stack((x, 2 * x)), scale_of, "e.weight")
    assert torch.equal(dequantize(stacked)[0], dequantize(packed))


@pytest.mark.parametrize("kind", [SchemeKind.NVFP4_COMPRESSED, SchemeKind.NVFP4_MODELOPT])
def test_nvfp4(kind: SchemeKind) -> None:
    x = weights()
    packed = encode_nvfp4(x, "m.weight")
    check_stored(packed, kind)
    # Plain rounding to amax / 6 scales, computed here, is what the search must beat.
    scale = (x.reshape(40, -1, 16).abs().amax(-1) / 6.0 / packed.scales["global_scale"]).to(torch.float8_e4m3fn).float()
    unit = (scale * packed.scales["global_scale"])[..., None]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    magnitude = (x.reshape(40, -1, 16).abs() / unit.clamp(min=1e-30))[..., None]
    plain = levels[(magnitude - levels).abs().argmin(-1)] * x.reshape(40, -1, 16).sign() * unit
    assert relative(packed, x) <= float((plain.reshape(x.shape) - x).norm() / x.norm())
    assert relative(packed, x) < 0.11


@pytest.mark.parametrize("kind", [SchemeKind.INT4_COMPRESSED, SchemeKind.INT4_GPTQ])
def test_int4(kind: SchemeKind) -> None:
    x = weights()
    packed = encode_int4(x, "m.weight")
    check_stored(packed, kind)
    peak = x.reshape(40, -1, 128).abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7.0
    plain = (x.reshape(40, -1, 128) / peak).round().clamp(-8, 7) * peak
    assert relative(packed, x) < float((plain.reshape(x.shape) - x).norm() / x.norm())
    assert bool((packed.scales["weight_scale"] > 0).all())
