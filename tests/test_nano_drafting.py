"""MTP layers and hidden-state taps: against direct float32 formulas, the oracle's layers, and the model cards."""

from __future__ import annotations

import nano_models
import pytest
import tiny_hybrids
import torch
from hybrid_driver import HybridDriver
from nano_models import GLM, QWEN
from torch.nn import functional

from slimserve.layers.contract import StepInput
from slimserve.ops import Activations, NumericsConfig
from slimserve.quant.decode import dequantize
from slimserve.weights.loader import LoadedModel, load_model

FLOAT = NumericsConfig(cpu_activations=Activations.FLOAT)
CARD = {QWEN: (0.60, 0.87), GLM: (0.57, 0.77)}
"""Share of drafts that are the trunk's own choice, on held-out text and on chat answers, by the model cards."""
OTHER_TEXT = 0.15
"""The cards' held-out text is not here; Python's help topics came out up to 0.10 lower (printed), chats at the card."""
QUESTIONS = (
    "Hello!", "Who are you?", "What is the capital of France?", "Tell me a story about a fox named Mira.",
    "What is 34 + 58?", "What is the capital of Italy?", "Tell me a story about a cat named Leo.", "What is 3 + 4?",
)  # fmt: skip


@pytest.fixture(scope="module", params=[QWEN, GLM])
def drafting(request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    return request.param, load_model(nano_models.whole(request.param), numerics=FLOAT)


@torch.inference_mode()
def run(loaded: LoadedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(trunk hidden, MTP hidden [T - 1, H], the token after each) of one sequence in one piece."""
    config = loaded.model.config
    specs = (*config.caches(torch.float32), *config.drafter_caches(torch.float32))
    blocks = len(tokens) // 64 + 4
    driver = HybridDriver(loaded.model, specs, num_pages=blocks, num_slots=blocks, num_open=3)
    step = driver.input([(driver.new(), tokens[:-1])])
    hidden = loaded.model(step, driver.caches)
    following = torch.tensor(tokens[1:], dtype=torch.int32)
    return hidden, loaded.model.nextn[0](following, hidden, step, driver.caches), following


class Weights:
    """A checkpoint's tensors in float32 by their published names; norms as plain RMS norms with weight + `centre`."""

    def __init__(self, loaded: LoadedModel, prefix: str, centre: float, eps: float) -> None:
        self.source, self.prefix, self.centre, self.eps = loaded.source, prefix, centre, eps

    def __getitem__(self, name: str) -> torch.Tensor:
        return dequantize(self.source.packed(f"{self.prefix}{name}"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self[f"{name}.weight"] + self.centre
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self[f"{name}.weight"].T


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q, k [T, heads, D], v [T, heads, V] -> [T, heads, V]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("hqk,khv->qhv", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def qwen_draft(loaded: LoadedModel, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    config = loaded.model.config
    weights = Weights(loaded, "mtp.", 1.0, config.norm_eps)
    embedded = dequantize(loaded.source.packed("model.language_model.embed_tokens.weight"))[following.long()]
    joined = [weights.norm(embedded, "pre_fc_norm_embedding"), weights.norm(hidden, "pre_fc_norm_hidden")]
    residual = weights.product(torch.cat(joined, -1), "fc")
    x = weights.norm(residual, "layers.0.input_layernorm")
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    own = "layers.0.self_attn."
    q, gate = weights.product(x, f"{own}q_proj").view(-1, heads, 2, dim).unbind(2)
    k = weights.product(x, f"{own}k_proj").view(-1, kv_heads, dim)
    v = weights.product(x, f"{own}v_proj").view(-1, kv_heads, dim)
    half = config.rope.rotary_dim // 2
    angles = torch.arange(len(x))[:, None] / config.rope.theta ** (torch.arange(half) / half)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(y: torch.Tensor) -> torch.Tensor:
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1)

    q, k = rotated(weights.norm(q, f"{own}q_norm")), rotated(weights.norm(k, f"{own}k_norm"))
    k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
    attended = causal(q, k, v, dim**-0.5) * torch.sigmoid(gate)
    residual = residual + weights.product(attended.flatten(1), f"{own}o_proj")
    x = weights.norm(residual, "layers.0.post_attention_layernorm")
    gate, up = (weights.product(x, f"layers.0.mlp.{part}_proj") for part in ("gate", "up"))
    return weights.norm(residual + weights.product(functional.silu(gate) * up, "layers.0.mlp.down_proj"), "norm")


def glm_draft(loaded: LoadedModel, following: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Expanded attention over all tokens: what the layer does while nothing has to be selected."""
    config = loaded.model.config
    weights = Weights(loaded, f"model.language_model.layers.{config.num_layers}.", 0.0, config.norm_eps)
    embedded = dequantize(loaded.source.packed("model.language_model.embed_tokens.weight"))[following.long()]
    joined = torch.cat([weights.norm(embedded, "enorm"), weights.norm(hidden, "hnorm")], -1)
    residual = weights.product(joined, "eh_proj")
    x, shape = weights.norm(residual, "input_layernorm"), config.latent
    own = "self_attn."
    q = weights.product(weights.norm(weights.product(x, f"{own}q_a_proj"), f"{own}q_a_layernorm"), f"{own}q_b_proj")
    latent = weights.norm(weights.product(x, f"{own}kv_a_proj_with_mqa"), f"{own}kv_a_layernorm")
    expanded = weights.product(latent, f"{own}kv_b_proj").view(len(x), shape.num_heads, -1)
    k, v = expanded.split([shape.qk_dim, shape.value_dim], -1)
    attended = causal(q.view(len(x), shape.num_heads, -1), k, v, shape.qk_dim**-0.5)
    residual = residual + weights.product(attended.flatten(1), f"{own}o_proj")
    x = weights.norm(residual, "post_attention_layernorm")
    scores = torch.sigmoid(weights.product(x, "mlp.gate"))
    chosen = (scores + weights["mlp.gate.e_score_correction_bias"]).topk(config.top_k).indices
    mixing = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    mixing = mixing / mixing.sum(-1, keepdim=True) * config.scaling

    def expert(name: str) -> torch.Tensor:
        gate = weights.product(x, f"mlp.{name}.gate_proj").clamp(max=config.limit)
        up = weights.product(x, f"mlp.{name}.up_proj").clamp(-config.limit, config.limit)
        return weights.product(functional.silu(gate) * up, f"mlp.{name}.down_proj")

    routed = sum(mixing[:, e : e + 1] * expert(f"experts.{e}") for e in range(config.num_experts))
    return weights.norm(residual + routed + expert("shared_experts"), "shared_head.norm")


def test_mtp_layer_equals_a_direct_computation(drafting: tuple[str, LoadedModel]) -> None:
    name, loaded = drafting
    tokenizer = nano_models.tokenizer_of(loaded.source.path)
    tokens = tokenizer.encode(nano_models.documentation()[7000:9000])[:200]
    hidden, drafted, following = run(loaded, tokens)
    expected = (qwen_draft if name == QWEN else glm_draft)(loaded, following, hidden)
    error = float((drafted - expected).norm() / expected.norm())
    print(f"{name}: relative error of the draft's hidden states {error:.2e}")
    assert error < 1e-5


@torch.inference_mode()
def agreement(loaded: LoadedModel, tokens: list[int], first: int = 0) -> tuple[int, int]:
    """Of the drafts for positions after `first`: how many are the trunk's argmax there, and how many there are."""
    hidden, drafted, _ = run(loaded, tokens)
    trunk, draft = (loaded.model.logits(x).argmax(-1) for x in (hidden, drafted))
    same = (draft[:-1] == trunk[1:])[first:]
    return int(same.sum()), len(same)


def test_agreement_with_the_trunk(drafting: tuple[str, LoadedModel]) -> None:
    name, loaded = drafting
    tokenizer = nano_models.tokenizer_of(loaded.source.path)
    filler = tokenizer.encode(nano_models.documentation())
    text = [agreement(loaded, filler[start : start + 512]) for start in range(0, 120_000, 15_000)]
    chat = []
    for question in QUESTIONS:
        prompt = tokenizer.encode(f"[gMASK]<sop><|user|>\n{question}<|assistant|>\n", parse_special=True)
        reply = HybridDriver(loaded.model).greedy(prompt, 48)
        end = next((i for i, token in enumerate(reply) if token in tokenizer.end_ids), len(reply) - 1)
        chat.append(agreement(loaded, prompt + reply[: end + 1], len(prompt) - 2))
    shares = [sum(same for same, _ in found) / sum(count for _, count in found) for found in (text, chat)]
    print(f"{name}: drafts that are the trunk's choice, text and chats: {shares[0]:.3f}, {shares[1]:.3f}; {CARD[name]}")
    assert shares[0] > CARD[name][0] - OTHER_TEXT and shares[1] > CARD[name][1] - 0.1


@torch.inference_mode()
def tapped(loaded: LoadedModel, tokens: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, StepInput]:
    driver = HybridDriver(loaded.model)
    step = driver.input([(driver.new(), tokens)])
    found: list[torch.Tensor] = []
    hidden = loaded.model(step, driver.caches, found)
    return found, hidden, step


@pytest.mark.parametrize("kind", ["qwen", "glm"])
def test_taps_are_the_oracles_layer_outputs(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each tap is a layer's completed output, the mean over streams where there are several; the list is in order."""
    oracle = getattr(tiny_hybrids, f"build_{kind}")()
    tensors = getattr(tiny_hybrids, f"{kind}_tensors")(oracle)
    loaded = load_model(tiny_hybrids.save_folder(oracle, tensors, tmp_path_factory.mktemp(kind)), numerics=FLOAT)
    outputs: list[torch.Tensor] = []
    for layer in oracle.text.layers:
        layer.register_forward_hook(
            lambda _module, _inputs, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
    tokens = torch.randint(1, 256, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    oracle.logits(tokens)
    loaded.model.taps = (0, 3, 4, 7)
    found, hidden, _ = tapped(loaded, tokens)
    assert len(found) == 4
    for layer, got in zip(loaded.model.taps, found, strict=True):
        expected = outputs[layer][0] if outputs[layer].dim() > 2 else outputs[layer]  # [T, H] or [T, S, H]
        expected = expected.mean(1) if expected.dim() == 3 else expected
        assert float((got - expected).norm() / expected.norm()) < 1e-4, f"layer {layer}"
    assert torch.equal(loaded.model.norm(found[-1]), hidden), "the last layer's tap is what the final norm reads"
    loaded.model.taps = ()
    found, again, _ = tapped(loaded, tokens)
    assert not found and torch.equal(again, hidden), "taps change nothing"
