"""Triton row kernels against the torch references: poisoned outputs, odd shapes, rows that stand alone."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve.ops.reference import activation, attention, norms, rotary

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import rows as kernels

DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within one rounding of the storage dtype plus the error of approximate exp and sin."""
    tolerance = 1.6e-2 if got.dtype == torch.bfloat16 else 2e-5
    return torch.allclose(got.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 96, 1000] + ([5120, 17408] if ON_DEVICE else []))
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, residual = (torch.randn(3, 2, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE)
    got = kernels.rms_norm(x, weight, 1e-6, weight_offset=1.0)
    assert got.dtype == dtype and close(got, norms.rms_norm(x, weight, 1e-6, weight_offset=1.0))
    y, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    expected_y, expected_total = norms.add_rms_norm(x, residual, weight, 1e-6)
    # The interpreter truncates where a device rounds to nearest even.
    assert torch.equal(total, expected_total) if ON_DEVICE else close(total, expected_total)
    assert close(y, expected_y)
    alone = kernels.rms_norm(x[1:2], weight, 1e-6, weight_offset=1.0)
    assert torch.equal(alone, got[1:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 1300])
def test_gated_activations(dtype: torch.dtype, width: int) -> None:
    gate_up = (torch.randn(3, 2 * width, device=DEVICE) * 8).to(dtype)
    assert close(kernels.silu_mul(gate_up), activation.silu_mul(gate_up))
    assert close(kernels.silu_mul(gate_up, 2.0), activation.silu_mul(gate_up, 2.0))
    assert close(kernels.gelu_tanh_mul(gate_up), activation.gelu_tanh_mul(gate_up))
    large = torch.tensor([[100.0, -100.0, 2.0, 3.0]], device=DEVICE).to(dtype)
    assert kernels.gelu_tanh_mul(large).tolist() == [[200.0, 0.0]]
    assert close(kernels.silu_mul(large), activation.silu_mul(large))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_on_a_strided_view(dtype: torch.dtype, interleaved: bool) -> None:
    whole = torch.randn(4, 9, 40, device=DEVICE).to(dtype)
    before = whole.clone()
    positions = torch.tensor([0, 3, 1000, 131071], device=DEVICE)
    inv_freq = (1.0 / 10000 ** (torch.arange(0, 24, 2) / 24)).to(DEVICE)
    expected = whole.clone()
    options = {"rotary_dim": 24, "interleaved": interleaved, "scale": 1.25}
    rotary.rope(expected[:, 2:8], positions, inv_freq, **options)
    kernels.rope(whole[:, 2:8], positions, inv_freq, **options)
    assert close(whole, expected)
    assert torch.equal(whole[:, :2], before[:, :2]) and torch.equal(whole[:, 8:], before[:, 8:])
    assert torch.equal(whole[..., 24:], before[..., 24:])


@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_write_pages_touches_its_slots_only(storage_dtype: torch.dtype) -> None:
    heads, dim = 3, 24
    qkv = torch.randn(5, 9, dim, device=DEVICE) * 300
    if not ON_DEVICE:  # the interpreter's casts do not round as a device does: give it nothing to round
        qkv = torch.where(qkv.abs() < 448, qkv.to(torch.float8_e4m3fn).float(), qkv.sign() * 512)
    values = qkv[:, 3:6]
    slots = torch.tensor([64, 191, 70, 130, 0], device=DEVICE)
    got = torch.full((4, heads, 64, dim), math.nan, device=DEVICE).to(storage_dtype)
    expected = got.clone()
    kernels.write_pages(values, got, slots)
    attention.write_pages(values, expected, slots)
    as_bytes = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[storage_dtype.itemsize]
    assert torch.equal(got.view(as_bytes), expected.view(as_bytes))
