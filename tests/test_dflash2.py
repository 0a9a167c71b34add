"""DFlash2 layer by layer against a float64 reference written from the description, and at work in the engine."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_dflash2
import torch

from slimserve.cache.budget import CacheDemand, full_budget, plan_cache
from slimserve.cache.manager import CacheManager
from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import (
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.engine.inputs import InputBuffers, InputRow
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate.block_drafter import BlockDrafter
from slimserve.engine.step import StepPlan, StepResult
from slimserve.errors import FormatError, RefusalError, SlimServeError, UsageError
from slimserve.models.dflash2 import BlockInput, DFlash2Model
from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model

FLOAT = NumericsConfig(activation_dtype=torch.float32, cpu_activations=Activations.FLOAT)
WINDOW = tiny_dflash2.CONFIG["sliding_window"]


def load(path: Path) -> DFlash2Model:
    model = load_model(path, numerics=FLOAT, drafter=True).model
    assert isinstance(model, DFlash2Model)
    return model


class Bench:
    """Caches for a drafter alone, filled with context rows of random taps."""

    def __init__(
        self, model: DFlash2Model, contexts: list[int], lengths: list[int], tapped: list[torch.Tensor] | None = None
    ) -> None:
        specs = model.config.caches(torch.float32)
        demand = CacheDemand(len(contexts), 1024, 1024)
        plan = plan_cache(specs, demand, full_budget(specs, demand))
        self.storage = CacheStorage(specs, plan, torch.device("cpu"))
        for layer in self.storage.layers:  # what nobody wrote must not matter
            layer.attention.k.fill_(float("nan"))
            layer.attention.v.fill_(float("nan"))
            layer.attention.k[0].zero_(), layer.attention.v[0].zero_()
        cache = CacheManager(specs, plan, storage=self.storage, prefix_caching=False)
        buffers = InputBuffers(specs, len(contexts), 4096, 1024, torch.device("cpu"))
        generator = torch.Generator().manual_seed(sum(contexts))
        width = len(model.config.taps) * model.config.hidden_size
        self.tapped, self.embedded, sequences = [], [], []
        for context, length in zip(contexts, lengths, strict=True):
            admission = cache.admit(cache.prompt(list(range(context))))
            assert admission is not None
            sequences.append(admission[0])
            self.tapped.append(torch.randn(context, width, generator=generator))
            self.embedded.append(torch.randn(length, model.config.hidden_size, generator=generator))
        self.tapped = tapped or self.tapped
        for sequence, known in zip(sequences, self.tapped, strict=True):
            done = 0
            while done < len(known):  # in pieces, as steps bring them
                count = min(37, len(known) - done)
                assert cache.reserve(sequence, done + count)
                step = buffers.fill_rows([InputRow(sequence, done, [0] * count)], cache)
                model.write_context(known[done : done + count], step, self.storage.layers)
                cache.commit(sequence, [0] * count)
                done += count
        rows = []
        for sequence, context, length in zip(sequences, contexts, lengths, strict=True):
            assert cache.reserve(sequence, context + length, length - 1)
            rows.append(InputRow(sequence, context, [0] * length))
        self.block = BlockInput.of(buffers.fill_rows(rows, cache), lengths)


EDGES = [1, 5, 63, 64, WINDOW - 8, WINDOW - 7, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 27, 128, 192, 260]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("full_layer", [False, True])
def test_layer_by_layer_against_float64(tmp_path: Path, causal: bool, full_layer: bool) -> None:
    """Blocks of every length, alone and side by side, before, at and behind the window's edge."""
    config: dict[str, Any] = copy.deepcopy(tiny_dflash2.CONFIG)
    config["is_causal"] = causal
    if full_layer:
        config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    weights = tiny_dflash2.tensors(config)
    model = load(tiny_dflash2.save_folder(tmp_path, weights, config))
    reference = tiny_dflash2.Reference(weights, config)
    contexts = EDGES if not (causal or full_layer) else [5, 64, WINDOW - 4, WINDOW + 27]
    lengths = [2 + (3 * i + 6) % 7 for i in range(len(contexts))]
    bench = Bench(model, contexts, lengths)
    streams = [embedded.double() for embedded in bench.embedded]
    rows = [reference.context(tapped) for tapped in bench.tapped]
    x = torch.cat(bench.embedded)
    for number, layer in enumerate(model.layers):
        x = layer(x, bench.block, bench.storage.layers[number].attention)
        streams = [reference.layer(stream, own, number) for stream, own in zip(streams, rows, strict=True)]
        for context, part, expected in zip(contexts, x.split(lengths), streams, strict=True):
            error = (part.double() - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, f"layer {number}, {context} tokens of context: {error:.1e}"


def test_a_block_does_not_depend_on_its_company(tmp_path: Path) -> None:
    weights = tiny_dflash2.tensors()
    model = load(tiny_dflash2.save_folder(tmp_path, weights))
    contexts, lengths = [30, WINDOW + 30, 64, 7], [8, 4, 8, 2]
    together = Bench(model, contexts, lengths)
    joint = model.hidden(torch.cat(together.embedded), together.block, together.storage.layers).split(lengths)
    for i, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        alone = Bench(model, [context], [length], [together.tapped[i]])
        own = model.hidden(together.embedded[i], alone.block, alone.storage.layers)
        assert torch.equal(own, joint[i]), f"block {i} has other bits alone"


@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_the_selector_walks_as_the_reference_does(tmp_path: Path, container: str) -> None:
    weights = tiny_dflash2.tensors()
    if container == "gguf":
        model = load(tiny_dflash2.save_gguf(tmp_path / "drafter.gguf", weights))
    else:
        model = load(tiny_dflash2.save_folder(tmp_path, weights))
    reference = tiny_dflash2.Reference(weights)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 64, generator=generator)
    logits = 2 * torch.randn(7, 256, generator=generator)
    values, ids = logits.topk(16, dim=-1)
    previous = torch.cat((torch.full((1, 16), 9), ids[:-1]))
    scores = model.transitions(hidden, previous, ids, values)
    place, tokens = 0, []
    for row in range(7):
        place = int(scores[row, place].argmax())
        tokens.append(int(ids[row, place]))
    assert tokens == reference.select(logits.double(), hidden.double(), 9)


