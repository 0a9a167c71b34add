"""Operations over sequence state as cases that can be timed and checked: attention, latent attention, selection, the
delta rule and its convolution, at published or small geometries.

A case is one layer's operation in one step. It counts the bytes that any kernel must move (inputs, outputs, the parts
of caches that are read, what must be kept) and the operations of the plain formula, so that the machine's copy
bandwidth and matrix rate bound its time. Inputs and caches are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from slimserve import ops
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.measure import kernels_oracle as oracle
from slimserve.models.contract import CacheKind
from slimserve.plan.description import Description

RING, CONV_RING = 80, 20
"""Rows of open buffers, as models/recurrent.py has them for convolutions of four taps."""
RECURRENT_BASE = 4096
EXACT_ERROR, ROUNDED_ERROR = 5e-5, 6e-3
"""Relative error allowed of float32 and of bfloat16 outputs."""
TensorDict = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of `count` layers; `window` bounds what a query sees."""

    query: int
    key: int
    width: int
    count: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The linear attention of `count` layers: key heads, value heads, decay per head or per channel, taps."""

    key_heads: int
    heads: int
    per_channel: bool
    count: int
    key_dim: int = 128
    value_dim: int = 128
    taps: int = 4
    tiled: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Sparse:
    """Latent attention of `count` layers over `top_pools` pools, which `index_count` layers select."""

    heads: int
    dim: int
    index_heads: int
    index_dim: int
    top_pools: int
    pool: int
    count: int
    index_count: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's sequence operations, by kind; a count of 0 stands for a geometry that is no model's here."""

    name: str
    heads: tuple[Heads, ...] = ()
    recurrent: tuple[Recurrent, ...] = ()
    sparse: tuple[Sparse, ...] = ()

    @property
    def families(self) -> set[str]:
        """What there is to time."""
        kinds = {("attention",): self.heads, ("latent", "selection"): self.sparse,
                 ("delta-rule", "convolution"): self.recurrent}  # fmt: skip
        return {name for names, shapes in kinds.items() if shapes for name in names}


PUBLISHED = (
    Geometry("Qwen3.5-4B", (Heads(16, 4, 256, 0),), (Recurrent(16, 32, False, 0),)),
    Geometry("Qwen3.8-27B", (Heads(24, 4, 256, 0),), (Recurrent(16, 48, False, 0),)),
    Geometry("GLM-5.3-Flash", (), (Recurrent(64, 64, True, 0),), (Sparse(64, 512, 32, 128, 512, 4, 0, 0),)),
)
SMALL = (
    Geometry("Qwen2.5-0.5B", (Heads(14, 2, 64, 0),)),
    Geometry("Gemma-3-270M", (Heads(4, 1, 256, 0, 512),)),
    Geometry("Qwen3.5-4B", (Heads(16, 4, 256, 0),), (Recurrent(16, 32, False, 0),)),
    Geometry("GLM-5.3-Flash/8", (), (Recurrent(8, 8, True, 0),), (Sparse(8, 512, 4, 128, 512, 4, 0, 0),)),
)
"""For a processor: GLM-5.3-Flash with an eighth of its heads."""
TINY = (
    Geometry(
        "tiny", (Heads(2, 1, 16, 0), Heads(2, 1, 16, 0, 20)),
        (Recurrent(1, 2, False, 0, 16, 16), Recurrent(1, 1, True, 0, 16, 16)), (Sparse(3, 32, 4, 16, 3, 4, 0, 0),),
    ),
)  # fmt: skip
"""Runs every operation in seconds, also in Triton's interpreter; its times say nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of equal length that start at `start`, with their state or pages before it."""

    label: str
    rows: int
    q_len: int
    start: int


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of one layer in one step, `count` times in a model.

    `make`: new random tensors, at other addresses every time. `call`: the public operation on them. `check(before, out,
    after)`: its relative error, of which `allowed` is allowed. `stored`: bytes of caches that every `make` adds.
    updates: the call changes its tensors. redrawn: copies share a store and differ in what they read of it.
    """

    family: str
    what: str
    format: str
    rows: int
    count: int
    num_bytes: int
    operations: float
    stored: int
    make: Callable[[], TensorDict]
    call: Callable[[TensorDict], torch.Tensor]
    check: Callable[[TensorDict, torch.Tensor, TensorDict], float]
    reference: str
    allowed: float
    updates: bool = False
    redrawn: bool = False


def geometry_of(name: str, description: Description, kv_dtype: torch.dtype) -> Geometry:
    """What a model's config and cache table say; recorded architectures without a config have nothing."""
    config = description.config
    heads: list[Heads] = []
    recurrent: list[Recurrent] = []
    sparse: list[Sparse] = []
    caches = () if config is None else description.caches(kv_dtype)
    counts = {spec.kind: len(spec.layers) for spec in caches}
    for spec in caches:
        if spec.kind in (CacheKind.ATTENTION, CacheKind.WINDOW) and hasattr(config, "num_heads"):
            key, _, width = spec.page[0].shape
            heads.append(Heads(config.num_heads, key, width, len(spec.layers), spec.window))
        elif spec.kind is CacheKind.RECURRENT:
            shape, decay = config.recurrent, next(buffer for buffer in spec.open if buffer.name == "open_g")
            recurrent.append(
                Recurrent(
                    shape.key_heads, shape.heads, len(decay.shape) == 3, len(spec.layers), shape.key_dim,
                    shape.value_dim, config.conv_width, shape.tiled,
                )
            )  # fmt: skip
        elif spec.kind is CacheKind.LATENT:
            sparse.append(
                Sparse(
                    config.latent.num_heads, config.latent.latent_dim, config.index_heads, config.index_dim,
                    config.top_pools, config.pool, len(spec.layers), counts.get(CacheKind.INDEXER, 0),
                )
            )  # fmt: skip
    return Geometry(name, tuple(heads), tuple(recurrent), tuple(sparse))


