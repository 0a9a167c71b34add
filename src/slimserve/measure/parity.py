"""Layer by layer: a model as it serves against the torch references in float32, another container, a recording.

Both sides run the same tokens in one piece through caches of their own; a layer's error is what has gathered up to
its output, so the first row that jumps names the layer at fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from slimserve.cache.budget import CacheDemand, full_budget, plan_cache
from slimserve.cache.manager import CacheManager
from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import CacheDtype
from slimserve.engine.forward import TappedModel
from slimserve.engine.inputs import InputBuffers, InputRow
from slimserve.errors import RefusalError, UsageError
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.measure.prompts import fixed_text
from slimserve.ops import Activations, NumericsConfig
from slimserve.ops.registry import references_only
from slimserve.serve.model_text import model_text
from slimserve.weights.loader import LoadedModel, load_model

EXACT = NumericsConfig(torch.float32, Activations.FLOAT)
"""float32 activations and products of floats."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: where the model lies and how it is computed."""

    path: Path
    device: str = "cpu"
    kv_dtype: CacheDtype = CacheDtype.FLOAT32
    numerics: NumericsConfig = EXACT
    references: bool = False

    def describe(self) -> str:
        """In words."""
        kind = "torch references" if self.references else "serving kernels"
        dtype = str(self.numerics.activation_dtype).removeprefix("torch.")
        exact = self.device != "cpu" or self.references
        products = "" if exact else f", {self.numerics.cpu_activations.value} products"
        return f"{self.path.name} on {self.device}: {kind}, {dtype} activations{products}, {self.kv_dtype.value} caches"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a side computed, on the CPU in float32: every layer's output [T, H], final hidden states, logits [T, V]."""

    layers: tuple[torch.Tensor, ...]
    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer's error: the largest, relative to the largest value; and of all values, relative to their norm."""

    layer: str
    largest: float
    relative: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """Agreement with a recording: tokens preferred, tokens in all, the largest margin elsewhere, the largest difference
    of a recorded log probability."""

    equal: int
    total: int
    margin: float
    difference: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Everything that a comparison found. `argmax_equal` of `tokens` positions prefer the same token; `margin` is how
    much the reference preferred its own elsewhere; `divergence` is the mean Kullback-Leibler divergence, in nats."""

    candidate: str
    reference: str
    tokens: int
    rows: tuple[LayerRow, ...]
    argmax_equal: int
    margin: float
    divergence: float
    recorded: Recorded | None = None
    kernels: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        out = [f"candidate  {self.candidate}", f"reference  {self.reference}"]
        out += [f"kernels    {kernel}" for kernel in self.kernels]
        out.append(f"{self.tokens} tokens; errors relative to the reference's largest value, and norm to norm")
        out += [f"  {row.layer:<10} {row.largest:9.2e}  {row.relative:9.2e}" for row in self.rows]
        out.append(
            f"argmax equal at {self.argmax_equal} of {self.tokens} positions (reference's margin elsewhere at most "
            f"{self.margin:.4f} nat), mean divergence {self.divergence:.2e} nat"
        )
        if self.recorded is not None:
            found = self.recorded
            out.append(
                f"recorded output: {found.equal} of {found.total} tokens, margin elsewhere at most {found.margin:.4f} "
                f"nat, log probabilities within {found.difference:.4f} nat"
            )
        return out


class TracedModel:
    """A loaded side; every call runs one sequence from nothing."""

    def __init__(self, side: Side) -> None:
        self.side = side
        with self._kernels():
            self.loaded: LoadedModel = load_model(side.path, device=side.device, numerics=side.numerics)
        model = self.loaded.model
        if not hasattr(model, "taps"):
            raise RefusalError(f"{self.loaded.architecture.name} models do not hand out their layers' outputs")
        cast(TappedModel, model).taps = tuple(range(model.config.num_layers))

    def _kernels(self) -> Any:
        return references_only() if self.side.references else nullcontext()

    @torch.inference_mode()
    def trace(self, tokens: Sequence[int]) -> Trace:
        """Run `tokens` in one piece; raises UsageError where they exceed the model's context."""
        model, device = self.loaded.model, self.loaded.device
        if len(tokens) > model.config.max_context:
            raise UsageError(f"{len(tokens)} tokens exceed the model's context of {model.config.max_context}")
        specs = tuple(model.config.caches(self.side.kv_dtype.torch))
        context = max(len(tokens) + 1, BLOCK_TOKENS)
        demand = CacheDemand(1, context, len(tokens))
        plan = plan_cache(specs, demand, full_budget(specs, demand))
        storage = CacheStorage(specs, plan, device)
        cache = CacheManager(specs, plan, storage=storage, prefix_caching=False)
        admission = cache.admit(cache.prompt(tokens))
        assert admission is not None and cache.reserve(admission[0], len(tokens)), "the caches were sized for this"
        buffers = InputBuffers(specs, 1, len(tokens), context, device)
        with self._kernels():
            step = buffers.fill_rows([InputRow(admission[0], 0, tokens, len(tokens))], cache)
            tapped: list[torch.Tensor] = []
            hidden = cast(TappedModel, model)(step, storage.layers, tapped)
            logits = model.logits(hidden)
        return Trace(tuple(tap.float().cpu() for tap in tapped), hidden.float().cpu(), logits.float().cpu())


