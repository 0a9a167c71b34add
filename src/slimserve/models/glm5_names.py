"""Names and key spellings of glm5_next in its three containers: HF, and the two GGUF forms.

Form ds4 (`general.architecture` glm5-next) says kda_* and keeps A_log raw; form llama.cpp (glm5next) says ssm_*,
stores -exp(A_log) and lists the KDA layers as those with no key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Naming(Enum):
    """Which container's conventions a config was read from."""

    HF = "hf"
    DS4 = "glm5-next"
    LLAMA_CPP = "glm5next"


@dataclass(frozen=True, slots=True)
class Name:
    """One tensor's name after the layer prefix: HF, ds4 GGUF, llama.cpp GGUF."""

    hf: str
    ds4: str
    llama_cpp: str

    def gguf(self, naming: Naming) -> str:
        """The GGUF name of a form."""
        return self.ds4 if naming is Naming.DS4 else self.llama_cpp


def _same(hf: str, gguf: str) -> Name:
    return Name(hf, gguf, gguf)


KDA = {
    "q": Name("self_attn.q_proj.weight", "kda_q.weight", "attn_q.weight"),
    "k": Name("self_attn.k_proj.weight", "kda_k.weight", "attn_k.weight"),
    "v": Name("self_attn.v_proj.weight", "kda_v.weight", "attn_v.weight"),
    "q_conv": Name("self_attn.q_conv1d.weight", "kda_q_conv.weight", "ssm_conv1d_q.weight"),
    "k_conv": Name("self_attn.k_conv1d.weight", "kda_k_conv.weight", "ssm_conv1d_k.weight"),
    "v_conv": Name("self_attn.v_conv1d.weight", "kda_v_conv.weight", "ssm_conv1d_v.weight"),
    "f_a": Name("self_attn.f_a_proj.weight", "kda_f_a.weight", "ssm_f_a.weight"),
    "f_b": Name("self_attn.f_b_proj.weight", "kda_f_b.weight", "ssm_f_b.weight"),
    "g_a": Name("self_attn.g_a_proj.weight", "kda_g_a.weight", "ssm_g_a.weight"),
    "g_b": Name("self_attn.g_b_proj.weight", "kda_g_b.weight", "ssm_g_b.weight"),
    "beta": Name("self_attn.b_proj.weight", "kda_beta.weight", "ssm_beta.weight"),
    "dt_bias": Name("self_attn.dt_bias", "kda_dt_bias.weight", "ssm_dt.bias"),
    "decay_rate": Name("self_attn.A_log", "kda_a_log.weight", "ssm_a"),
    "o_norm": Name("self_attn.o_norm.weight", "kda_o_norm.weight", "ssm_norm.weight"),
    "o": Name("self_attn.o_proj.weight", "kda_output.weight", "attn_output.weight"),
}
LATENT = {
    "q_a": _same("self_attn.q_a_proj.weight", "attn_q_a.weight"),
    "q_a_norm": _same("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
    "q_b": _same("self_attn.q_b_proj.weight", "attn_q_b.weight"),
    "kv_a": _same("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
    "kv_a_norm": _same("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
    "kv_b": _same("self_attn.kv_b_proj.weight", ""),
    "k_b": _same("", "attn_k_b.weight"),
    "v_b": _same("", "attn_v_b.weight"),
    "o": _same("self_attn.o_proj.weight", "attn_output.weight"),
}
INDEXER = {
    "q_b": _same("self_attn.indexer.wq_b.weight", "indexer.attn_q_b.weight"),
    "k": _same("self_attn.indexer.wk.weight", "indexer.attn_k.weight"),
    "k_norm": _same("self_attn.indexer.k_norm.weight", "indexer.k_norm.weight"),
    "k_norm_bias": _same("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias"),
    "head_weights": _same("self_attn.indexer.weights_proj.weight", "indexer.proj.weight"),
    "ape": Name(
        "self_attn.indexer.index_kpool_compress_ape", "indexer.pool_ape.weight", "indexer_compressor_ape.weight"
    ),
    "gate": Name(
        "self_attn.indexer.index_kpool_compress_gate", "indexer.pool_gate.weight", "indexer_compressor_gate.weight"
    ),
}
HYPER = {
    f"hc_{site}.{part}": _same(f"hc_{site}_{part}", f"hc_{site}_{part}.weight")
    for site in ("attn", "ffn")
    for part in ("fn", "base", "scale")
}
DENSE = {part: _same(f"mlp.{part}_proj.weight", f"ffn_{part}.weight") for part in ("gate", "up", "down")}
ROUTER = {
    "router": _same("mlp.gate.weight", "ffn_gate_inp.weight"),
    "router_bias": _same("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
}
EXPERTS = {part: _same("mlp.experts.{expert}." + f"{part}_proj.weight", f"ffn_{part}_exps.weight")
           for part in ("gate", "up", "down")}  # fmt: skip
SHARED = {part: _same(f"mlp.shared_experts.{part}_proj.weight", f"ffn_{part}_shexp.weight")
          for part in ("gate", "up", "down")}  # fmt: skip
NORMS = {
    "input_norm": _same("input_layernorm.weight", "attn_norm.weight"),
    "mlp_norm": _same("post_attention_layernorm.weight", "ffn_norm.weight"),
}
NEXTN = {
    "eh": _same("eh_proj.weight", "nextn.eh_proj.weight"),
    "embedding_norm": _same("enorm.weight", "nextn.enorm.weight"),
    "hidden_norm": _same("hnorm.weight", "nextn.hnorm.weight"),
    "norm": _same("shared_head.norm.weight", "nextn.shared_head_norm.weight"),
}
