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
    key_heads, heads, key_dim, value_dim = (1, 1, 16, 16) if per_channel else (1, 2, 16, 20)
    cuts_list = ([140], [1, 2, 60, 64, 65, 140], [50, 129, 130, 140])
    q, k = torch.randn(140, key_heads, key_dim), torch.randn(140, key_heads, key_dim)
    v, beta = torch.randn(140, heads, value_dim), torch.rand(140, heads)
    g = -5 * torch.rand(140, heads, key_dim) if per_channel else -torch.rand(140, heads)
    results = []
    for cuts in cuts_list:
        store = storage(heads, key_heads, key_dim, value_dim, per_channel)
        results.append((run_cut((q, k, v, g, beta), store, cuts, ops), store["state"][1:3].clone()))
    expected, _ = recurrence(q, k, v, g, beta)
    error = float((results[0][0] - expected).norm() / expected.norm())
    print(f"relative error {error:.2e}")
    # Tensor cores cut where they add, and do not round: 2e-6 holds for sums of rounded float32 additions.
    assert error < (2e-6 if DEVICE == "cpu" else 5e-6)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(state, results[0][1])


@pytest.mark.parametrize(
    ("per_channel", "dtype"),
    [
        pytest.param(False, torch.bfloat16, marks=triton_marks()),
        pytest.param(True, torch.float32, marks=triton_marks()),
    ],
    ids=str,
)
def test_triton_rows_of_any_kind_are_bit_equal(per_channel, dtype):
    """Prefill, decode, drafts taken back, company and null rows: every token has the bits of the whole prompt."""
    with torch.device(DEVICE):
        check_rows_of_any_kind(per_channel, dtype)


def check_rows_of_any_kind(per_channel, dtype):
    ops = triton_ops()
    torch.manual_seed(11)
    # On a device the published widths; under the interpreter no more than has to be seen.
    key_heads, heads, key_dim, value_dim = (1, 1, 16, 20) if per_channel else (1, 2, 16, 20)
    if DEVICE != "cpu":
        key_heads, heads, key_dim, value_dim = (8, 8, 128, 128) if per_channel else (4, 12, 128, 128)
    length = 75

    def sequence(num_tokens):
        q, k = (torch.randn(num_tokens, key_heads, key_dim).to(dtype) for _ in range(2))
        v, beta = torch.randn(num_tokens, heads, value_dim).to(dtype), torch.rand(num_tokens, heads)
        g = -5 * torch.rand(num_tokens, heads, *((key_dim,) if per_channel else ()))
        return q, k, v, g, beta

    watched, other, drafts = sequence(length), sequence(40), sequence(16)
    whole = storage(heads, key_heads, key_dim, value_dim, per_channel)
    expected = run_cut(watched, whole, [length], ops)
    store = storage(heads, key_heads, key_dim, value_dim, per_channel)
    for name in ("open_k", "open_g", "open_d"):  # null rows read and write buffer 0
        store[name][0] = 0.0

    def step(rows):
        """rows: (inputs, start, open buffer, slot before, slot of the boundary) -> outputs of each."""
        counts = [inputs[0].shape[0] for inputs, *_ in rows]
        out = ops.gated_delta_rule(
            *(torch.cat([inputs[i] for inputs, *_ in rows]) for i in range(5)),
            **store,
            state_in=torch.tensor([row[3] for row in rows], dtype=torch.int32),
            state_out=torch.tensor([[row[4]] for row in rows], dtype=torch.int32),
            open_index=torch.tensor([row[2] for row in rows], dtype=torch.int32),
            row_offsets=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            start_positions=torch.tensor([row[1] for row in rows], dtype=torch.int32),
        )
        return out.split(counts)

    def piece(inputs, start, stop):
        return tuple(x[start:stop] for x in inputs)

    def null(count):
        return (piece(drafts, 0, count), 0, 0, 0, 0)

    wrong = tuple(torch.cat([x[:2], y[:6]]) for x, y in zip(piece(watched, 61, 63), drafts, strict=True))
    got = [step([(piece(other, 0, 33), 0, 2, 0, 0), (piece(watched, 0, 61), 0, 1, 0, 0)])[1]]
    # Eight rows over the boundary, two of them right; then the right ones, over the boundary again.
    got.append(step([(wrong, 61, 1, 0, 3), null(8)])[0][:2])
    got.append(step([null(8), (piece(watched, 63, 71), 63, 1, 0, 3)])[1])
    for start in (71, 72):
        got.append(step([null(1), (piece(watched, start, start + 1), start, 1, 3, 0), null(1)])[1])
    got.append(step([(piece(other, 33, 40), 33, 2, 0, 0), (piece(watched, 73, length), 73, 1, 3, 0)])[1])
    assert torch.equal(torch.cat(got), expected)
    assert torch.equal(store["state"][3], whole["state"][1])


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