def context_steps(rows: Sequence[int], contexts: Sequence[int], prompt: int) -> Iterator[Step]:
    """Decode steps of every number of rows and, where prompt > 0, the last tokens of a prompt, at every context."""
    for context in contexts:
        yield from (Step(f"decode at {context}", count, 1, context - 1) for count in rows)
        if 0 < prompt < context:
            yield Step(f"prompt {prompt} of {context}", 1, prompt, context - prompt)


def recurrent_steps(rows: Sequence[int], prompt: int) -> Iterator[Step]:
    """Decode steps 40 tokens into a chunk of 64, one that ends a chunk, and prompts at and off a chunk's start."""
    yield from (Step("decode mid-chunk", count, 1, RECURRENT_BASE + 40) for count in rows)
    yield Step("decode at chunk end", rows[0], 1, RECURRENT_BASE + BLOCK_TOKENS - 1)
    if prompt:
        yield Step(f"prompt {prompt}", 1, prompt, RECURRENT_BASE)
        yield Step(f"prompt {prompt} mid-chunk", 1, prompt, RECURRENT_BASE + 41)


FAMILIES = ("attention", "latent", "selection", "delta-rule", "convolution")


def cases(
    geometry: Geometry,
    families: Sequence[str],
    rows: Sequence[int],
    contexts: Sequence[int],
    prompt: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Case]:
    """Every case of the named families of a geometry, smallest contexts first; tensors are made when asked for."""
    build = Builder(device, geometry.name, kv_dtype)
    for step in context_steps(rows, contexts, prompt):
        if "attention" in families:
            yield from (build.attention(shape, step) for shape in geometry.heads)
    for sparse in geometry.sparse:
        for step in context_steps(rows, contexts, prompt):
            if "selection" in families:
                yield build.selection(sparse, step)
            if "latent" in families:
                yield build.latent(sparse, step)
    for shape in geometry.recurrent:
        for step in recurrent_steps(rows, prompt):
            if "delta-rule" in families:
                yield build.delta_rule(shape, step)
            if "convolution" in families:
                yield build.convolution(shape, step)


def _name(dtype: torch.dtype) -> str:
    short = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float32"}
    return short[dtype]


