"""Sparse attention, indexer, hyper-connections, router: every implementation against its reference."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, triton_marks

from slimserve.ops.reference import hyper, indexer, latent, norms, router


def implementation(name: str):
    """The module that serves on the CPU (C++), or the Triton kernels where they can run here."""
    if name == "cpu":
        from slimserve.ops.cpu import hybrid
        from slimserve.ops.cpu.library import load_or_warn

        if load_or_warn() is None:
            pytest.skip("the C++ kernels cannot be built here")
        return hybrid
    from slimserve.ops.triton import sparse

    return sparse


pytestmark = pytest.mark.parametrize("name", ["cpu", pytest.param("triton", marks=triton_marks())])


def device_of(name: str) -> str:
    return DEVICE if name == "triton" else "cpu"


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    error = float((got.cpu().double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    assert error < tolerance, f"relative error {error:.2e}"


ROWS = [(0, 7), (3, 1), (5, 30), (130, 2)]
"""(start, q_len) of the rows of a step."""


def layout(generator: torch.Generator):
    starts = torch.tensor([start for start, _ in ROWS], dtype=torch.int32)
    offsets = torch.tensor([0, *(q for _, q in ROWS)], dtype=torch.int32).cumsum(0).to(torch.int32)
    pages = torch.randperm(20, generator=generator)[:12].view(4, 3).to(torch.int32) + 1
    return starts, offsets, pages, torch.tensor([2, 1, 4, 3], dtype=torch.int32)


def test_pools_and_selection(name: str) -> None:
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(1)
    starts, offsets, table, opened = layout(generator)
    num_tokens, pool, dim, heads = int(offsets[-1]), 4, 24, 16
    keys, gates = (torch.randn(num_tokens, dim, generator=generator) for _ in range(2))
    ape = torch.randn(pool, dim, generator=generator)
    pages, raw = torch.randn(24, 16, dim, generator=generator), torch.randn(6, 20, 2 * dim, generator=generator)
    own = [t.clone().to(device) for t in (pages, raw)]
    indexer.update_pools(keys, gates, ape, pages, raw, table, opened, offsets, starts)
    on = [t.to(device) for t in (keys, gates, ape)]
    index = [t.to(device) for t in (table, opened, offsets, starts)]
    ops.update_pools(*on, *own, *index)
    close(own[0], pages)
    assert torch.equal(own[1].cpu(), raw)

    queries = torch.randn(num_tokens, heads, dim, generator=generator)
    weights = torch.randn(num_tokens, heads, generator=generator)
    settings = {"top_pools": 5, "scale": dim**-0.5, "max_context": 132}
    expected = indexer.select_pools(queries, weights, pages, table, offsets, starts, **settings)
    got = ops.select_pools(queries.to(device), weights.to(device), own[0], index[0], index[2], index[3], **settings)
    assert torch.equal(got.cpu(), expected)
    queries[3], weights[9] = float("nan"), float("inf")
    got = ops.select_pools(queries.to(device), weights.to(device), own[0], index[0], index[2], index[3], **settings)
    assert int(got.max()) < 33 and int(got.min()) >= -1

    attended = torch.randn(num_tokens, 3, 40, generator=generator)
    store = torch.randn(24, 64, 40, generator=generator)
    for chosen in (expected, None):
        reference = latent.latent_attention(
            attended, store, table, chosen, offsets, starts, scale=0.2, pool=4, max_context=132
        )
        got = ops.latent_attention(
            attended.to(device), store.to(device), index[0], None if chosen is None else chosen.to(device),
            index[2], index[3], scale=0.2, pool=4, max_context=132,
        )  # fmt: skip
        close(got, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_latents_of_every_cache_dtype(name: str, dtype: torch.dtype) -> None:
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(6)
    starts, offsets, table, _ = layout(generator)
    num_tokens, dim = int(offsets[-1]), 40
    store = torch.randn(24, 64, dim, generator=generator).to(dtype)
    q = torch.randn(num_tokens, 3, dim, generator=generator)
    index = [t.to(device) for t in (table, offsets, starts)]
    expected = latent.latent_attention(q, store, table, None, offsets, starts, scale=0.2, pool=4, max_context=132)
    got = ops.latent_attention(
        q.to(device), store.to(device), index[0], None, index[1], index[2], scale=0.2, pool=4, max_context=132
    )
    close(got, expected)


def test_segments_side_by_side_or_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists give the same bits wherever their segments run, and a list of everything those of no list."""
    if name != "triton":
        pytest.skip("the C++ kernel has no segments")
    from slimserve.ops.triton import latent as kernels

    generator = torch.Generator().manual_seed(12)
    heads, dim = (20, 40) if DEVICE == "cpu" else (64, 512)
    pages = torch.randn(13, 64, dim, generator=generator).to(torch.bfloat16).to(DEVICE)
    table = (torch.randperm(12, generator=generator) + 1).to(torch.int32)[None].to(DEVICE)
    q = torch.randn(2, heads, dim, generator=generator)
    q = (q if DEVICE == "cpu" else q.bfloat16()).to(DEVICE)
    offsets, starts = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 2], [701]))
    chosen = torch.stack([torch.randperm(175, generator=generator)[:80].sort().values for _ in range(2)])
    everything = torch.arange(175).expand(2, 175).contiguous()
    results = []
    for processors in (0, 10_000):
        monkeypatch.setattr(kernels, "multiprocessors", lambda device, processors=processors: processors)
        for pools in (chosen, everything, None):
            listed = None if pools is None else pools.to(torch.int32).to(DEVICE)
            settings = {"scale": 0.2, "pool": 4, "max_context": 703}
            results.append(kernels.latent_attention(q, pages, table, listed, offsets, starts, **settings))
    for one, other in zip(results[:3], results[3:], strict=True):
        assert torch.equal(one, other), "segments side by side"
    assert torch.equal(results[1], results[2]), "all pools, or no list"
    expected = latent.latent_attention(
        q.cpu().float(), pages.cpu(), table.cpu(), chosen.to(torch.int32), offsets.cpu(), starts.cpu(), scale=0.2,
        pool=4, max_context=703,
    )  # fmt: skip
    close(results[0], expected, 2e-6 if DEVICE == "cpu" else 1e-2)


