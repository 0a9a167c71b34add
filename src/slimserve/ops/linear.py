"""Matrix products with packed weights: preparation at load, then one call per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from slimserve.ops.elementwise import gelu_tanh_mul, silu_mul
from slimserve.ops.numerics import NumericsConfig
from slimserve.ops.registry import architecture, entries
from slimserve.ops.resolver import Case, Op, resolve
from slimserve.ops.weights import ExpertWeights, FusedProduct, LinearPart, LinearWeight
from slimserve.quant.tensor import PackedTensor

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prepare_linear(
    parts: Sequence[PackedTensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    device: torch.device | str = "cpu",
    numerics: NumericsConfig | None = None,
) -> LinearWeight:
    """Stack parts [N_i, K] into one weight of sum N_i outputs; formats and scales may differ per part.

    `biases` has one [N_i] tensor or None per part. Raises ValueError where shapes do not fit together and
    RefusalError where no kernel serves a part's format on `device`.
    """
    if not parts:
        raise ValueError("prepare_linear needs at least one part")
    target = torch.device(device)
    chosen = numerics or NumericsConfig()
    in_features = parts[0].shape[-1]
    prepared: list[LinearPart] = []
    start = 0
    for part in parts:
        if len(part.shape) != 2 or part.shape[1] != in_features:
            raise ValueError(f"{part.name or 'a part'} has shape {part.shape}, expected [N, {in_features}]")
        case = Case(
            Op.LINEAR,
            target,
            architecture(target),
            weight_format=part.format.name,
            dtype=chosen.activation_dtype,
            shape=part.shape,
            numerics=chosen,
        )
        choice = resolve(case, entries(target.type))
        stop = start + part.shape[0]
        prepared.append(LinearPart(start, stop, choice.entry.implementation(part, target, chosen), choice))
        start = stop
    bias = _stack_biases(parts, biases, target)
    return LinearWeight(start, in_features, tuple(prepared), bias, _fuse(prepared, bias))


def _fuse(parts: Sequence[LinearPart], bias: torch.Tensor | None) -> FusedProduct | None:
    """One call for all parts, where one kernel class serves them all and can."""
    kinds = {type(part.prepared) for part in parts}
    fuse = getattr(kinds.pop(), "fuse", None) if len(kinds) == 1 else None
    if fuse is None:
        return None
    fused: FusedProduct | None = fuse([part.prepared for part in parts], bias)
    return fused


def _stack_biases(
    parts: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None] | None, device: torch.device
) -> torch.Tensor | None:
    if biases is None or all(bias is None for bias in biases):
        return None
    if len(biases) != len(parts):
        raise ValueError(f"{len(biases)} biases for {len(parts)} parts")
    filled: list[torch.Tensor] = []
    for part, bias in zip(parts, biases, strict=True):
        if bias is not None and tuple(bias.shape) != (part.shape[0],):
            shape = tuple(bias.shape)
            raise ValueError(f"bias of {part.name or 'a part'} has shape {shape}, expected [{part.shape[0]}]")
        filled.append(torch.zeros(part.shape[0]) if bias is None else bias.float().cpu())
    return torch.cat(filled).to(device)


def linear(x: torch.Tensor, weight: LinearWeight, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply x [T, K] with a prepared weight: [T, N] of `out_dtype` (default x's dtype), float32 accumulation.

    The bits of row t are a function of x[t] and the weight alone.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"linear: x has shape {tuple(x.shape)}, expected [T, {weight.in_features}]")
    dtype = out_dtype or x.dtype
    if dtype not in OUT_DTYPES:
        raise ValueError(f"linear: cannot write {dtype}; use float32, bfloat16 or float16")
    # new_empty of plain integers is parsed a microsecond faster than empty of a tuple with dtype and device
    out = x.new_empty(x.shape[0], weight.out_features) if dtype is x.dtype else _empty(x, weight.out_features, dtype)
    rows = x.contiguous()
    if weight.fused is not None:
        weight.fused(rows, out)
        return out
    for part in weight.parts:
        part.prepared(rows, out[:, part.start : part.stop])
    if weight.bias is not None:
        out += weight.bias
    return out


def prepare_table(
    packed: PackedTensor, *, device: torch.device | str = "cpu", numerics: NumericsConfig | None = None
) -> PackedTensor | LinearWeight:
    """An embedding table [V, H] as `embedding` reads it on `device`.

    Where the device's matrix kernel can decode single rows, the table is its prepared weight, which a tied head
    multiplies with as it is; elsewhere it is the packed tensor itself.
    """
    target = torch.device(device)
    if target.type == "cuda":
        weight = prepare_linear([packed], device=target, numerics=numerics)
        if weight.row_decoder is not None:
            return weight
    scales = {name: scale.to(target) for name, scale in packed.scales.items()}
    return replace(packed, data=packed.data.to(target), scales=scales)


def gated_mlp(
    x: torch.Tensor, gate_up: LinearWeight, down: LinearWeight, *, gelu: bool = False, limit: float | None = None
) -> torch.Tensor:
    """down(act(gate) * up) for x [T, K]: [T, N] of x's dtype; gate_up stacks gate over up, `limit` as in `silu_mul`.

    act is SiLU, or GELU in its tanh form. One call where the kernels of both weights offer it.
    """
    gated = getattr(gate_up.fused, "gated", None)
    if gated is not None and down.fused is not None and type(down.fused) is type(gate_up.fused):
        if x.dim() != 2 or x.shape[1] != gate_up.in_features or gate_up.out_features != 2 * down.in_features:
            raise ValueError(f"gated_mlp: x {tuple(x.shape)} does not fit {gate_up.in_features} inputs")
        kind = 2 if gelu else 0 if limit is None else 1
        result: torch.Tensor = gated(x.contiguous(), down.fused, kind, limit or 0.0)
        return result
    both = linear(x, gate_up)  # [T, 2F]
    return linear(gelu_tanh_mul(both) if gelu else silu_mul(both, limit), down)


def _empty(x: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((x.shape[0], columns), dtype=dtype, device=x.device)


def prepare_experts(
    gate_up: Sequence[PackedTensor],
    down: PackedTensor,
    *,
    device: torch.device | str = "cpu",
    numerics: NumericsConfig | None = None,
) -> ExpertWeights:
    """Prepare routed experts: gate_up [E, 2F, K] (gate rows first) or the pair gate, up of [E, F, K]; down [E, H, F].

    Raises ValueError where shapes do not fit and RefusalError where no kernel serves the formats on `device`.
    """
    target = torch.device(device)
    chosen = numerics or NumericsConfig()
    num_experts, out_features, intermediate = down.shape
    rows = sum(part.shape[1] for part in gate_up)
    if len(gate_up) not in (1, 2) or rows != 2 * intermediate or any(p.shape[0] != num_experts for p in gate_up):
        shapes = ", ".join(str(part.shape) for part in gate_up)
        raise ValueError(f"experts: gate_up {shapes} does not fit down {down.shape}")
    formats = dict.fromkeys(part.format.name for part in (*gate_up, down))
    case = Case(
        Op.EXPERTS,
        target,
        architecture(target),
        weight_format="+".join(formats),
        dtype=chosen.activation_dtype,
        shape=down.shape,
        numerics=chosen,
    )
    choice = resolve(case, entries(target.type))
    prepared = choice.entry.implementation(tuple(gate_up), down, target, chosen)
    return ExpertWeights(num_experts, gate_up[0].shape[2], intermediate, out_features, prepared, choice)


def expert_linear(
    x: torch.Tensor,
    experts: ExpertWeights,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """Sum over slots j of weights[t, j] * down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t, j]: [T, H].

    x [T, K]; expert_ids [T, k] integers, clamped to valid ids; weights [T, k]. `limit` clamps gate from above
    and up on both sides first. Slots are summed in their order, in float32.
    """
    if x.dim() != 2 or x.shape[1] != experts.in_features:
        raise ValueError(f"expert_linear: x has shape {tuple(x.shape)}, expected [T, {experts.in_features}]")
    if expert_ids.shape != weights.shape or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_linear: ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} do not fit")
    ids = expert_ids.clamp(0, experts.num_experts - 1).contiguous()
    result: torch.Tensor = experts.prepared(x.contiguous(), ids, weights.float().contiguous(), limit)
    return result
