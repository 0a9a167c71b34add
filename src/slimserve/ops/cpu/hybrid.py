"""Typed calls of the C++ kernels of hybrid models; signatures are those of `slimserve.ops.hybrid`.

Activations are float32 inside: other dtypes are widened on the way in and rounded once on the way out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from slimserve.ops.cpu.library import DTYPES, load

_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


def _structure(name: str, pointers: str, sizes: str, floats: str = "", flags: str = "") -> type[ctypes.Structure]:
    """A C struct of pointers, then int64 sizes, then floats, then int flags, in the order of the C++ declaration."""
    kinds = ((pointers, _POINTER), (sizes, _INT64), (floats, _FLOAT), (flags, _INT))
    fields = [(field, kind) for names, kind in kinds for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_DELTA_RULE = _structure(
    "DeltaRule",
    "q k v g beta out state open_k open_g open_d state_in state_out open_index row_offsets start_positions",
    "rows key_heads heads key_dim value_dim ring crossings",
    flags="per_channel tiled",
)
_CONVOLUTION = _structure(
    "Convolution",
    "x weight out open_conv conv_tail state_in state_out open_index row_offsets start_positions",
    "rows tokens channels width ring crossings",
)
_POOLS = _structure(
    "Pools",
    "keys gates ape pages raw block_table open_index row_offsets start_positions",
    "rows pool dim ring blocks",
    flags="page_type",
)
_SELECTION = _structure(
    "Selection",
    "queries head_weights pages block_table row_offsets start_positions chosen",
    "tokens heads dim pool top_pools blocks",
    "scale",
    "page_type",
)
_LATENT = _structure(
    "LatentAttention",
    "q latent block_table pools row_offsets start_positions out",
    "tokens heads dim pool num_pools blocks",
    "scale",
    "latent_type",
)
_HYPER_PRE = _structure(
    "HyperPre",
    "streams mixes base scale collapsed post comb",
    "tokens count hidden iterations",
    "norm_eps eps",
)
_HYPER_POST = _structure("HyperPost", "streams block_out post comb out", "tokens count hidden")
_ROUTING = _structure("Routing", "logits bias ids weights", "tokens experts top_k", "scaling", "normalise")
_GATE = _structure("Gate", "x gate out", "n", flags="silu")
_LOG_DECAY = _structure("LogDecay", "u bias rate out", "tokens heads width", "lower_bound", "bounded")
_LAYER_NORM = _structure("LayerNorm", "x weight bias out", "rows size", "eps")


def _call(name: str, structure: type[ctypes.Structure], *values: torch.Tensor | int | float | None) -> None:
    """Fill the struct in its order and call the kernel; tensors must be contiguous and outlive the call."""
    arguments = structure(*(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values))
    function: Callable[..., None] = getattr(load(), name)
    function(ctypes.byref(arguments))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def _int32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.int32).contiguous()


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    open_conv: torch.Tensor,
    conv_tail: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> torch.Tensor:
    """See ops.hybrid.causal_conv; open_conv and conv_tail are float32."""
    num_tokens, channels = x.shape
    wide, taps = _wide(x), _wide(weight)
    out = torch.empty(num_tokens, channels)
    index = [_int32(t) for t in (state_in, state_out, open_index, row_offsets, start_positions)]
    _call(
        "slim_convolution", _CONVOLUTION, wide, taps, out, open_conv, conv_tail, *index,
        index[3].numel() - 1, num_tokens, channels, weight.shape[1], open_conv.shape[1], index[1].shape[1],
    )  # fmt: skip
    return out.to(x.dtype)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    open_k: torch.Tensor,
    open_g: torch.Tensor,
    open_d: torch.Tensor,
    state_in: torch.Tensor,
    state_out: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    tiled: bool = False,
) -> torch.Tensor:
    """See ops.hybrid.gated_delta_rule; all storage is float32."""
    num_tokens, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[1], q.shape[2]
    inputs = [_wide(t) for t in (q, k, v, g, beta)]
    out = torch.empty(num_tokens, heads, value_dim)
    index = [_int32(t) for t in (state_in, state_out, open_index, row_offsets, start_positions)]
    _call(
        "slim_delta_rule", _DELTA_RULE, *inputs, out, state, open_k, open_g, open_d, *index,
        index[3].numel() - 1, key_heads, heads, key_dim, value_dim, open_k.shape[1], index[1].shape[1],
        int(g.dim() == 3), int(tiled),
    )  # fmt: skip
    return out


def update_pools(
    keys: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    pages: torch.Tensor,
    raw: torch.Tensor,
    block_table: torch.Tensor,
    open_index: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
) -> None:
    """See ops.hybrid.update_pools; raw is float32, pages float32 or bfloat16."""
    index = [_int32(t) for t in (block_table, open_index, row_offsets, start_positions)]
    inputs = [_wide(t) for t in (keys, gates, ape)]
    _call(
        "slim_update_pools", _POOLS, *inputs, pages, raw, *index,
        index[2].numel() - 1, ape.shape[0], ape.shape[1], raw.shape[1], index[0].shape[1], DTYPES[pages.dtype],
    )  # fmt: skip


def select_pools(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    top_pools: int,
    scale: float,
    max_context: int,  # bounds grids; a loop here runs to what is visible
) -> torch.Tensor:
    """See ops.hybrid.select_pools."""
    num_tokens, heads, dim = queries.shape
    index = [_int32(t) for t in (block_table, row_offsets, start_positions)]
    inputs = [_wide(queries), _wide(head_weights)]
    chosen = torch.empty(num_tokens, top_pools, dtype=torch.int32)
    _call(
        "slim_select_pools", _SELECTION, *inputs, pages, *index, chosen,
        num_tokens, heads, dim, 64 // pages.shape[1], top_pools, index[0].shape[1], scale, DTYPES[pages.dtype],
    )  # fmt: skip
    return chosen


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    block_table: torch.Tensor,
    pools: torch.Tensor | None,
    row_offsets: torch.Tensor,
    start_positions: torch.Tensor,
    *,
    scale: float,
    pool: int,
    max_context: int,  # bounds grids; a loop here runs to what is visible
) -> torch.Tensor:
    """See ops.hybrid.latent_attention."""
    num_tokens, heads, dim = q.shape
    index = [_int32(t) for t in (block_table, row_offsets, start_positions)]
    wide = _wide(q)
    listed = None if pools is None else _int32(pools)
    out = torch.empty(num_tokens, heads, dim)
    _call(
        "slim_latent_attention", _LATENT, wide, latent, index[0], listed, index[1], index[2], out,
        num_tokens, heads, dim, pool, 0 if listed is None else listed.shape[1], index[0].shape[1], scale,
        DTYPES[latent.dtype],
    )  # fmt: skip
    return out.to(q.dtype)


def hyper_pre(
    streams: torch.Tensor,
    mixes: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ops.hybrid.hyper_pre."""
    num_tokens, count, hidden = streams.shape
    inputs = [_wide(t) for t in (streams, mixes, base, scale)]
    collapsed, post = torch.empty(num_tokens, hidden), torch.empty(num_tokens, count)
    comb = torch.empty(num_tokens, count, count)
    _call(
        "slim_hyper_pre", _HYPER_PRE, *inputs, collapsed, post, comb,
        num_tokens, count, hidden, iterations, norm_eps, eps,
    )  # fmt: skip
    return collapsed.to(streams.dtype), post, comb


