"""A matrix per head, gates and decays: Triton against the references, and a row's bits alone."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, triton_marks

from slimserve import ops
from slimserve.ops import Activations, NumericsConfig
from slimserve.ops.reference import latent, linear_attention
from slimserve.quant.decode import dequantize
from slimserve.quant.formats import find_format
from slimserve.quant.synthetic import RandomBits, random_packed
from slimserve.quant.tensor import PackedTensor

HEADS, ROWS, WIDTH = 3, 40, 256


def stack_of(name: str) -> PackedTensor:
    fmt = find_format(name)
    assert fmt is not None
    return random_packed(fmt, (HEADS, ROWS, WIDTH), WIDTH**-0.5, RandomBits(2, name, torch.device("cpu")), name=name)


def expected_of(x: torch.Tensor, stack: PackedTensor) -> torch.Tensor:
    return torch.einsum("thk,hnk->thn", x.double(), dequantize(stack).double())


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["Q8_0", "BF16", "Q4_K"])
def test_heads_on_the_cpu(name: str) -> None:
    stack = stack_of(name)
    numerics = NumericsConfig(torch.float32, Activations.FLOAT)
    weight = ops.prepare_head_linear(stack, numerics=numerics)
    assert weight.num_bytes > 0 and weight.kernel
    x = torch.randn(5, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    got = ops.head_linear(x, weight)
    assert error_of(got, expected_of(x, stack)) < 1e-5
    assert torch.equal(ops.head_linear(x[3:4], weight), got[3:4])
    with pytest.raises(ValueError, match="expected"):
        ops.head_linear(x[:, :2], weight)
    with pytest.raises(ValueError, match="heads, N, K"):
        ops.prepare_head_linear(PackedTensor(stack.format, stack.shape[1:], stack.data[0], "flat"))


class TestTriton:
    pytestmark = triton_marks()

    @pytest.mark.parametrize("name", ["Q8_0", "BF16"])
    def test_heads(self, name: str) -> None:
        from slimserve.ops.triton.heads import TritonHeads

        stack = stack_of(name)
        served = TritonHeads(stack, torch.device(DEVICE), NumericsConfig())
        x = torch.randn(19, HEADS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
        got = served(x.to(DEVICE))
        assert error_of(got, expected_of(x, stack)) < 4e-3
        for count in (1, 2, 9):
            assert torch.equal(served(x[:count].to(DEVICE)), got[:count]), f"{count} tokens"
        assert int(served.meeting.locks.sum()) == 0 and bool((served.meeting.slots == -1).all())

    @pytest.mark.parametrize("silu", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gate_multiply(self, silu: bool, dtype: torch.dtype) -> None:
        from slimserve.ops.triton.gates import gate_multiply

        generator = torch.Generator().manual_seed(3)
        x = torch.randn(4, 6, 40, generator=generator).to(dtype)
        pair = torch.randn(4, 6, 2, 40, generator=generator)
        for gate in (pair[:, :, 1], pair[:, :, 0].contiguous()):
            got = gate_multiply(x.to(DEVICE), gate.to(DEVICE), silu=silu).cpu()
            expected = linear_attention.gate_multiply(x, gate, silu=silu)
            assert got.dtype is dtype and got.shape == x.shape
            assert error_of(got, expected.double()) < (5e-3 if dtype is torch.bfloat16 else 1e-6)
        flat = torch.randn(3, 11, generator=generator)
        got = gate_multiply(torch.ones(3, 4).to(DEVICE), flat[:, 2:6].to(DEVICE), silu=False).cpu()
        assert error_of(got, torch.sigmoid(flat[:, 2:6]).double()) < 1e-6

    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize("channels", [0, 8])
    def test_log_decay(self, bound: float | None, channels: int) -> None:
        from slimserve.ops.triton.gates import log_decay

        generator = torch.Generator().manual_seed(4)
        shape = (5, 6, channels) if channels else (5, 6)
        u = torch.randn(shape, generator=generator) * 12
        bias = torch.randn(u[0].numel(), generator=generator)
        rate = -torch.rand(6, generator=generator) * 4 - 0.1
        got = log_decay(u.to(DEVICE), bias.to(DEVICE), rate.to(DEVICE), bound).cpu()
        expected = linear_attention.log_decay(u.double().float(), bias, rate, bound)
        assert got.shape == u.shape and error_of(got, expected.double()) < 1e-6
        small = log_decay(torch.full((1, 6), -30.0).to(DEVICE), torch.zeros(6).to(DEVICE), rate.to(DEVICE), None).cpu()
        assert error_of(small, rate[None].double() * torch.nn.functional.softplus(torch.tensor(-30.0)).double()) < 1e-5

    @pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q2_K", "IQ2_XXS", "F8_E4M3", "E2M1_G16", "BF16", "Q5_0"])
    def test_the_plan_knows_what_a_layout_takes(self, name: str) -> None:
        from slimserve.ops.held import held_bytes
        from slimserve.ops.triton.relayout import relayout

        fmt = find_format(name)
        assert fmt is not None
        scales = "channel" if name == "F8_E4M3" else ""
        bits = RandomBits(1, name, torch.device("cpu"))
        for shape in ((96, 1280), (3, 32, 2304)) if not scales and name != "E2M1_G16" else ((96, 1280),):
            packed = random_packed(fmt, shape, 0.02, bits, scales=scales, name=name)
            held = relayout(packed, torch.device("cpu"))
            table = 0 if held.table is None else held.table.numel() * held.table.element_size()
            assert held_bytes(name, shape, packed.num_bytes) == held.num_bytes - table

    def test_write_latents(self) -> None:
        from slimserve.ops.triton.gates import write_latents

        # Whole numbers that every dtype holds: the interpreter's casts do not round as a device does.
        values = torch.randint(-9, 9, (5, 24), generator=torch.Generator().manual_seed(5)).float() * 64
        slots = torch.tensor([64, 65, 130, 191, 70])
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            own, reference = (torch.zeros(3, 64, 24, dtype=dtype) for _ in range(2))
            latent.write_latents(values, reference, slots)
            own = own.to(DEVICE)
            write_latents(values.to(DEVICE), own, slots.to(DEVICE))
            assert torch.equal(own.cpu().float(), reference.float())
