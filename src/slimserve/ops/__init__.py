"""The public operations: one call each, served by the kernel that the resolver picked for the device."""

from slimserve.ops.elementwise import (
    add_rms_norm,
    embedding,
    gelu_tanh_mul,
    paged_attention,
    rms_norm,
    rope,
    silu_mul,
    write_pages,
)
from slimserve.ops.explain import explain
from slimserve.ops.linear import expert_linear, linear, prepare_experts, prepare_linear
from slimserve.ops.numerics import Activations, NumericsConfig
from slimserve.ops.resolver import Case, Choice, KernelEntry, KernelRow, Op
from slimserve.ops.weights import ExpertWeights, LinearWeight, PreparedExperts, PreparedLinear

__all__ = [
    "Activations",
    "Case",
    "Choice",
    "ExpertWeights",
    "KernelEntry",
    "KernelRow",
    "LinearWeight",
    "NumericsConfig",
    "Op",
    "PreparedExperts",
    "PreparedLinear",
    "add_rms_norm",
    "embedding",
    "expert_linear",
    "explain",
    "gelu_tanh_mul",
    "linear",
    "paged_attention",
    "prepare_experts",
    "prepare_linear",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_pages",
]