@pytest.mark.parametrize("heads", [5, 16])
def test_selection_does_not_depend_on_the_step(name: str, heads: int) -> None:
    """Tokens of several rows at once, and each alone: the same pools; bfloat16 keys, more pools than vector lanes."""
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(7)
    lengths, dim = [(37, 21), (150, 3), (0, 9)], 24
    offsets = torch.tensor([0, 21, 24, 33], dtype=torch.int32).to(device)
    starts = torch.tensor([start for start, _ in lengths], dtype=torch.int32).to(device)
    table = (torch.randperm(20, generator=generator)[:9].view(3, 3) + 1).to(torch.int32).to(device)
    pages = torch.randn(24, 16, dim, generator=generator).bfloat16().to(device)
    queries = torch.randn(33, heads, dim, generator=generator).to(device)
    weights = torch.randn(33, heads, generator=generator).to(device)
    settings = {"top_pools": 7, "scale": dim**-0.5, "max_context": 153}
    together = ops.select_pools(queries, weights, pages, table, offsets, starts, **settings)
    on_cpu = [t.cpu() for t in (queries, weights, pages, table, offsets, starts)]
    assert torch.equal(together.cpu(), indexer.select_pools(*on_cpu, **settings))
    flat = 0
    for row, (start, count) in enumerate(lengths):
        for position in range(start, start + count):
            alone = ops.select_pools(
                queries[flat : flat + 1], weights[flat : flat + 1], pages, table[row : row + 1],
                torch.tensor([0, 1], dtype=torch.int32, device=device),
                torch.tensor([position], dtype=torch.int32, device=device), **settings,
            )  # fmt: skip
            assert torch.equal(alone[0], together[flat]), f"row {row}, position {position}"
            flat += 1