def test_both_containers_hold_the_same_drafter(tmp_path: Path) -> None:
    weights = tiny_dflash2.tensors()
    folder = load(tiny_dflash2.save_folder(tmp_path / "folder", weights))
    file = load(tiny_dflash2.save_gguf(tmp_path / "drafter.gguf", weights))
    assert file.config == folder.config
    one, two = Bench(folder, [70], [5]), Bench(file, [70], [5])
    first = folder.hidden(one.embedded[0], one.block, one.storage.layers)
    assert torch.equal(first, file.hidden(two.embedded[0], two.block, two.storage.layers))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"selector_rank": 0}, RefusalError, "DFlash 1"),
        ({"conv_kernel_size": 3}, RefusalError, "conv_kernel_size"),
        ({"target_layer_ids": [6, 1]}, RefusalError, "must rise"),
        ({"target_layer_ids": []}, FormatError, "must list"),
        ({"mask_token_id": 256}, FormatError, "not in the vocabulary"),
        ({"block_size": 1}, FormatError, "block_size is 1"),
        ({"conv_group_size": 7}, FormatError, "no multiple"),
        ({"surprise": 1}, RefusalError, "surprise"),
    ],
)
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[SlimServeError], message: str
) -> None:
    config = copy.deepcopy(tiny_dflash2.CONFIG)
    weights = tiny_dflash2.tensors(config)
    config["dflash_config"] |= change
    with pytest.raises(error, match=message):
        load(tiny_dflash2.save_folder(tmp_path, weights, config))


