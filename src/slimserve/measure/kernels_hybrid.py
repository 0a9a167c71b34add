"""Device kernels of hybrid models at published geometries: delta rule, convolution, latent attention, selection.

    python -m slimserve.measure.kernels_hybrid [--tiny]

Microseconds a call (median of graph replays) for a prompt's step of 512 tokens and decode steps of several rows; the
delta rule also with other slices and warps, whose outputs are compared with the served form's. `--tiny` runs each case
once on whatever is here, without times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.ops.triton import delta_rule, latent, linear_attention, sparse

RING = 80
CONV_RING = 20
POOL = 4
VARIANTS = ((32, 4), (16, 2), (16, 4), (32, 8), (64, 8))
"""(values of a program, warps); the first is served."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One model's linear-attention layers."""

    name: str
    layers: int
    key_heads: int
    heads: int
    per_channel: bool
    dim: int = 128


RECURRENT = (
    Recurrent("Qwen3.5-4B", 24, 16, 32, False),
    Recurrent("Qwen3.8-27B", 48, 16, 48, False),
    Recurrent("GLM-5.3-Flash", 34, 64, 64, True),
)
TINY_RECURRENT = (Recurrent("tiny gated", 1, 1, 2, False, 16), Recurrent("tiny per channel", 1, 1, 1, True, 16))


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of equal length that start at `start`, with a state there."""

    label: str
    rows: int
    q_len: int
    start: int

    def index(self, device: str) -> tuple[torch.Tensor, ...]:
        """state_in, state_out, open_index, row_offsets, start_positions; slot and open buffer of row r are r + 1."""
        base = self.start - self.start % BLOCK_TOKENS
        crossings = (self.start + self.q_len - base) // BLOCK_TOKENS
        own = torch.arange(1, self.rows + 1)
        written = torch.zeros(self.rows, max(1, crossings), dtype=torch.int64)
        if crossings:
            written[:, crossings - 1] = own + self.rows
        starts = torch.full((self.rows,), self.start)
        tensors = (own, written, own, torch.arange(self.rows + 1) * self.q_len, starts)
        return tuple(tensor.to(torch.int32).to(device) for tensor in tensors)


STEPS = (
    Step("prompt, 512", 1, 512, 4096),
    Step("prompt, 512 off a boundary", 1, 512, 4137),
    Step("decode, 1 row", 1, 1, 4096 + 24),
    Step("decode, 1 row, late", 1, 1, 4096 + 60),
    Step("decode, 8 rows", 8, 1, 4096 + 40),
    Step("decode, 32 rows", 32, 1, 4096 + 40),
)
TINY_STEPS = (Step("prompt, 20", 1, 20, 70), Step("decode, 2 rows", 2, 1, 100))


def recurrent_calls(shape: Recurrent, step: Step, device: str) -> tuple[Callable[[], torch.Tensor], ...]:
    """(delta rule, convolution) of one layer on random inputs."""
    tokens, dim = step.rows * step.q_len, shape.dim
    generator = torch.Generator(device).manual_seed(1)
    random = partial(torch.randn, generator=generator, device=device)
    q, k = (random(tokens, shape.key_heads, dim).bfloat16() for _ in range(2))
    v = random(tokens, shape.heads, dim).bfloat16()
    decay = (shape.heads, dim) if shape.per_channel else (shape.heads,)
    g, beta = -random(tokens, *decay).abs(), random(tokens, shape.heads).sigmoid()
    slots, opened = 2 * step.rows + 1, step.rows + 1
    state = random(slots, shape.heads, dim, dim)
    open_k = random(opened, RING, shape.key_heads, dim).bfloat16().float()
    open_g, open_d = -random(opened, RING, *decay).abs(), random(opened, RING, shape.heads, dim)
    channels = (2 * shape.key_heads + shape.heads) * dim
    x, weight = random(tokens, channels).bfloat16(), random(channels, 4)
    open_conv, conv_tail = random(opened, CONV_RING, channels), random(slots, 3, channels)
    index = step.index(device)
    return (
        partial(delta_rule.gated_delta_rule, q, k, v, g, beta, state, open_k, open_g, open_d, *index),
        partial(linear_attention.causal_conv, x, weight, open_conv, conv_tail, *index),
    )


@dataclass(frozen=True, slots=True)
class Sparse:
    """Latent layers of one model."""

    heads: int
    dim: int
    index_heads: int
    index_dim: int
    top_pools: int
    layers: int


GLM = Sparse(64, 512, 32, 128, 512, 11)
TINY_SPARSE = Sparse(3, 32, 4, 16, 3, 1)


def sparse_calls(shape: Sparse, tokens: int, context: int, device: str) -> tuple[Callable[[], torch.Tensor], ...]:
    """(selection, attention) of the last tokens of one sequence, or of one token each of `tokens` sequences."""
    decode = tokens <= 32
    rows, q_len = (tokens, 1) if decode else (1, tokens)
    generator = torch.Generator(device).manual_seed(2)
    random = partial(torch.randn, generator=generator, device=device)
    blocks = -(-context // BLOCK_TOKENS)
    # Sequences share pages: one sequence's cache is what fits, and its size is what is read.
    table = (torch.randperm(blocks, device=device) + 1).to(torch.int32).expand(rows, blocks).contiguous()
    offsets = (torch.arange(rows + 1, device=device) * q_len).to(torch.int32)
    starts = torch.full((rows,), context - q_len, dtype=torch.int32, device=device)
    pages = random(blocks + 1, BLOCK_TOKENS // POOL, shape.index_dim).bfloat16()
    store = random(blocks + 1, BLOCK_TOKENS, shape.dim).bfloat16()
    queries, q = random(tokens, shape.index_heads, shape.index_dim), random(tokens, shape.heads, shape.dim)
    weights = random(tokens, shape.index_heads)
    select = partial(
        sparse.select_pools, queries.bfloat16(), weights, pages, table, offsets, starts,
        top_pools=shape.top_pools, scale=shape.index_dim**-0.5, max_context=context,
    )  # fmt: skip
    attend = partial(
        latent.latent_attention, q.bfloat16(), store, table, select(), offsets, starts,
        scale=shape.dim**-0.5, pool=POOL, max_context=context,
    )  # fmt: skip
    return select, attend


def microseconds(call: Callable[[], torch.Tensor]) -> float:
    """Median of a call in a replayed graph."""
    from slimserve.measure.kernels import time_graph

    return 1e6 * time_graph([call] * 4)[0]


def measure_recurrent(shapes: Sequence[Recurrent], steps: Sequence[Step], device: str, timed: bool) -> None:
    """A table per model: steps against variants of the delta rule, then the convolution."""
    for shape in shapes:
        print(f"{shape.name}: {shape.layers} layers, {shape.heads} heads; values x warps {list(VARIANTS)}, convolution")
        for step in steps:
            served: torch.Tensor | None = None
            found = []
            for delta_rule.VALUE_SLICE, delta_rule.WARPS in VARIANTS if timed else VARIANTS[:1]:
                rule, conv = recurrent_calls(shape, step, device)
                try:
                    out = rule()
                except Exception as reason:
                    found.append(f"failed: {type(reason).__name__}")
                    continue
                served = out if served is None else served
                error = float((out - served).norm() / served.norm())
                if not error < 1e-5:
                    raise AssertionError(f"{shape.name}, {step.label}: a variant's output differs by {error:.1e}")
                found.append(f"{microseconds(rule):.1f}" if timed else "ran")
            delta_rule.VALUE_SLICE, delta_rule.WARPS = VARIANTS[0]
            found.append(f"{microseconds(conv):.1f}" if timed else f"ran, {tuple(conv().shape)}")
            print(f"  {step.label:28} {'  '.join(found)}{' us' if timed else ''}", flush=True)


def measure_sparse(shape: Sparse, tokens: Sequence[int], contexts: Sequence[int], device: str, timed: bool) -> None:
    """Selection and attention of one latent layer."""
    print(f"latent layers ({shape.layers}): selection, attention")
    for context in contexts:
        for count in tokens:
            select, attend = sparse_calls(shape, count, context, device)
            found = [f"{microseconds(call):.1f} us" if timed else str(tuple(call().shape)) for call in (select, attend)]
            print(f"  context {context:7}, {count:3} tokens: {'  '.join(found)}", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, no times")
    tiny = parser.parse_args(given).tiny
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not tiny and device == "cpu":
        raise SystemExit("kernels_hybrid: no CUDA device here; --tiny runs every case once without times")
    measure_recurrent(TINY_RECURRENT if tiny else RECURRENT, TINY_STEPS if tiny else STEPS, device, timed=not tiny)
    if tiny:
        measure_sparse(TINY_SPARSE, (2,), (90,), device, timed=False)
    else:
        measure_sparse(GLM, (1, 32, 512), (2_000, 8_192, 131_072), device, timed=True)


if __name__ == "__main__":
    main()