def test_equal_scores_prefer_the_lower_index(name: str) -> None:
    ops, device = implementation(name), device_of(name)
    pages = torch.zeros(3, 16, 16)
    chosen = ops.select_pools(
        torch.randn(1, 16, 16).to(device), torch.ones(1, 16).to(device), pages.to(device),
        torch.tensor([[1, 2]], dtype=torch.int32).to(device), torch.tensor([0, 1], dtype=torch.int32).to(device),
        torch.tensor([99], dtype=torch.int32).to(device), top_pools=6, scale=1.0, max_context=100,
    )  # fmt: skip
    assert chosen.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_ties_zeros_of_either_sign_infinities_and_nan(name: str) -> None:
    """Small integers as scores, so that most tie: the order is total, and a place is never given twice."""
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(8)
    pages = torch.zeros(12, 16, 16)
    pages[:, :, 0] = torch.randint(-3, 4, (12, 16), generator=generator).float()
    pages[3, 5, 0], pages[4, 6, 0], pages[7, 0, 0] = float("nan"), float("inf"), float("nan")
    table = (torch.randperm(11, generator=generator) + 1).to(torch.int32)[None]
    queries = torch.zeros(3, 16, 16)
    queries[:, 0, 0] = 1.0
    weights = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 16).contiguous()  # relu zeros times -1 are minus zero
    offsets, starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([697], dtype=torch.int32)
    for top in (1, 37, 173, 174):
        settings = {"top_pools": top, "scale": 1.0, "max_context": 700}
        expected = indexer.select_pools(queries, weights, pages, table, offsets, starts, **settings)
        on = [t.to(device) for t in (queries, weights, pages, table, offsets, starts)]
        assert torch.equal(ops.select_pools(*on, **settings).cpu(), expected), f"top {top}"


def test_hyper_connections(name: str) -> None:
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(2)
    streams, out = torch.randn(5, 4, 50, generator=generator), torch.randn(5, 50, generator=generator)
    mixes, base = torch.randn(5, 24, generator=generator), torch.randn(24, generator=generator)
    scale = torch.randn(3, generator=generator)
    settings = {"norm_eps": 1e-5, "eps": 1e-6, "iterations": 20}
    expected = hyper.hyper_pre(streams, mixes, base, scale, **settings)
    got = ops.hyper_pre(*(t.to(device) for t in (streams, mixes, base, scale)), **settings)
    for one, other in zip(got, expected, strict=True):
        close(one, other, 1e-5)
    comb = got[2].double()
    assert (comb.sum(1) - 1).abs().max() < 1e-4, "columns are normalised last"
    close(
        ops.hyper_post(streams.to(device), out.to(device), got[1], got[2]),
        hyper.hyper_post(streams, out, *expected[1:]),
        1e-5,
    )


def test_router_is_total(name: str) -> None:
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(9, 12, generator=generator), torch.randn(12, generator=generator)
    logits[1, 2:5] = logits[1, 2]
    settings = {"top_k": 4, "normalise": True, "scaling": 2.5}
    expected = router.route(logits, bias, **settings)
    got = ops.route(logits.to(device), bias.to(device), **settings)
    assert torch.equal(got[0].cpu(), expected[0])
    close(got[1], expected[1])
    logits[2], logits[3, 4], logits[4] = float("nan"), float("inf"), float("-inf")
    ids, _ = ops.route(logits.to(device), bias.to(device), **settings)
    assert int(ids.min()) >= 0 and int(ids.max()) < 12
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_layer_norm(name: str) -> None:
    ops, device = implementation(name), device_of(name)
    generator = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 50), (50,), (50,)))
    close(ops.layer_norm(*(t.to(device) for t in (x, weight, bias)), 1e-6), norms.layer_norm(x, weight, bias, 1e-6))