def test_a_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    config = {**tiny_dflash2.CONFIG, "draft_vocab_size": 100}
    with pytest.raises(RefusalError, match="draft vocabulary of 100 of 256"):
        load(tiny_dflash2.save_folder(tmp_path, tiny_dflash2.tensors(), config))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = tiny_dflash2.tensors()
    del weights["layers.1.mlp_conv.base_kernel"]
    with pytest.raises(FormatError, match=r"layers\.1\.mlp_conv\.base_kernel"):
        load(tiny_dflash2.save_folder(tmp_path, weights))


def test_random_blocks_never_leave_their_rows() -> None:
    """Row positions count within 1 + K actual rows, whatever K."""
    rng = random.Random(3)
    lengths = [rng.randint(2, 8) for _ in range(9)]
    step = type("Step", (), {"positions": torch.arange(sum(lengths))})()
    block = BlockInput.of(step, lengths)
    assert block.from_start.tolist() == [i for length in lengths for i in range(length)]
    assert (block.from_start + block.to_end + 1).tolist() == [length for length in lengths for _ in range(length)]
    assert sorted(t for places in block.by_distance for t in places.tolist()) == list(range(sum(lengths)))


class Recorder:
    """Stands between the engine and its drafter: keeps the tapped rows of each position and every proposal."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.taps = drafter.taps
        self._drafter = drafter
        self.rows: dict[int, torch.Tensor] = {}
        self.proposals: list[tuple[list[int], tuple[int, ...]]] = []

    def observe(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, tapped: list[torch.Tensor]) -> None:
        self._drafter.observe(plan, result, hidden, tapped)
        token = 0
        for row in plan.rows:
            for i in range(row.q_len):
                if row.request.request_id == "watched":
                    self.rows[row.start_position + i] = torch.cat([tap[token] for tap in tapped])
                token += 1

    def propose(self, requests: list[Request], limits: list[int]) -> list[tuple[int, ...]]:
        proposals = self._drafter.propose(requests, limits)
        for request, proposal in zip(requests, proposals, strict=True):
            if request.request_id == "watched":
                self.proposals.append(([*request.prompt_token_ids, *request.output_token_ids], proposal))
        return proposals

    def release(self, request_id: str) -> None:
        self._drafter.release(request_id)


@pytest.fixture(scope="module", params=["qwen", "glm"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    tiny_hybrids = pytest.importorskip("tiny_hybrids", reason="needs transformers")
    oracle = getattr(tiny_hybrids, f"build_{request.param}")()
    tensors = getattr(tiny_hybrids, f"{request.param}_tensors")(oracle)
    folder = tiny_hybrids.save_folder(oracle, tensors, tmp_path_factory.mktemp("target"))
    return load_model(folder, numerics=FLOAT)


def engine_of(target: LoadedModel, companion: DFlash2Model | None, **settings: Any) -> Engine:
    kind = DrafterKind.DFLASH2 if companion is not None else DrafterKind.NONE
    return Engine(
        target.model,
        EngineConfig(
            cache=CacheConfig(dtype=CacheDtype.FLOAT32),
            scheduler=SchedulerConfig(max_sequences=8, max_context=512, token_budget=128, mixed_prefill_budget=64),
            speculation=SpeculationConfig(kind, measured=False, **settings),
            numerics=FLOAT,
        ),
        companion=companion,
    )


def replies(engine: Engine, num_requests: int) -> dict[str, list[int]]:
    rng = random.Random(7)
    for i in range(num_requests):
        prompt = [rng.randrange(1, 250) for _ in range((150, 20, 63, 64, 5, 129, 90, 128)[i % 8])]
        sampling = SamplingParams(temperature=float(i % 2), top_p=0.95, top_k=20, seed=i)
        name = "watched" if not i else f"r{i}"
        engine.submit(Request(name, prompt, sampling, 40, ignore_eos=True))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.audit()
    return found


@pytest.mark.parametrize("num_requests", [1, 9])
def test_in_the_engine_it_proposes_what_the_reference_does(
    target: LoadedModel, tmp_path: Path, num_requests: int
) -> None:
    """Taps, context rows, prefill cuts, rejected drafts and company: proposals are those of float64 on the taps."""
    weights = tiny_dflash2.tensors()
    engine = engine_of(target, load(tiny_dflash2.save_folder(tmp_path, weights)), max_draft=6)
    recorder = Recorder(engine.drafter)  # type: ignore[arg-type]
    engine.scheduler._drafting._drafter = recorder  # type: ignore[union-attr]
    engine.runner._observer = recorder
    drafted = replies(engine, num_requests)
    assert drafted == replies(engine_of(target, None), num_requests), "drafting changed a reply"
    reference = tiny_dflash2.Reference(weights)
    model, mask = target.model, tiny_dflash2.CONFIG["dflash_config"]["mask_token_id"]
    same = 0
    for tokens, proposal in recorder.proposals:
        assert len(proposal) == min(6, 190 - len(tokens) - 1)
        rows = reference.context(torch.stack([recorder.rows[p] for p in range(len(tokens) - 1)]))
        x = model.embedding(torch.tensor([tokens[-1], *[mask] * len(proposal)], dtype=torch.int32)).double()
        for layer in range(3):
            x = reference.layer(x, rows, layer)
        hidden = reference.norm(x, "norm.weight")[1:]
        same += tuple(reference.select(model.logits(hidden.float()).double(), hidden, tokens[-1])) == proposal
    assert same >= 0.95 * len(recorder.proposals) and len(recorder.proposals) > 20, f"{same} proposals agree"


def test_a_hit_restores_the_drafters_window(target: LoadedModel, tmp_path: Path) -> None:
    """The same prompt again: the same hits as without drafting, and the same proposals as at the first time."""
    engine = engine_of(target, load(tiny_dflash2.save_folder(tmp_path, tiny_dflash2.tensors())), max_draft=4)
    plain = engine_of(target, None)
    recorder = Recorder(engine.drafter)  # type: ignore[arg-type]
    engine.scheduler._drafting._drafter = recorder  # type: ignore[union-attr]
    engine.runner._observer = recorder
    rng = random.Random(2)
    for length in (63, 64, 65, 127, 128, 129, 200, 257):
        prompt = [rng.randrange(1, 250) for _ in range(length)]
        proposals = []
        for turn in range(2):
            cached = []
            for each in (engine, plain):
                each.submit(Request("watched", prompt, SamplingParams(temperature=0.0), 9, ignore_eos=True))
                recorder.proposals.clear() if each is engine else None
                while each.has_work:
                    cached += [output.num_cached_tokens for output in each.step()][:1]
            assert set(cached) == {(length - 1) // 64 * 64 if turn else 0}, f"length {length}: cached {cached}"
            proposals.append(list(recorder.proposals))
        assert proposals[0] == proposals[1], f"length {length}: other drafts after a hit"


def test_drafters_that_do_not_fit_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_dflash2.CONFIG)
    config["dflash_config"]["target_layer_ids"] = [1, 3, 9]
    model = load(tiny_dflash2.save_folder(tmp_path / "deep", tiny_dflash2.tensors(config), config))
    with pytest.raises(RefusalError, match="reads layer 9 and the model has 8 layers"):
        engine_of(target, model)
    config = {**tiny_dflash2.CONFIG, "hidden_size": 32}
    model = load(tiny_dflash2.save_folder(tmp_path / "narrow", tiny_dflash2.tensors(config), config))
    with pytest.raises(RefusalError, match="hidden_size of 32 and the model's is 64"):
        engine_of(target, model)
    with pytest.raises(UsageError, match="name its path"):
        Engine(target.model, EngineConfig(speculation=SpeculationConfig(DrafterKind.DFLASH2)))
    with pytest.raises(UsageError, match="is no DFlash2 drafter"):
        engine = EngineConfig(speculation=SpeculationConfig(DrafterKind.DFLASH2))
        Engine(target.model, engine, companion=target.model)
