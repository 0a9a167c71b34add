"""Triton kernels as entries of the kernel table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slimserve.ops.resolver import Case, KernelEntry, Op
from slimserve.ops.triton import attention, experts, gates, heads, linear, linear_attention, relayout, rows, sparse

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def _float_activations(case: Case) -> str | None:
    if case.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return f"activations of {case.dtype} are not supported"


def _float_or_fp8_cache(case: Case) -> str | None:
    if case.kv_dtype in KV_DTYPES:
        return _float_activations(case)
    return f"a cache of {case.kv_dtype} is not supported"


def _served_weight(case: Case) -> str | None:
    for name in (case.weight_format or "").split("+"):
        if (reason := relayout.refuses(name, case.shape)) is not None:
            return reason
    return _float_activations(case)


def entries() -> tuple[KernelEntry, ...]:
    """Entries of the Triton kernels, preferred first."""
    row_kernels: dict[Op, Callable[..., Any]] = {
        Op.RMS_NORM: rows.rms_norm,
        Op.ADD_RMS_NORM: rows.add_rms_norm,
        Op.SILU_MUL: rows.silu_mul,
        Op.GELU_TANH_MUL: rows.gelu_tanh_mul,
        Op.ROPE: rows.rope,
        Op.LAYER_NORM: sparse.layer_norm,
        Op.GATE_MULTIPLY: gates.gate_multiply,
        Op.LOG_DECAY: gates.log_decay,
        Op.CAUSAL_CONV: linear_attention.causal_conv,
        Op.DELTA_RULE: linear_attention.gated_delta_rule,
        Op.HYPER_PRE: sparse.hyper_pre,
        Op.HYPER_POST: sparse.hyper_post,
        Op.ROUTE: sparse.route,
        Op.UPDATE_POOLS: sparse.update_pools,
        Op.SELECT_POOLS: sparse.select_pools,
    }
    paged: dict[Op, Callable[..., Any]] = {
        Op.WRITE_PAGES: rows.write_pages,
        Op.PAGED_ATTENTION: attention.paged_attention,
        Op.WRITE_LATENTS: gates.write_latents,
        Op.LATENT_ATTENTION: sparse.latent_attention,
    }
    groups = ((row_kernels, _float_activations), (paged, _float_or_fp8_cache))
    found = [
        KernelEntry(op, f"triton {op.value}", refuses, run) for group, refuses in groups for op, run in group.items()
    ]
    found.append(KernelEntry(Op.LINEAR, "triton tiles", _served_weight, linear.TritonLinear))
    found.append(KernelEntry(Op.EXPERTS, "triton grouped tiles", _served_weight, experts.TritonExperts))
    found.append(KernelEntry(Op.HEAD_LINEAR, "triton grouped tiles", _served_weight, heads.TritonHeads))
    return tuple(found)
