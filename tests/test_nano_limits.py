"""The trained hybrids at their limits: 32,768 tokens, canaries around every cache, activations that are not finite."""

from __future__ import annotations

import nano_models
import pytest
import torch
from hybrid_driver import HybridDriver
from nano_models import GLM, QWEN

from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.layers.contract import BLOCK_TOKENS
from slimserve.models.contract import CacheKind
from slimserve.ops.reference import indexer, latent
from slimserve.weights.loader import LoadedModel, load_model

LONGEST = 32_768


def load(name: str) -> LoadedModel:
    model = load_model(nano_models.any_form(name))
    if nano_models.is_reference(model):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    return model


class GuardedDriver(HybridDriver):
    """Every buffer stands between two guard units, which like all units that nobody owns must stay as they were."""

    def __init__(self, model, **settings) -> None:  # type: ignore[no-untyped-def]
        super().__init__(model, **settings)
        self.whole: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for spec in self.specs:
            field = {CacheKind.ATTENTION: "attention", CacheKind.LATENT: "latent", CacheKind.INDEXER: "indexer"}
            for layer in spec.layers:
                storage = getattr(self.caches[layer], field.get(spec.kind, "recurrent"))
                for buffer in (*spec.page, *spec.slot, *spec.open):
                    value = getattr(storage, buffer.name)
                    guarded = torch.full((value.shape[0] + 2, *buffer.shape), float("nan")).to(value.dtype)
                    setattr(storage, buffer.name, guarded[1:-1])
                    self.whole.append((f"{spec.name}.{buffer.name}", guarded, guarded[1:-1]))

    def check(self, owned: dict[str, set[int]]) -> None:
        """Units outside `owned` (by "group.buffer") still hold nothing but NaN, owned ones were written."""
        for name, guarded, _ in self.whole:
            touched = {unit - 1 for unit in range(guarded.shape[0]) if not bool(guarded[unit].float().isnan().all())}
            assert touched <= owned[name], f"{name}: units {sorted(touched - owned[name])[:5]} are not the sequence's"
            assert touched == owned[name], f"{name}: units {sorted(owned[name] - touched)[:5]} were never written"


@pytest.mark.parametrize("name", [pytest.param(QWEN, marks=pytest.mark.slow), GLM])
def test_the_longest_sequence(name: str) -> None:
    """A prompt of 32,768 tokens less one, then a token: nothing but the sequence's own units is written, and what the
    last token selects and attends to is what the references say of these caches."""
    loaded, blocks = load(name), LONGEST // BLOCK_TOKENS
    driver = GuardedDriver(
        loaded.model, kv_dtype=torch.bfloat16, num_pages=blocks + 9, num_slots=blocks + 9, num_open=5
    )
    sequence = driver.new()
    tokens = torch.randint(32, 4096, (LONGEST,), generator=torch.Generator().manual_seed(3)).tolist()
    for start in range(0, LONGEST - 1, 1024):
        logits = driver.step([(sequence, tokens[start : min(start + 1024, LONGEST - 1)])])
    assert bool(logits.isfinite().all())
    step = driver.input([(sequence, tokens[-1:])])
    with torch.inference_mode():
        hidden = loaded.model(step, driver.caches)
    assert bool(loaded.model.logits(hidden).isfinite().all())
    owned = {}
    for group, spec in enumerate(driver.specs):
        for buffer in spec.page:
            owned[f"{spec.name}.{buffer.name}"] = set(sequence.pages[group])
        for buffer in spec.slot:
            owned[f"{spec.name}.{buffer.name}"] = set(sequence.slots[1:])
        for buffer in spec.open:
            owned[f"{spec.name}.{buffer.name}"] = {sequence.open_index}
    assert len(sequence.slots) == blocks + 1
    driver.check(owned)
    if hasattr(loaded.model.config, "latent"):
        check_last_selection(loaded, driver, step)


