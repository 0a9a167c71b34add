"""The public operations: one call each, served by the kernel that the resolver picked for the device."""

from slimserve.ops.elementwise import (
    add_rms_norm,
    embedding,
    gelu_tanh_mul,
    layer_norm,
    paged_attention,
    place_heads,
    rms_norm,
    rope,
    silu_mul,
    write_pages,
)
from slimserve.ops.explain import explain
from slimserve.ops.heads import HeadWeight, head_linear, prepare_head_linear
from slimserve.ops.hybrid import (
    causal_conv,
    gate_multiply,
    gated_delta_rule,
    hyper_post,
    hyper_pre,
    latent_attention,
    log_decay,
    route,
    select_pools,
    update_pools,
    write_latents,
)
from slimserve.ops.linear import expert_linear, gated_mlp, linear, prepare_experts, prepare_linear, prepare_table
from slimserve.ops.numerics import Activations, NumericsConfig
from slimserve.ops.resolver import Case, Choice, KernelEntry, KernelRow, Op
from slimserve.ops.weights import ExpertWeights, LinearWeight, PreparedExperts, PreparedLinear

__all__ = [
    "Activations",
    "Case",
    "Choice",
    "ExpertWeights",
    "HeadWeight",
    "KernelEntry",
    "KernelRow",
    "LinearWeight",
    "NumericsConfig",
    "Op",
    "PreparedExperts",
    "PreparedLinear",
    "add_rms_norm",
    "causal_conv",
    "embedding",
    "expert_linear",
    "explain",
    "gate_multiply",
    "gated_delta_rule",
    "gated_mlp",
    "gelu_tanh_mul",
    "head_linear",
    "hyper_post",
    "hyper_pre",
    "latent_attention",
    "layer_norm",
    "linear",
    "log_decay",
    "paged_attention",
    "place_heads",
    "prepare_experts",
    "prepare_head_linear",
    "prepare_linear",
    "prepare_table",
    "rms_norm",
    "rope",
    "route",
    "select_pools",
    "silu_mul",
    "update_pools",
    "write_latents",
    "write_pages",
]
