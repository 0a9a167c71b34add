"""The chunked gated delta rule against the plain token-by-token recurrence in float64, and any cut of a prompt."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, triton_marks

from slimserve.ops.reference import linear_attention as reference

RING = 80
CONV_RING = 8


def recurrence(q, k, v, g, beta):
    """Token by token, float64: q, k [T, Hk, K], v [T, H, V], g [T, H(, K)], beta [T, H]."""
    heads = v.shape[1]
    repeat = heads // q.shape[1]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q = (q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5).repeat_interleave(repeat, 1)
    k = (k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeat, 1)
    state = torch.zeros(heads, q.shape[-1], v.shape[-1], dtype=torch.float64)
    outputs = []
    for t in range(q.shape[0]):
        decay = g[t].exp()
        state = state * (decay[:, :, None] if decay.dim() == 2 else decay[:, None, None])
        delta = beta[t][:, None] * (v[t] - torch.einsum("hc,hcv->hv", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hc,hcv->hv", q[t], state))
    return torch.stack(outputs), state


def storage(heads, key_heads, key_dim, value_dim, per_channel, slots=10):
    decay_shape = (3, RING, heads, key_dim) if per_channel else (3, RING, heads)
    return {
        "state": torch.full((slots, heads, key_dim, value_dim), float("nan")),
        "open_k": torch.full((3, RING, key_heads, key_dim), float("nan")),
        "open_g": torch.full(decay_shape, float("nan")),
        "open_d": torch.full((3, RING, heads, value_dim), float("nan")),
    }


def triton_ops():
    """The Triton kernels: on the device, or under the interpreter."""
    from slimserve.ops.triton import linear_attention

    return linear_attention


def run_cut(inputs, store, cuts, ops=reference):
    """Feed one sequence in pieces; boundary b is written to slot b // 64."""
    out, start = [], 0
    for stop in cuts:
        piece = [x[start:stop] for x in inputs]
        first = start // 64 + 1
        state_out = torch.tensor([list(range(first, stop // 64 + 1)) or [0]])
        out.append(
            ops.gated_delta_rule(
                *piece,
                **store,
                state_in=torch.tensor([start // 64]),
                state_out=state_out,
                open_index=torch.tensor([1]),
                row_offsets=torch.tensor([0, stop - start]),
                start_positions=torch.tensor([start]),
            )
        )
        start = stop
    return torch.cat(out)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    "cuts", [[200], [1, 2, 3, 64, 65, 127, 200], [63, 64, 128, 200], [16 * i for i in range(1, 13)] + [200]]
)
def test_matches_recurrence(per_channel, cuts):
    torch.manual_seed(len(cuts))
    key_heads, heads, key_dim, value_dim = (4, 4, 16, 16) if per_channel else (2, 6, 16, 24)
    num_tokens = cuts[-1]
    q, k = torch.randn(num_tokens, key_heads, key_dim), torch.randn(num_tokens, key_heads, key_dim)
    v, beta = torch.randn(num_tokens, heads, value_dim), torch.rand(num_tokens, heads)
    g = -5 * torch.rand(num_tokens, heads, key_dim) if per_channel else -torch.rand(num_tokens, heads)
    store = storage(heads, key_heads, key_dim, value_dim, per_channel)
    out = run_cut((q, k, v, g, beta), store, cuts)
    expected, _ = recurrence(q, k, v, g, beta)
    error = (out - expected).norm() / expected.norm()
    print(f"relative error {error:.2e}")
    assert error < 2e-6
    _, state = recurrence(q[:192], k[:192], v[:192], g[:192], beta[:192])
    assert (store["state"][3] - state).norm() / state.norm() < 2e-5


@pytest.mark.parametrize("per_channel", [pytest.param(value, marks=triton_marks()) for value in (False, True)])
def test_triton_cuts_are_bit_equal(per_channel):
    with torch.device(DEVICE):
        check_cuts_are_bit_equal(per_channel, triton_ops())


def check_cuts_are_bit_equal(per_channel, ops):
    torch.manual_seed(5)
    key_heads, heads, key_dim, value_dim = (2, 2, 16, 16) if per_channel else (1, 2, 16, 20)
    cuts_list = ([150], [1, 2, 60, 64, 65, 150], [50, 129, 130, 150])
    q, k = torch.randn(150, key_heads, key_dim), torch.randn(150, key_heads, key_dim)
    v, beta = torch.randn(150, heads, value_dim), torch.rand(150, heads)
    g = -5 * torch.rand(150, heads, key_dim) if per_channel else -torch.rand(150, heads)
    results = []
    for cuts in cuts_list:
        store = storage(heads, key_heads, key_dim, value_dim, per_channel)
        results.append((run_cut((q, k, v, g, beta), store, cuts, ops), store["state"][1:3].clone()))
    expected, _ = recurrence(q, k, v, g, beta)
    assert (results[0][0] - expected).norm() / expected.norm() < 2e-6
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])


@pytest.mark.parametrize("implementation", ["reference", pytest.param("triton", marks=triton_marks())])
@pytest.mark.parametrize("cuts", [[150], [1, 2, 3, 5, 64, 70, 128, 129, 150]])
def test_convolution_any_cut(cuts, implementation):
    if implementation == "reference":
        check_convolution(cuts, reference)
    else:
        with torch.device(DEVICE):
            check_convolution(cuts, triton_ops())


def check_convolution(cuts, ops):
    torch.manual_seed(1)
    channels, width = 12, 4
    x, weight = torch.randn(150, channels), torch.randn(channels, width)
    open_conv = torch.full((3, CONV_RING, channels), float("nan"))
    conv_tail = torch.full((10, width - 1, channels), float("nan"))
    out, start = [], 0
    for stop in cuts:
        state_out = torch.tensor([list(range(start // 64 + 1, stop // 64 + 1)) or [0]])
        out.append(
            ops.causal_conv(
                x[start:stop],
                weight,
                open_conv,
                conv_tail,
                torch.tensor([start // 64]),
                state_out,
                torch.tensor([2]),
                torch.tensor([0, stop - start]),
                torch.tensor([start]),
            )
        )
        start = stop
    padded = torch.cat([torch.zeros(width - 1, channels), x]).T[None]
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=channels))[0].T
    torch.testing.assert_close(torch.cat(out), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(conv_tail[2], x[125:128])
