"""The torch references as entries of the kernel table: they serve what no faster kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimserve.ops.reference import (
    activation,
    attention,
    hyper,
    indexer,
    latent,
    linear,
    linear_attention,
    norms,
    rotary,
    router,
)
from slimserve.ops.resolver import Case, KernelEntry, Op


def _serves(case: Case) -> str | None:
    del case
    return None


def entries() -> tuple[KernelEntry, ...]:
    """One entry per operation, serving every case."""
    implementations: dict[Op, Callable[..., Any]] = {
        Op.LINEAR: linear.ReferenceLinear,
        Op.EXPERTS: linear.ReferenceExperts,
        Op.EMBEDDING: linear.embedding,
        Op.RMS_NORM: norms.rms_norm,
        Op.ADD_RMS_NORM: norms.add_rms_norm,
        Op.LAYER_NORM: norms.layer_norm,
        Op.SILU_MUL: activation.silu_mul,
        Op.GELU_TANH_MUL: activation.gelu_tanh_mul,
        Op.ROPE: rotary.rope,
        Op.WRITE_PAGES: attention.write_pages,
        Op.PAGED_ATTENTION: attention.paged_attention,
        Op.GATE_MULTIPLY: linear_attention.gate_multiply,
        Op.LOG_DECAY: linear_attention.log_decay,
        Op.CAUSAL_CONV: linear_attention.causal_conv,
        Op.DELTA_RULE: linear_attention.gated_delta_rule,
        Op.HYPER_PRE: hyper.hyper_pre,
        Op.HYPER_POST: hyper.hyper_post,
        Op.ROUTE: router.route,
        Op.UPDATE_POOLS: indexer.update_pools,
        Op.SELECT_POOLS: indexer.select_pools,
        Op.WRITE_LATENTS: latent.write_latents,
        Op.LATENT_ATTENTION: latent.latent_attention,
    }
    return tuple(KernelEntry(op, "torch reference", _serves, run) for op, run in implementations.items())
