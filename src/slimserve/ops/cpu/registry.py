"""C++ kernels for CPUs as entries of the kernel table; empty where the library cannot be built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from slimserve.ops.cpu import hybrid, rows, weights
from slimserve.ops.cpu.library import instruction_set, load_or_warn
from slimserve.ops.resolver import Case, KernelEntry, Op

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KV_DTYPES = (*_DTYPES, torch.float8_e4m3fn)


def _refuses_dtype(case: Case) -> str | None:
    if case.dtype is not None and case.dtype not in _DTYPES:
        return f"no {case.dtype} rows"
    if case.kv_dtype is not None and case.kv_dtype not in _KV_DTYPES:
        return f"no {case.kv_dtype} pages"
    return None


def _refuses_narrow(case: Case) -> str | None:
    return _refuses_dtype(case) or (None if case.dtype is torch.float32 else "float32 only")


def _refuses_weight(case: Case) -> str | None:
    if case.dtype is not None and case.dtype not in _DTYPES:
        return f"no {case.dtype} rows"
    for name in (case.weight_format or "").split("+"):
        columns = case.shape[-1] if case.shape is not None and case.op is Op.LINEAR else 256
        reason = weights.refuses(name, columns)
        if reason is not None:
            return reason
    return None


@functools.cache
def entries() -> tuple[KernelEntry, ...]:
    """Entries of the C++ library, preferred first."""
    if load_or_warn() is None:
        return ()
    suffix = f"cpu {instruction_set()}"
    row_operations: dict[Op, Callable[..., Any]] = {
        Op.EMBEDDING: rows.embedding,
        Op.RMS_NORM: rows.rms_norm,
        Op.ADD_RMS_NORM: rows.add_rms_norm,
        Op.SILU_MUL: rows.silu_mul,
        Op.GELU_TANH_MUL: rows.gelu_tanh_mul,
        Op.ROPE: rows.rope,
        Op.WRITE_PAGES: rows.write_pages,
        Op.PAGED_ATTENTION: rows.paged_attention,
        Op.LAYER_NORM: hybrid.layer_norm,
        Op.GATE_MULTIPLY: hybrid.gate_multiply,
        Op.LOG_DECAY: hybrid.log_decay,
        Op.CAUSAL_CONV: hybrid.causal_conv,
        Op.DELTA_RULE: hybrid.gated_delta_rule,
        Op.HYPER_PRE: hybrid.hyper_pre,
        Op.HYPER_POST: hybrid.hyper_post,
        Op.ROUTE: hybrid.route,
        Op.UPDATE_POOLS: hybrid.update_pools,
        Op.SELECT_POOLS: hybrid.select_pools,
        Op.LATENT_ATTENTION: hybrid.latent_attention,
    }
    found = [
        KernelEntry(Op.LINEAR, f"{suffix} panels", _refuses_weight, weights.CpuLinear),
        KernelEntry(Op.EXPERTS, f"{suffix} panels", _refuses_weight, weights.CpuExperts),
    ]
    found += [KernelEntry(op, suffix, _refuses_dtype, run) for op, run in row_operations.items()]
    found.append(KernelEntry(Op.PLACE_HEADS, suffix, _refuses_narrow, rows.place_heads))
    return tuple(found)