def hyper_post(streams: torch.Tensor, block_out: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """See ops.hybrid.hyper_post."""
    num_tokens, count, hidden = streams.shape
    inputs = [_wide(t) for t in (streams, block_out, post, comb)]
    out = torch.empty(num_tokens, count, hidden)
    _call("slim_hyper_post", _HYPER_POST, *inputs, out, num_tokens, count, hidden)
    return out.to(streams.dtype)


def route(
    logits: torch.Tensor, bias: torch.Tensor, *, top_k: int, normalise: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.hybrid.route."""
    num_tokens, experts = logits.shape
    inputs = [_wide(logits), _wide(bias)]
    ids, weights = torch.empty(num_tokens, top_k, dtype=torch.int32), torch.empty(num_tokens, top_k)
    _call("slim_route", _ROUTING, *inputs, ids, weights, num_tokens, experts, top_k, scaling, int(normalise))
    return ids, weights


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.elementwise.layer_norm."""
    inputs = [_wide(t) for t in (x, weight, bias)]
    out = torch.empty(x.shape)
    _call("slim_layer_norm", _LAYER_NORM, *inputs, out, x.numel() // x.shape[-1], x.shape[-1], eps)
    return out.to(x.dtype)


def gate_multiply(x: torch.Tensor, gate: torch.Tensor, *, silu: bool) -> torch.Tensor:
    """See ops.hybrid.gate_multiply."""
    inputs = [_wide(x), _wide(gate)]
    out = torch.empty(x.shape)
    _call("slim_gate_multiply", _GATE, *inputs, out, x.numel(), int(silu))
    return out.to(x.dtype)


def log_decay(u: torch.Tensor, bias: torch.Tensor, rate: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """See ops.hybrid.log_decay."""
    inputs = [_wide(t) for t in (u, bias, rate)]
    out = torch.empty(u.shape)
    heads = rate.numel()
    bound = 0.0 if lower_bound is None else lower_bound
    _call(
        "slim_log_decay", _LOG_DECAY, *inputs, out,
        u.shape[0], heads, u.numel() // max(1, u.shape[0] * heads), bound, int(lower_bound is not None),
    )  # fmt: skip
    return out