def check_last_selection(loaded: LoadedModel, driver: HybridDriver, step) -> None:  # type: ignore[no-untyped-def]
    """C++ against the torch references for one query at 8,192 pools."""
    from slimserve.ops.cpu import hybrid

    config = loaded.model.config
    cache = driver.caches[config.latent_layers[-1]]
    assert cache.indexer is not None and cache.latent is not None
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(1, config.index_heads, config.index_dim, generator=generator)
    weights = torch.randn(1, config.index_heads, generator=generator)
    settings = {"top_pools": config.top_pools, "scale": config.index_dim**-0.5, "max_context": LONGEST}
    tables = [step.groups[cache.indexer.group].block_table, step.row_offsets, step.start_positions]
    expected = indexer.select_pools(queries, weights, cache.indexer.keys, *tables, **settings)
    assert torch.equal(hybrid.select_pools(queries, weights, cache.indexer.keys, *tables, **settings), expected)
    assert int(expected.max()) > 8_000, "pools at the end must be among the chosen"
    q = torch.randn(1, config.latent.num_heads, config.latent.latent_dim, generator=generator)
    table = step.groups[cache.latent.group].block_table
    for pools in (expected, None):
        places = (q, cache.latent.latent, table, pools, step.row_offsets, step.start_positions)
        scale = {"scale": config.latent.qk_dim**-0.5, "pool": config.pool, "max_context": LONGEST}
        got = hybrid.latent_attention(*places, **scale)
        reference = latent.latent_attention(*places, **scale)
        assert float((got - reference).norm() / reference.norm()) < 1e-5


POISON = 4095


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3e38], ids=str)
@pytest.mark.parametrize("name", [QWEN, GLM])
def test_values_that_are_not_finite(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose activations are spoilt ends with an error; the others keep every bit, and nothing hangs."""
    loaded = load(name)
    model = loaded.model
    embedding = model.embedding

    def spoilt(token_ids: torch.Tensor) -> torch.Tensor:
        found = embedding(token_ids)
        return torch.where((token_ids == POISON)[:, None], torch.full_like(found, value), found)

    config = EngineConfig(
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_sequences=4, max_context=1024, token_budget=256, mixed_prefill_budget=128),
        numerics=loaded.numerics,
    )
    prompts = {f"good{i}": torch.randint(32, 4000, (90 + 110 * i,)).tolist() for i in range(3)}
    clean = answers(Engine(model, config), prompts)
    monkeypatch.setattr(model, "embedding", spoilt)
    spoiled = torch.randint(32, 4000, (330,)).tolist()
    for place in (0, 100, 329):
        bad = [*spoiled[:place], POISON, *spoiled[place + 1 :]]
        engine = Engine(model, config)
        found = answers(engine, {**prompts, "bad": bad})
        assert {name: found[name] for name in prompts} == clean, f"poison at {place} reached another request"
        reason = found["bad"][2]
        assert reason is FinishReason.ERROR or value == 3e38, "spoilt values were given out as text"
        again = answers(engine, {"bad": spoiled, "good": prompts["good2"]})
        assert again["good"] == clean["good2"], "spoilt entries stayed in the cache"
        assert again["bad"][2] is FinishReason.LENGTH


def answers(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, tuple[list[int], list[float], FinishReason]]:
    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        engine.submit(Request(name, list(prompt), sampling, 8, ignore_eos=True, cache_salt=name[:3]))
    found: dict[str, tuple[list[int], list[float], FinishReason]] = {}
    for _ in range(400):
        if not engine.has_work:
            break
        for output in engine.step():
            ids, values, _ = found.get(output.request_id, ([], [], None))
            ids = ids + list(output.token_ids)
            values = values + [entry.logprob for entry in output.logprobs]
            found[output.request_id] = (ids, values, output.finish_reason)
        engine.audit()
    assert not engine.has_work, "the engine hangs"
    return found