def default_tokens(loaded: LoadedModel, count: int) -> list[int]:
    """The first `count` tokens of the fixed English text, by the model's own tokenizer."""
    text = model_text(loaded.source, loaded.config.vocab_size)
    return text.encode(fixed_text(max(16, count)))[:count]


def _row(name: str, got: torch.Tensor, expected: torch.Tensor) -> LayerRow:
    error = (got - expected).double()
    scale = float(expected.abs().max())
    norm = float(expected.double().norm())
    return LayerRow(name, float(error.abs().max()) / max(scale, 1e-30), float(error.norm()) / max(norm, 1e-30))


def compare_traces(got: Trace, expected: Trace) -> tuple[tuple[LayerRow, ...], int, float, float]:
    """(rows, positions with equal argmax, largest margin elsewhere, mean divergence)."""
    if len(got.layers) != len(expected.layers) or got.logits.shape != expected.logits.shape:
        raise UsageError(
            f"the two models differ in shape: {len(got.layers)} layers and {got.logits.shape[1]} tokens against "
            f"{len(expected.layers)} and {expected.logits.shape[1]}"
        )
    pairs = zip(got.layers, expected.layers, strict=True)
    rows = [_row(f"layer {number}", one, other) for number, (one, other) in enumerate(pairs)]
    rows += [_row("norm", got.hidden, expected.hidden), _row("logits", got.logits, expected.logits)]
    own, oracle = (torch.log_softmax(trace.logits.double(), dim=-1) for trace in (got, expected))
    choice, best = own.argmax(-1), oracle.max(-1)
    lost = best.values - oracle.gather(1, choice[:, None])[:, 0]
    divergence = (oracle.exp() * (oracle - own)).sum(-1).mean()
    return tuple(rows), int((choice == best.indices).sum()), float(lost.max()), float(divergence)


def recorded_agreement(model: TracedModel, prompts: Sequence[dict[str, Any]]) -> Recorded:
    """Teacher-forced agreement with recorded greedy output and its best log probabilities."""
    equal = total = 0
    margin = difference = 0.0
    for case in prompts:
        prompt, output = case["prompt_ids"], case["greedy_ids"]
        logits = model.trace([*prompt, *output[:-1]]).logits[len(prompt) - 1 :]
        for row, token, top in zip(torch.log_softmax(logits, -1), output, case["top5_logprobs"], strict=True):
            choice = int(row.argmax())
            total += 1
            equal += choice == token
            if choice != token:
                margin = max(margin, top[0][1] - dict(top).get(choice, top[-1][1]))
            difference = max(difference, *(abs(float(row[int(t)]) - value) for t, value in top))
    return Recorded(equal, total, margin, difference)


def read_recording(folder: Path) -> list[dict[str, Any]]:
    """The prompts of a reference.json beside a model; none where there is no such file."""
    path = folder / "reference.json"
    if not path.is_file():
        return []
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))["prompts"]
        return [{key: case[key] for key in ("prompt_ids", "greedy_ids", "top5_logprobs")} for case in prompts]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no recording of greedy output ({error})") from error


def parity(
    candidate: Side, reference: Side, num_tokens: int, say: Callable[[str], None] = lambda line: None
) -> ParityReport:
    """Compare two sides over the first `num_tokens` tokens of the fixed text, and the candidate with its recording."""
    say(f"running {candidate.describe()}")
    own = TracedModel(candidate)
    tokens = default_tokens(own.loaded, num_tokens)
    got = own.trace(tokens)
    prompts = read_recording(own.loaded.source.folder)
    recorded = recorded_agreement(own, prompts) if prompts else None
    kernels = tuple(sorted(set(own.loaded.kernels.values())))
    del own
    say(f"running {reference.describe()}")
    rows, equal, margin, divergence = compare_traces(got, TracedModel(reference).trace(tokens))
    return ParityReport(
        candidate.describe(), reference.describe(), len(tokens), rows, equal, margin, divergence, recorded, kernels
    )


def reference_of(candidate: Side) -> Side:
    """The same container through the torch references in float32, on the CPU."""
    return replace(candidate, device="cpu", kv_dtype=CacheDtype.FLOAT32, numerics=EXACT, references=True)
