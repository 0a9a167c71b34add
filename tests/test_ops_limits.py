"""Kernels of hybrids at the lengths that their structures allow: launch limits, 64-bit offsets, canaries.

The C++ kernels run past 262,144 pools at nano widths; on a CUDA device (marked gpu) the Triton kernels run at the
published widths, with caches whose offsets pass 2^31 elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from test_ops_sparse import implementation

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.ops.reference import indexer, linear_attention

POOL = 4


@dataclass(frozen=True)
class Size:
    """Widths and lengths of one run; `spare_pages` stand before the sequence's own, so that offsets grow large."""

    device: str
    context: int
    heads: int
    index_dim: int
    latent_heads: int
    latent_dim: int
    top_pools: int
    spare_pages: int
    kernels: str

    @property
    def blocks(self) -> int:
        return -(-self.context // BLOCK_TOKENS)


PAST_POOLS = 4 * 262_144 + 200
"""Tokens whose pools are more than 262,144."""
SIZES = [
    pytest.param(Size("cpu", PAST_POOLS, 4, 32, 4, 64, 64, 3, "cpu"), id="nano-cpu"),
    # Short, under the interpreter: what the runs on a device below do, proven to run at all.
    pytest.param(Size("cpu", 700, 4, 32, 4, 64, 16, 3, "triton"), id="interpreted"),
    pytest.param(Size("cuda", 131_072, 32, 128, 64, 512, 512, 70_000, "triton"), id="131072", marks=pytest.mark.gpu),
    pytest.param(
        Size("cuda", PAST_POOLS, 32, 128, 64, 512, 512, 9, "triton"), id="past-262144-pools", marks=pytest.mark.gpu
    ),
]


def kernels_of(size: Size):  # type: ignore[no-untyped-def]
    if size.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    if size.device == "cpu" and size.kernels == "triton" and torch.cuda.is_available():
        pytest.skip("Triton kernels run on the device here")
    return implementation(size.kernels)


def table_of(size: Size, generator: torch.Generator) -> torch.Tensor:
    """Scattered pages behind the spare ones, the last of the storage among them: [1, blocks] int32."""
    pages = torch.randperm(size.blocks, generator=generator) + size.spare_pages
    return pages.to(torch.int32)[None].to(size.device)


def row(size: Size, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_offsets, start_positions) of one row that ends with the context."""
    offsets = torch.tensor([0, num_tokens], dtype=torch.int32, device=size.device)
    return offsets, torch.tensor([size.context - num_tokens], dtype=torch.int32, device=size.device)


def pages_like(size: Size, table: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random pages where the sequence owns them, NaN elsewhere."""
    storage = torch.full((size.spare_pages + size.blocks, *shape), float("nan"), dtype=dtype, device=size.device)
    generator = torch.Generator(size.device).manual_seed(5)
    storage[size.spare_pages :] = torch.randn(
        (size.blocks, *shape), generator=generator, device=size.device, dtype=torch.float32
    ).to(dtype)
    return storage


@pytest.mark.parametrize("size", SIZES)
def test_selection_and_attention(size: Size) -> None:
    """The chosen pools are those of a plain sort of all scores; attention over them is a plain softmax."""
    ops, generator = kernels_of(size), torch.Generator().manual_seed(1)
    num_tokens, per_page = 6, BLOCK_TOKENS // POOL
    table = table_of(size, generator)
    offsets, starts = row(size, num_tokens)
    dtype = torch.bfloat16
    pages = pages_like(size, table, per_page, size.index_dim, dtype=dtype)
    queries = torch.randn(num_tokens, size.heads, size.index_dim, generator=generator).to(dtype).to(size.device)
    weights = torch.randn(num_tokens, size.heads, generator=generator).to(size.device)
    settings = {"top_pools": size.top_pools, "scale": size.index_dim**-0.5, "max_context": size.context}
    chosen = ops.select_pools(queries, weights, pages, table, offsets, starts, **settings)
    visible = [(size.context - num_tokens + i + 1) // POOL for i in range(num_tokens)]
    keys = pages[table[0].long()].reshape(-1, size.index_dim).double()
    for i in (0, num_tokens - 1):
        dots = torch.relu(queries[i].double() @ keys[: visible[i]].T * settings["scale"])
        scores = (dots * weights[i].double()[:, None]).sum(0)
        order = scores.sort(descending=True)
        own = scores[chosen[i].long()]
        assert int(chosen[i].min()) >= 0 and int(chosen[i].max()) < visible[i]
        assert bool((chosen[i].diff() > 0).all()), "ascending, none twice"
        # Near the last place float32 may prefer another of nearly equal pools.
        assert float(own.min()) > float(order.values[size.top_pools - 1]) - 1e-3 * float(scores.abs().max())
        assert float(own.sum()) == pytest.approx(float(order.values[: size.top_pools].sum()), rel=1e-4)
    check_attention(size, ops, table, chosen, offsets, starts, visible)


def check_attention(size, ops, table, chosen, offsets, starts, visible) -> None:  # type: ignore[no-untyped-def]
    num_tokens = len(visible)
    storage = pages_like(size, table, BLOCK_TOKENS, size.latent_dim, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    dtype = torch.bfloat16 if size.device == "cuda" else torch.float32
    q = torch.randn(num_tokens, size.latent_heads, size.latent_dim, generator=generator).to(dtype).to(size.device)
    scale = size.latent_dim**-0.5
    got = ops.latent_attention(
        q, storage, table, chosen, offsets, starts, scale=scale, pool=POOL, max_context=size.context
    )
    for i in (0, num_tokens - 1):
        position = size.context - num_tokens + i
        members = (chosen[i].long()[:, None] * POOL + torch.arange(POOL, device=size.device)).flatten()
        tail = torch.arange(visible[i] * POOL, position + 1, device=size.device)
        tokens = torch.cat([members, tail])
        place = table[0, tokens // BLOCK_TOKENS].long()
        latents = storage[place, tokens % BLOCK_TOKENS].double()
        expected = torch.softmax(q[i].double() @ latents.T * scale, -1) @ latents
        error = float((got[i].double() - expected).norm() / expected.norm())
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5), f"token {i}: {error:.1e}"


@pytest.mark.parametrize("size", SIZES)
def test_pools_of_one_long_step(size: Size) -> None:
    """A whole prompt in one launch: every pool of the row, the open rows, and nothing else, is written."""
    ops, generator = kernels_of(size), torch.Generator(size.device).manual_seed(3)
    tokens, dim = min(size.context, 262_144 + 300), size.index_dim
    keys, gates = (torch.randn(tokens, dim, generator=generator, device=size.device) for _ in range(2))
    ape = torch.randn(POOL, dim, generator=generator, device=size.device)
    table = table_of(size, torch.Generator().manual_seed(4))
    pages = torch.full((size.spare_pages + size.blocks, 16, dim), float("nan"), dtype=torch.bfloat16).to(size.device)
    raw = torch.full((4, 20, 2 * dim), float("nan"), device=size.device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=size.device)
    starts = torch.zeros(1, dtype=torch.int32, device=size.device)
    opened = torch.tensor([2], dtype=torch.int32, device=size.device)
    ops.update_pools(keys, gates, ape, pages, raw, table, opened, offsets, starts)
    whole = tokens // POOL
    mixing = torch.softmax((gates[: whole * POOL].view(whole, POOL, dim) + ape).double(), dim=1)
    expected = (mixing * keys[: whole * POOL].view(whole, POOL, dim)).sum(1)
    got = pages[table[0].long()].reshape(-1, dim)
    assert float((got[:whole].double() - expected).norm() / expected.norm()) < 4e-3
    assert bool(got[whole:].isnan().all()) and bool(pages[: size.spare_pages].isnan().all()), "pages of others changed"
    written = raw.isnan().all(-1).logical_not()
    assert written[2].all() and not written[[0, 1, 3]].any()
    last = torch.arange(tokens - 20, tokens, device=size.device)
    assert torch.equal(raw[2, last % 20], torch.cat([keys, gates], 1)[last])


DELTA = [
    pytest.param(("cpu", 4, 4, 32, 6, 3, True), id="nano-cpu"),
    pytest.param(("cuda", 64, 64, 128, 2_200, 3, True), id="kda-past-2^31", marks=pytest.mark.gpu),
    pytest.param(("cuda", 16, 48, 128, 2_800, 3, False), id="gdn-past-2^31", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("case", DELTA)
def test_delta_rule_in_the_last_slots(case: tuple[str, int, int, int, int, int, bool]) -> None:
    """State in slots at the storage's end, 200 tokens in two cuts: the references' values; no other slot changes."""
    device, key_heads, heads, dim, slots, num_open, per_channel = case
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    generator = torch.Generator().manual_seed(6)
    tokens, ring = 200, 80
    q, k = (torch.randn(tokens, key_heads, dim, generator=generator) for _ in range(2))
    v = torch.randn(tokens, heads, dim, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    g = -torch.rand(tokens, heads, *((dim,) if per_channel else ()), generator=generator)

    def storage(count: int, place: str) -> dict[str, torch.Tensor]:
        decay = (num_open, ring, heads, dim) if per_channel else (num_open, ring, heads)
        shapes = {"state": (count, heads, dim, dim), "open_k": (num_open, ring, key_heads, dim), "open_g": decay,
                  "open_d": (num_open, ring, heads, dim)}  # fmt: skip
        return {name: torch.full(shape, float("nan"), device=place) for name, shape in shapes.items()}

    def run(ops, store: dict[str, torch.Tensor], first_slot: int, place: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
        out = []
        for start, stop in ((0, 100), (100, 200)):
            index = {
                "state_in": [first_slot if start else 0],
                "state_out": [[first_slot + 1, first_slot + 2]] if start else [[first_slot]],
                "open_index": [num_open - 1],
                "row_offsets": [0, stop - start],
                "start_positions": [start],
            }
            on_device = {name: torch.tensor(value, dtype=torch.int32, device=place) for name, value in index.items()}
            inputs = [x[start:stop].to(place) for x in (q, k, v, g, beta)]
            out.append(ops.gated_delta_rule(*inputs, **store, **on_device))
        return torch.cat(out)

    if device == "cuda":
        from slimserve.ops.triton import linear_attention as kernels
    else:
        kernels = implementation("cpu")
    store, reference = storage(slots, device), storage(4, "cpu")
    got = run(kernels, store, slots - 3, device).cpu()
    expected = run(linear_attention, reference, 1, "cpu")
    assert float((got - expected).norm() / expected.norm()) < 1e-4
    kept = store["state"][slots - 3 :].cpu()
    assert float((kept - reference["state"][1:]).norm() / reference["state"][1:].norm()) < 1e-4
    assert bool(store["state"][: slots - 3].isnan().all()), "a slot of another sequence changed"
    assert all(bool(store[name][: num_open - 1].isnan().all()) for name in ("open_k", "open_g", "open_d"))


PAST = (1 << 31) + (1 << 20)
"""Elements of a storage whose last entries have offsets that 32 bits do not hold."""


def reserved(*shape: int) -> torch.Tensor:
    """Memory that is asked for and not touched, with an extent in front so that it holds more than PAST bfloat16."""
    per_entry = 1
    for extent in shape:
        per_entry *= extent
    try:
        return torch.empty((PAST // per_entry, *shape), dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine does not lend address space it does not have")


def beside(storages: dict[str, torch.Tensor]) -> list[tuple[dict[str, torch.Tensor], int]]:
    """(storages, index of an entry near the end): the large ones, then copies of three entries."""
    small = {name: torch.empty((3, *storage.shape[1:]), dtype=storage.dtype) for name, storage in storages.items()}
    return [(storages, min(storage.shape[0] for storage in storages.values()) - 1), (small, 2)]


@pytest.mark.parametrize("kind", ["pages", "latents", "pools", "recurrent", "convolution"])
def test_interpreted_offsets_past_32_bits(kind: str) -> None:
    """Entries behind 2^31 elements give the bits that the same entries give in a storage of three."""
    if torch.cuda.is_available():
        pytest.skip("the runs above do this on the device")
    implementation("triton")
    generator = torch.Generator().manual_seed(9)
    results = [run(generator.manual_seed(9)) for run in OFFSET_RUNS[kind]()]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


def _index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _page_runs():  # type: ignore[no-untyped-def]
    from slimserve.ops.triton import attention, rows

    def run(store, last, generator):  # type: ignore[no-untyped-def]
        q, k, v = (torch.randn(5, heads, 64, generator=generator) for heads in (4, 2, 2))
        slots = torch.arange(5) + last * BLOCK_TOKENS
        rows.write_pages(k, store["k"], slots)
        rows.write_pages(v, store["v"], slots)
        settings = {"scale": 0.1, "max_q_len": 5, "max_context": 5}
        return [attention.paged_attention(q, store["k"], store["v"], _index(last)[None], _index(0, 5), _index(0),
                                          **settings)]  # fmt: skip

    storages = {"k": reserved(2, 64, 64), "v": reserved(2, 64, 64)}
    return [partial(run, store, last) for store, last in beside(storages)]


def _latent_runs():  # type: ignore[no-untyped-def]
    from slimserve.ops.triton import gates, sparse

    def run(store, last, generator):  # type: ignore[no-untyped-def]
        q, values = torch.randn(5, 3, 32, generator=generator), torch.randn(5, 32, generator=generator)
        gates.write_latents(values, store["latent"], torch.arange(5) + last * BLOCK_TOKENS)
        return [sparse.latent_attention(q, store["latent"], _index(last)[None], None, _index(0, 5), _index(0),
                                        scale=0.1, pool=POOL, max_context=5)]  # fmt: skip

    return [partial(run, store, last) for store, last in beside({"latent": reserved(64, 32)})]


def _pool_runs():  # type: ignore[no-untyped-def]
    from slimserve.ops.triton import sparse

    def run(store, last, generator):  # type: ignore[no-untyped-def]
        keys, gates = (torch.randn(30, 32, generator=generator) for _ in range(2))
        ape, queries = torch.randn(POOL, 32, generator=generator), torch.randn(30, 16, 32, generator=generator)
        weights, table = torch.rand(30, 16, generator=generator), _index(last)[None]
        for start, stop in ((0, 6), (6, 30)):
            count = stop - start
            sparse.update_pools(keys[start:stop], gates[start:stop], ape, store["pages"], store["raw"], table,
                                _index(last), _index(0, count), _index(start))  # fmt: skip
        chosen = sparse.select_pools(queries, weights, store["pages"], table, _index(0, 30), _index(0), top_pools=3,
                                     scale=1.0, max_context=30)  # fmt: skip
        return [store["pages"][last, :7], store["raw"][last, :10], chosen]

    storages = {"pages": reserved(16, 32), "raw": reserved(20, 64)}
    return [partial(run, store, last) for store, last in beside(storages)]


def _recurrent_runs():  # type: ignore[no-untyped-def]
    from slimserve.ops.triton import linear_attention as kernels

    def run(store, last, generator):  # type: ignore[no-untyped-def]
        q, k, v = (torch.randn(70, 1, 32, generator=generator) for _ in range(3))
        g, beta = -torch.rand(70, 1, generator=generator), torch.rand(70, 1, generator=generator)
        out = [
            kernels.gated_delta_rule(
                *(x[start:stop] for x in (q, k, v, g, beta)), store["state"], store["open_k"], store["open_g"],
                store["open_d"], _index(0), _index(last)[None], _index(last), _index(0, stop - start), _index(start),
            )
            for start, stop in ((0, 40), (40, 70))
        ]  # fmt: skip
        return [*out, store["state"][last]]

    open_rows = reserved(80, 1, 32)
    storages = {"state": reserved(1, 32, 32), "open_k": open_rows, "open_d": reserved(80, 1, 32)}
    storages["open_g"] = torch.empty((open_rows.shape[0], 80, 1))
    return [partial(run, store, last) for store, last in beside(storages)]


def _convolution_runs():  # type: ignore[no-untyped-def]
    from slimserve.ops.triton import linear_attention as kernels

    def run(store, last, generator):  # type: ignore[no-untyped-def]
        x, weight = torch.randn(70, 64, generator=generator), torch.randn(64, 4, generator=generator)
        out = [
            kernels.causal_conv(
                x[start:stop], weight, store["open_conv"], store["conv_tail"], _index(0 if start < 64 else last),
                _index(last)[None], _index(last), _index(0, stop - start), _index(start),
            )
            for start, stop in ((0, 40), (40, 66), (66, 70))
        ]  # fmt: skip
        return [*out, store["conv_tail"][last]]

    storages = {"open_conv": reserved(20, 64), "conv_tail": reserved(3, 64)}
    return [partial(run, store, last) for store, last in beside(storages)]


OFFSET_RUNS = {
    "pages": _page_runs,
    "latents": _latent_runs,
    "pools": _pool_runs,
    "recurrent": _recurrent_runs,
    "convolution": _convolution_runs,
}


def test_references_agree_with_themselves_at_length() -> None:
    """The selection reference, which the tests of kernels lean on, against a plain sort at 70,000 tokens."""
    size = Size("cpu", 70_001, 5, 16, 1, 8, 40, 2, "cpu")
    generator = torch.Generator().manual_seed(7)
    table = table_of(size, generator)
    pages = pages_like(size, table, 16, size.index_dim, dtype=torch.float32)
    offsets, starts = row(size, 2)
    queries, weights = torch.randn(2, 5, 16, generator=generator), torch.randn(2, 5, generator=generator)
    chosen = indexer.select_pools(
        queries, weights, pages, table, offsets, starts, top_pools=40, scale=0.25, max_context=size.context
    )
    keys = pages[table[0].long()].reshape(-1, 16)[: size.context // POOL]
    scores = (torch.relu(queries[1] @ keys.T * 0.25) * weights[1][:, None]).sum(0)
    assert set(chosen[1].tolist()) == set(scores.topk(40).indices.tolist())