@dataclass(frozen=True, slots=True)
class Builder:
    """Cases of one geometry on one device: activations are bfloat16 on a GPU and float32 on the processor."""

    device: torch.device
    name: str
    kv_dtype: torch.dtype

    @property
    def prefix(self) -> str:
        """The geometry's name before a case's own words; a model's own has none."""
        return f"{self.name} " if self.name else ""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def rounded(self) -> float:
        """Relative error allowed of outputs in this dtype."""
        return EXACT_ERROR if self.dtype is torch.float32 else ROUNDED_ERROR

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers; FP8 by way of bfloat16."""
        small = dtype.itemsize == 1
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16 if small else dtype).to(dtype)

    def int32(self, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """An index on the device."""
        return torch.as_tensor(values).to(torch.int32).to(self.device)

    def pages_index(self, step: Step) -> TensorDict:
        """Index tensors of a step over pages: every row has pages of its own, in no order."""
        blocks = -(-(step.start + step.q_len) // BLOCK_TOKENS)
        return {
            "block_table": self.int32(1 + torch.randperm(step.rows * blocks).view(step.rows, blocks)),
            "row_offsets": self.int32([row * step.q_len for row in range(step.rows + 1)]),
            "start_positions": self.int32([step.start] * step.rows),
        }

    def state_index(self, step: Step) -> TensorDict:
        """Index tensors over states: slot and open buffer of row r are r + 1; the last boundary reached is kept."""
        base = step.start - step.start % BLOCK_TOKENS
        crossings = (step.start + step.q_len - base) // BLOCK_TOKENS
        written = torch.zeros(step.rows, max(1, crossings), dtype=torch.int64)
        own = torch.arange(1, step.rows + 1)
        if crossings:
            written[:, -1] = own + step.rows
        return {
            "state_in": self.int32(own),
            "state_out": self.int32(written),
            "open_index": self.int32(own),
            "row_offsets": self.int32([row * step.q_len for row in range(step.rows + 1)]),
            "start_positions": self.int32([step.start] * step.rows),
        }

    def attention(self, shape: Heads, step: Step) -> Case:
        """Causal attention over pages."""
        context, tokens = step.start + step.q_len, step.rows * step.q_len
        blocks, scale = -(-context // BLOCK_TOKENS), shape.width**-0.5
        pages = (step.rows * blocks + 1, shape.key, BLOCK_TOKENS, shape.width)
        reach = min(context, (shape.window or context) + step.q_len - 1)
        seen = [min(position + 1, shape.window or context) for position in range(step.start, context)]
        item = self.kv_dtype.itemsize

        def make() -> TensorDict:
            return {
                "q": self.random((tokens, shape.query, shape.width), self.dtype),
                "k": self.random(pages, self.kv_dtype),
                "v": self.random(pages, self.kv_dtype),
                **self.pages_index(step),
            }

        def call(t: TensorDict) -> torch.Tensor:
            return ops.paged_attention(
                t["q"], t["k"], t["v"], t["block_table"], t["row_offsets"], t["start_positions"], scale=scale,
                window=shape.window, max_q_len=step.q_len, max_context=context,
            )  # fmt: skip

        window = f", window {shape.window}" if shape.window and shape.window < context else ""
        return Case(
            "attention", f"attention {self.prefix}{shape.query}/{shape.key}x{shape.width}, {step.label}{window}",
            _name(self.kv_dtype), step.rows, shape.count,
            2 * step.rows * reach * shape.key * shape.width * item
            + 2 * tokens * shape.query * shape.width * self.dtype.itemsize,
            4.0 * step.rows * sum(seen) * shape.query * shape.width,
            2 * step.rows * blocks * BLOCK_TOKENS * shape.key * shape.width * item, make, call,
            lambda before, out, after: oracle.attention(before, out, scale, shape.window),
            f"float64, {len(oracle.some(tokens))} of {tokens} tokens", self.rounded,
        )  # fmt: skip

    def listed_pools(self, shape: Sparse, step: Step) -> torch.Tensor:
        """Pools as select_pools gives them, drawn at random: [T, top_pools] int32 ascending, -1 unused."""
        visible = (step.start + 1 + torch.arange(step.q_len, device=self.device)) // shape.pool  # [q]
        most = max(1, (step.start + step.q_len) // shape.pool)
        rank = torch.rand(step.rows, step.q_len, most, device=self.device)
        rank.masked_fill_(torch.arange(most, device=self.device) >= visible[:, None], -1.0)
        taken = rank.topk(min(shape.top_pools, most), dim=-1)
        order = torch.where(taken.values >= 0, taken.indices, most).sort(dim=-1).values
        pools = torch.full((step.rows * step.q_len, shape.top_pools), -1, dtype=torch.int32, device=self.device)
        pools[:, : order.shape[-1]] = torch.where(order < most, order, -1).flatten(0, 1)
        return pools

    def latent(self, shape: Sparse, step: Step) -> Case:
        """Absorbed latent attention over listed pools and the open pool's tail."""
        context, tokens = step.start + step.q_len, step.rows * step.q_len
        blocks, scale, item = -(-context // BLOCK_TOKENS), shape.dim**-0.5, self.kv_dtype.itemsize
        stored = (step.rows * blocks + 1) * BLOCK_TOKENS * shape.dim * item
        positions = range(step.start, context)
        listed = [min(shape.top_pools, (p + 1) // shape.pool) * shape.pool + (p + 1) % shape.pool for p in positions]
        read = min(context, sum(listed))  # of one row: a prompt's tokens may share all that they read
        # Where few tokens of many are read, other lists of one store are as cold as another store.
        shared: TensorDict = {}
        one_store = stored > 8 * step.rows * read * shape.dim * item

        def make() -> TensorDict:
            store = dict(shared)
            if not store:
                store = {"latent": self.random((step.rows * blocks + 1, BLOCK_TOKENS, shape.dim), self.kv_dtype)}
                store.update(self.pages_index(step))
            if one_store:
                shared.update(store)
            q = self.random((tokens, shape.heads, shape.dim), self.dtype)
            return {**store, "q": q, "pools": self.listed_pools(shape, step)}

        def call(t: TensorDict) -> torch.Tensor:
            return ops.latent_attention(
                t["q"], t["latent"], t["block_table"], t["pools"], t["row_offsets"], t["start_positions"],
                scale=scale, pool=shape.pool, max_context=context,
            )  # fmt: skip

        return Case(
            "latent", f"latent {self.prefix}{shape.heads}x{shape.dim}, {step.label}", _name(self.kv_dtype), step.rows,
            shape.count,
            step.rows * read * shape.dim * item + 2 * tokens * shape.heads * shape.dim * self.dtype.itemsize,
            4.0 * step.rows * sum(listed) * shape.heads * shape.dim, 0 if one_store else stored, make, call,
            lambda before, out, after: oracle.latent(before, out, scale, shape.pool),
            f"float64, {len(oracle.some(tokens))} of {tokens} tokens", self.rounded,
            redrawn=one_store,
        )  # fmt: skip

    def selection(self, shape: Sparse, step: Step) -> Case:
        """The indexer's choice among all visible pools."""
        context, tokens = step.start + step.q_len, step.rows * step.q_len
        blocks, scale = -(-context // BLOCK_TOKENS), shape.index_dim**-0.5
        dtype = torch.float32 if self.kv_dtype is torch.float32 else torch.bfloat16  # pooled keys are never fp8
        pages = (step.rows * blocks + 1, BLOCK_TOKENS // shape.pool, shape.index_dim)
        visible = [(position + 1) // shape.pool for position in range(step.start, context)]
        # Where no more pools are visible than are chosen, nothing has to be scored.
        scored = [count for count in visible if count > shape.top_pools]

        def make() -> TensorDict:
            return {
                "queries": self.random((tokens, shape.index_heads, shape.index_dim), self.dtype),
                "weights": self.random((tokens, shape.index_heads)),
                "pages": self.random(pages, dtype),
                **self.pages_index(step),
            }

        def call(t: TensorDict) -> torch.Tensor:
            return ops.select_pools(
                t["queries"], t["weights"], t["pages"], t["block_table"], t["row_offsets"], t["start_positions"],
                top_pools=shape.top_pools, scale=scale, max_context=context,
            )  # fmt: skip

        row = shape.index_dim * dtype.itemsize
        query = shape.index_heads * (shape.index_dim * self.dtype.itemsize + 4)
        every = "" if scored else ", all chosen"
        return Case(
            "selection", f"selection {self.prefix}{shape.index_heads}x{shape.index_dim}, {step.label}{every}",
            _name(dtype), step.rows, shape.index_count,
            step.rows * (max(scored, default=0) * row + len(scored) * query) + 4 * tokens * shape.top_pools,
            2.0 * step.rows * sum(scored) * shape.index_heads * (shape.index_dim + 1),
            step.rows * blocks * (BLOCK_TOKENS // shape.pool) * row, make, call,
            lambda before, out, after: oracle.selection(before, out, scale, shape.top_pools),
            f"float64 scores, {len(oracle.some(tokens))} of {tokens} tokens", EXACT_ERROR,
        )  # fmt: skip

    def delta_rule(self, shape: Recurrent, step: Step) -> Case:
        """Gated delta rule; keeps the state at the last boundary that is reached."""
        tokens, heads, slots, opened = step.rows * step.q_len, shape.heads, 2 * step.rows + 1, step.rows + 1
        decay = (heads, shape.key_dim) if shape.per_channel else (heads,)
        keys, values, decays = shape.key_heads * shape.key_dim, heads * shape.value_dim, prod(decay)

        def make() -> TensorDict:
            return {
                "q": self.random((tokens, shape.key_heads, shape.key_dim), self.dtype),
                "k": self.random((tokens, shape.key_heads, shape.key_dim), self.dtype),
                "v": self.random((tokens, heads, shape.value_dim), self.dtype),
                # Decays of e^-0.05 a token or so: a state is still felt at the end of the chunk that it opens.
                "g": -0.1 * torch.rand((tokens, *decay), device=self.device),
                "beta": self.random((tokens, heads)).sigmoid(),
                "state": self.random((slots, heads, shape.key_dim, shape.value_dim)),
                "open_k": self.random((opened, RING, shape.key_heads, shape.key_dim), self.dtype).float(),
                "open_g": -0.1 * torch.rand((opened, RING, *decay), device=self.device),
                "open_d": self.random((opened, RING, heads, shape.value_dim)),
                **self.state_index(step),
            }

        state = 4 * heads * shape.key_dim * shape.value_dim
        old, kept, written = _open_rows(step)
        per_token = (2 * keys + values) * self.dtype.itemsize + 4 * (decays + heads) + 4 * values
        of_row = state * (1 + written) + 4 * (old + kept) * (keys + decays + values)
        kind = "by channel" if shape.per_channel else "by head"
        return Case(
            "delta-rule",
            f"delta-rule {self.prefix}{shape.key_heads}+{heads}x{shape.value_dim} {kind}, {step.label}",
            _name(self.dtype), step.rows, shape.count, step.rows * of_row + tokens * per_token,
            6.0 * tokens * heads * shape.key_dim * shape.value_dim,
            slots * state + 4 * opened * RING * (keys + decays + values), make,
            partial(_delta_rule, tiled=shape.tiled),
            partial(oracle.delta_rule, tiled=shape.tiled),
            f"float64 recurrence, {len(oracle.some(step.rows, 2))} of {step.rows} rows, "
            f"{len(oracle.some(heads))} of {heads} heads", EXACT_ERROR, updates=True,
        )  # fmt: skip

    def convolution(self, shape: Recurrent, step: Step) -> Case:
        """The short convolution before the delta rule."""
        tokens, channels, before = step.rows * step.q_len, shape.channels, shape.taps - 1
        ring, slots, opened = max(CONV_RING, 16 + shape.taps), 2 * step.rows + 1, step.rows + 1

        def make() -> TensorDict:
            return {
                "x": self.random((tokens, channels), self.dtype),
                "weight": self.random((channels, shape.taps)),
                "open_conv": self.random((opened, ring, channels), self.dtype).float(),
                "conv_tail": self.random((slots, before, channels), self.dtype).float(),
                **self.state_index(step),
            }

        _, kept, written = _open_rows(step)
        # The inputs before the first token come from the open rows or, at a chunk's start, from the kept tail.
        rows_of = before + min(kept, before) + before * written
        return Case(
            "convolution", f"convolution {self.prefix}{channels}x{shape.taps}, {step.label}", _name(self.dtype),
            step.rows, shape.count,
            2 * tokens * channels * self.dtype.itemsize + 4 * channels * (shape.taps + step.rows * rows_of),
            2.0 * tokens * channels * shape.taps, 4 * channels * (opened * ring + slots * before), make, _convolution,
            oracle.convolution, f"float64, {len(oracle.some(step.rows, 2))} of {step.rows} rows", self.rounded,
            updates=True,
        )  # fmt: skip


def _open_rows(step: Step) -> tuple[int, int, int]:
    """Of one row: kept rows of its chunk that are read, new rows that stay open, and states that are written."""
    old, end = step.start % BLOCK_TOKENS, step.start + step.q_len
    crossed = (step.start - old) + BLOCK_TOKENS <= end
    return old, end % BLOCK_TOKENS if crossed else step.q_len, int(crossed)


_INDEX = ("state_in", "state_out", "open_index", "row_offsets", "start_positions")


def _delta_rule(t: TensorDict, tiled: bool) -> torch.Tensor:
    named = ("q", "k", "v", "g", "beta", "state", "open_k", "open_g", "open_d", *_INDEX)
    return ops.gated_delta_rule(*(t[name] for name in named), tiled=tiled)


def _convolution(t: TensorDict) -> torch.Tensor:
    return ops.causal_conv(*(t[name] for name in ("x", "weight", "open_conv", "conv_tail", *_INDEX)))
