"""The memory plan adds up, its answers hold at their edges, and the floor counts what moves."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import nano_models
import pytest
import tiny_dflash2
import tiny_synthetic
import torch
from fake_device import Allocator, Watch

from slimserve import hardware as hardware_module
from slimserve.cache.budget import CacheDemand, plan_cache
from slimserve.engine.config import (
    Acceptance,
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    NumericsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.engine.loop import Engine
from slimserve.engine.memory import MemoryProbe, draw_widest
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate.model_drafter import ModelDrafter
from slimserve.errors import UsageError
from slimserve.hardware import Accelerator, DeviceKind, Hardware, format_bytes, parse_bytes, pretend
from slimserve.models.format_map import FormatRule, parameter_bytes, parse_layers
from slimserve.plan.compare import compare, comparison_lines
from slimserve.plan.description import Description, describe_config, describe_file, describe_source
from slimserve.plan.floor import distinct_experts, step_floor
from slimserve.plan.memory import DeviceMemory, MemoryPlan, plan_json, plan_memory
from slimserve.plan.weights import made_terms, weight_terms
from slimserve.profiles.planning import admit, fitted, plan_profile
from slimserve.profiles.registry import find_record
from slimserve.profiles.resolve import Origin, describe_record, resolve
from slimserve.weights.loader import LoadedModel, load_model, load_source
from slimserve.weights.synthetic import lay_out

GIB = 1 << 30
GPU = DeviceMemory("cuda", 32 * GIB, 32 * GIB)


def description(name: str) -> Description:
    return describe_record(find_record(name))


def engine(context: int = 8192, sequences: int = 8, **cache: Any) -> EngineConfig:
    return EngineConfig(
        device="cuda",
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_sequences=sequences, max_context=context, token_budget=2048),
        numerics=NumericsConfig(activation_dtype=torch.bfloat16),
    )


SHAPES = [
    ("qwen25-coder-0.5b", 8192, 8),
    ("gemma3-270m", 32768, 4),
    ("qwen35-4b", 32768, 12),
    ("qwen38-nvfp4-1", 4096, 4),
    ("nano-glm5-next", 4096, 8),
]


def plan(name: str, context: int, sequences: int, memory: DeviceMemory = GPU, **cache: Any) -> MemoryPlan:
    return plan_memory(description(name), engine(context, sequences, **cache), memory)


@pytest.mark.parametrize("name", ["nano-qwen3_5", "smollm2-135m"])
def test_more_memory_never_gives_much_less_cache(name: str) -> None:
    """What the allocator rounds up depends on the caches' counts; looking for them must neither give up nor overshoot.

    Memory may stay idle: tensors of a little more than a third of 20 MiB take a half of it each.
    """
    resolved = resolve(name, device="cuda", hardware=pretend(hardware_module.detect(), gpu_memory=8 << 30))
    most, budgets = 0, []
    for step in range(60):
        size = (1900 << 20) + step * (37 << 20) + 12345 * step
        memory = DeviceMemory("cuda", size, size, 1, "gpu0")
        result = plan_profile(resolved, memory)
        assert result.fits and result.cache is not None
        total = sum(t.num_bytes for t in result.terms if t.device == "gpu0")
        assert total <= size
        budgets.append(result.cache.budget_bytes)
        assert result.cache.budget_bytes >= 0.97 * most, (size, budgets[-2:])
        most = max(most, result.cache.budget_bytes)
        idle = size - total
        print(f"{name} {size >> 20} MiB: caches {result.cache.budget_bytes >> 20} MiB, {idle >> 20} MiB idle")
        assert result.cache.budget_bytes > 0.6 * (result.cache.budget_bytes + idle) or result.cache.concurrency >= 32
    assert len(set(budgets)) > 10


@pytest.mark.parametrize(("name", "context", "sequences"), SHAPES)
def test_terms_add_up_to_the_engines_own_split(name: str, context: int, sequences: int) -> None:
    result = plan(name, context, sequences)
    assert result.fits and result.cache is not None
    model = description(name)
    held = [t for t in result.terms if t.name.startswith(("weights.", "drafter.")) and t.name != "weights.locks"]
    weights = sum(t.num_bytes for t in held)
    # On a device, matrices are held in their kernels' layout: a little more than stored, more so where they are small.
    print(f"{name}: {weights / model.weight_bytes:.3f} times the stored bytes")
    assert model.weight_bytes <= weights < (1.15 if model.weight_bytes < 100e6 else 1.12) * model.weight_bytes
    caches = sum(t.num_bytes for t in result.terms if t.name.startswith("cache."))
    assert caches == result.cache.budget_bytes
    assert result.total_bytes + result.reserve_bytes <= GPU.free_bytes
    assert result.total_bytes == result.fixed_bytes + result.cache.budget_bytes
    assert len({term.name for term in result.terms}) == len(result.terms)
    # The engine, given this budget, makes the same plan.
    demand = CacheDemand(sequences, context, min(2048, context), engine().cache.snapshot_spacing)
    assert plan_cache(model.caches(torch.bfloat16), demand, result.cache.budget_bytes) == result.cache


@pytest.mark.parametrize(("name", "context", "sequences"), SHAPES)
def test_the_longest_context_is_the_edge(name: str, context: int, sequences: int) -> None:
    memory = DeviceMemory("cuda", 32 * GIB, plan(name, context, sequences).fixed_bytes + 6 * GIB)
    longest = plan(name, context, sequences, memory).longest_context
    model = description(name)
    assert 64 <= longest <= model.max_context
    assert plan(name, longest, sequences, memory).fits
    if longest < model.max_context:
        assert not plan(name, longest + 64, sequences, memory).fits


def test_answers_move_the_right_way() -> None:
    small = plan("qwen35-4b", 32768, 32, DeviceMemory("cuda", 16 * GIB, 16 * GIB))
    large = plan("qwen35-4b", 32768, 32, DeviceMemory("cuda", 17 * GIB, 17 * GIB))
    assert small.cache is not None and large.cache is not None
    gained = large.cache.num_tokens - small.cache.num_tokens
    assert gained > 0
    # One more GiB of memory is a little less for the caches (the reserve grows with the device).
    assert 0.9 * small.tokens_per_gib <= gained <= 1.1 * small.tokens_per_gib
    fp8 = plan("qwen35-4b", 32768, 32, DeviceMemory("cuda", 16 * GIB, 16 * GIB), dtype=CacheDtype.FP8)
    assert fp8.cache is not None and fp8.cache.num_tokens > small.cache.num_tokens
    assert small.binding == "attention" and small.sequences_at_context < 32


def test_a_refusal_names_numbers_and_a_remedy_that_works() -> None:
    tight = DeviceMemory("cuda", 28 * GIB, 28 * GIB)
    refused = plan("qwen38-nvfp4-1", 262144, 32, tight)
    assert not refused.fits and refused.shortfall_bytes > 0
    sentence = str(refused.refusal("qwen38-nvfp4-1"))
    assert "needs" in sentence and "28.00 GiB are free" in sentence and "\n" not in sentence
    words = sentence.split("; ")[-1].split()
    sequences = int(words[words.index("--max-seqs") + 1]) if "--max-seqs" in words else 32
    context = int(words[words.index("--ctx") + 1]) if "--ctx" in words else 262144
    assert plan("qwen38-nvfp4-1", context, sequences, tight).fits
    enough = replace(tight, free_bytes=tight.free_bytes + refused.shortfall_bytes)
    assert plan("qwen38-nvfp4-1", 262144, 32, enough).fits
    assert not plan("qwen38-nvfp4-1", 262144, 32, replace(enough, free_bytes=enough.free_bytes - 1)).fits


def test_a_stated_cache_budget_is_taken_or_refused() -> None:
    taken = plan("qwen35-4b", 8192, 4, budget_bytes=3 * GIB)
    assert taken.cache is not None and taken.cache.budget_bytes == 3 * GIB
    small = plan("qwen35-4b", 8192, 4, budget_bytes=GIB // 4)
    assert not small.fits and small.caches_too_small
    assert "cache_bytes allows 256.0 MiB" in str(small.refusal("qwen35-4b"))
    assert not plan("qwen35-4b", 8192, 4, budget_bytes=30 * GIB).fits


def test_several_gpus_share_what_can_be_split() -> None:
    one = plan("qwen38-nvfp4-1", 32768, 8, DeviceMemory("cuda", 96 * GIB, 96 * GIB))
    four = plan("qwen38-nvfp4-1", 32768, 8, DeviceMemory("cuda", 96 * GIB, 96 * GIB, count=4))
    assert four.memory.label == "each of 4 gpus"

    def size(result: MemoryPlan, prefix: str) -> int:
        return sum(term.num_bytes for term in result.terms if term.name.startswith(prefix))

    assert size(four, "weights.linear") == pytest.approx(size(one, "weights.linear") / 4, rel=1e-6)
    assert size(four, "weights.norm") == size(one, "weights.norm")
    assert one.cache is not None and four.cache is not None
    attention_one, attention_four = one.cache.groups[0], four.cache.groups[0]
    assert attention_four.unit_bytes == attention_one.unit_bytes // 4


def test_drafters_caches_are_planned_when_it_runs() -> None:
    model = description("nano-qwen3_5")
    without = plan_memory(model, engine(), GPU)
    with_drafter = plan_memory(model, engine(), GPU, max_draft=2, drafter=True)
    names = {term.name for term in with_drafter.terms} - {term.name for term in without.terms}
    assert any(name.startswith("cache.mtp") for name in names)
    assert any(term.name.startswith("drafter.") for term in without.terms)


# --- drafters with a model of their own, and scored prompts: the plan against what the code allocates ---


COMPUTER = DeviceMemory("cpu", 16 * GIB, 16 * GIB)


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return nano_models.load_on(nano_models.QWEN, "cpu")


def block_drafter(folder: Path) -> Path:
    """The files of a random block drafter of the nano models' size."""
    config: dict[str, Any] = copy.deepcopy(tiny_dflash2.CONFIG) | {"vocab_size": 4096, "hidden_size": 256}
    config["dflash_config"]["mask_token_id"] = 3
    return tiny_dflash2.save_folder(folder, tiny_dflash2.tensors(config), config)


def drafting(kind: DrafterKind, *, sequences: int = 4, budget: int | None = None, **speculation: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(dtype=CacheDtype.FP16, budget_bytes=budget),
        scheduler=SchedulerConfig(max_sequences=sequences, max_context=2048, token_budget=1024),
        speculation=SpeculationConfig(kind, 3, measured=False, **speculation),
    )


def engine_of(config: EngineConfig, result: MemoryPlan, loaded: LoadedModel, companion: LoadedModel | None) -> Engine:
    """The engine with the budgets that the plan decided."""
    assert result.cache is not None
    own = None if result.drafter_cache is None else result.drafter_cache.budget_bytes
    config = replace(
        config,
        cache=replace(config.cache, budget_bytes=result.cache.budget_bytes),
        speculation=replace(config.speculation, cache_bytes=own),
    )
    return Engine(loaded.model, config, companion=None if companion is None else companion.model)


def test_a_drafting_model_is_planned_as_the_engine_holds_it(tmp_path: Path) -> None:
    tiny_models = pytest.importorskip("tiny_models", reason="needs transformers")
    paths = [tiny_models.save_folder(tiny_models.build(name), tmp_path / name) for name in ("qwen2", "gemma3")]
    loaded, companion = (load_model(path) for path in paths)
    target, own = (describe_file(path) for path in paths)
    config = drafting(DrafterKind.MODEL)
    result = plan_memory(target, config, COMPUTER, max_draft=3, companion=own)
    engine = engine_of(config, result, loaded, companion)
    assert isinstance(engine.drafter, ModelDrafter) and result.cache is not None and result.drafter_cache is not None
    assert engine.cache.plan == result.cache and engine.drafter.cache.plan == result.drafter_cache
    probe = MemoryProbe(torch.device("cpu"))
    measured, groups = probe.measure(loaded, engine, companion), result.by_group()
    assert measured["drafter.weights"] == groups["drafter.weights"] == own.weight_bytes > 0
    assert measured["drafter.cache"] == groups["drafter.cache"] == result.drafter_cache.used_bytes > 0
    assert abs(measured["drafter.buffers"] - groups["drafter.buffers"]) < 16384, "parts start at multiples of 256"
    rows = {row.name: row for row in compare(result, measured)}
    assert all(rows[name].within and rows[name].measured for name in measured if name != "runtime")
    assert engine.drafter.compute_widest(3).shape == (4, loaded.model.config.vocab_size)
    engine.audit()
    # What the plan says without the drafter is what it says with it, and the drafter's terms.
    plain = plan_memory(target, drafting(DrafterKind.NONE), COMPUTER)
    added = {term.name for term in result.terms} - {term.name for term in plain.terms}
    assert added and all(name.startswith("drafter.") for name in added)


@pytest.mark.parametrize("kind", [DrafterKind.NEXTN, DrafterKind.DFLASH2])
def test_drafters_within_the_models_caches_are_planned_as_the_engine_holds_them(
    nano: LoadedModel, tmp_path: Path, kind: DrafterKind
) -> None:
    is_block = kind is DrafterKind.DFLASH2
    companion = load_model(block_drafter(tmp_path), drafter=True) if is_block else None
    own = describe_file(tmp_path, drafter=True) if is_block else None
    config = drafting(kind)
    result = plan_memory(describe_source(nano.source), config, COMPUTER, max_draft=3, companion=own,
                         drafter=kind is DrafterKind.NEXTN)  # fmt: skip
    engine = engine_of(config, result, nano, companion)
    assert engine.cache.plan == result.cache, "the same groups from the same budget"
    measured, groups = MemoryProbe(torch.device("cpu")).measure(nano, engine, companion), result.by_group()
    assert measured["cache"] <= groups["cache"] < measured["cache"] + (1 << 20)
    assert abs(measured["drafter.buffers"] - groups["drafter.buffers"]) < 16384
    if own is not None:
        assert measured["drafter.weights"] == groups["drafter.weights"] == own.weight_bytes
        assert any(term.name.startswith("cache.dflash2") for term in result.terms)


@pytest.mark.parametrize("token_budget", [1024, 32])
@pytest.mark.parametrize("kind", [DrafterKind.NONE, DrafterKind.DFLASH2])
def test_working_memory_is_planned_for_scored_prompts_and_tapped_layers(
    nano: LoadedModel, tmp_path: Path, kind: DrafterKind, token_budget: int
) -> None:
    """Long steps are bound by activations and tapped layers, short ones by scored rows of logits."""
    is_block = kind is DrafterKind.DFLASH2
    companion = load_model(block_drafter(tmp_path), drafter=True) if is_block else None
    own = describe_file(tmp_path, drafter=True) if is_block else None
    config = drafting(kind)
    config = replace(config, scheduler=replace(config.scheduler, token_budget=token_budget))
    result = plan_memory(describe_source(nano.source), config, COMPUTER, max_draft=3 if is_block else 0, companion=own)
    engine = engine_of(config, result, nano, companion)
    allocator, peak = Allocator(), 0
    with Watch(allocator, "cpu"):
        # The first round only notes what was there before.
        for number, scores in enumerate((True, False, True)):
            prompt = [(7 * i + number) % 4000 for i in range(1024)]
            sampling = SamplingParams(temperature=0.0, prompt_logprobs=scores, logprobs=0)
            engine.submit(Request(f"r{number}", prompt, sampling, 6, ignore_eos=True))
            while engine.has_work:
                before = allocator.peak = allocator.allocated
                engine.step()
                peak = max(peak, allocator.peak - before if number else 0)
        draw_widest(engine)
        before = allocator.peak = allocator.allocated
        draw_widest(engine)
        peak = max(peak, allocator.peak - before)
    planned = result.by_group()["working"]
    print(f"{kind.value}, steps of {token_budget}: planned {planned / 2**20:.2f}, allocated {peak / 2**20:.2f} MiB")
    assert 0.6 * planned <= peak <= planned


def test_scored_rows_count_where_they_exceed_the_activations() -> None:
    """On a computer with one sequence nothing but 64 rows of a wide vocabulary fills the working memory."""
    model, config = description("gemma3-270m"), drafting(DrafterKind.NONE, sequences=1)
    terms = {term.name: term.num_bytes for term in plan_memory(model, config, COMPUTER).terms}
    most = terms["activations"] + terms["logits"] + terms["logits.scored"]
    assert 65 * 262144 * 4 <= most < 80 * 262144 * 4


def test_both_caches_hold_the_same_blocks_and_grow_together() -> None:
    model, own = description("qwen25-coder-1.5b"), description("qwen25-coder-0.5b")
    config = replace(engine(32768, 16), speculation=SpeculationConfig(DrafterKind.MODEL, 4))
    for size in (8, 12, 24):
        result = plan_memory(model, config, DeviceMemory("cuda", size * GIB, size * GIB), max_draft=4, companion=own)
        assert result.cache is not None and result.drafter_cache is not None
        assert 0 <= result.cache.num_blocks - result.drafter_cache.num_blocks <= 1
        assert result.total_bytes + result.reserve_bytes <= size * GIB
        assert result.drafter_bytes > own.weight_bytes
    stated = replace(config, cache=replace(config.cache, budget_bytes=2 * GIB))
    result = plan_memory(model, stated, GPU, max_draft=4, companion=own)
    assert result.cache is not None and result.cache.budget_bytes == 2 * GIB and result.drafter_cache is not None


def test_kept_distributions_are_planned_for_rejection_alone() -> None:
    model, own = description("qwen25-coder-1.5b"), description("qwen25-coder-0.5b")
    found = []
    for rule in (Acceptance.EXACT, Acceptance.REJECTION):
        config = drafting(DrafterKind.MODEL, acceptance=rule)
        for memory in (COMPUTER, GPU):
            result = plan_memory(model, config, memory, max_draft=3, companion=own)
            found.append([term for term in result.terms if term.name == "drafter.distributions"])
    assert not found[0] and not found[1]
    assert [term.device for term in (*found[2], *found[3])] == ["cpu", "host"]
    assert found[2][0].num_bytes == 4 * 3 * 151936 * 16


def test_a_drafter_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from slimserve.cli.main import main

    small = ["qwen25-coder-1.5b", "--ctx", "8192", "--max-seqs", "1"]
    drafter = ["--drafter", "model", "--draft-model", "qwen25-coder-0.5b", "--drafts", "3"]
    assert main(["plan", *small, *drafter, "--device", "cpu", "--memory", "8GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    sizes = {term["name"]: term["bytes"] for term in data["terms"]}
    weights = sum(size for name, size in sizes.items() if name.startswith("drafter.weights."))
    assert weights == description("qwen25-coder-0.5b").weight_bytes
    assert sizes["drafter.cache.attention.pages"] == data["drafter_cache_bytes"] == 129 * 786432
    # It is the drafter alone that does not fit, and what the sentence says is right.
    tight = ["--gpu-memory", "3020MiB"]
    assert main(["plan", *small, *tight]) == 0
    capsys.readouterr()
    assert main(["plan", *small, *drafter, *tight]) == 3
    sentence = capsys.readouterr().err
    assert "for the drafter" in sentence and "2.95 GiB are free; --no-spec fits" in sentence
    assert main(["plan", *small, *drafter, "--no-spec", *tight]) == 0
    assert main(["show", "qwen25-coder-1.5b", *drafter, "--json"]) == 0
    capsys.readouterr()
    for wrong, code, words in (
        (["--drafter", "model"], 2, "give its path with --draft-model"),
        (["--draft-model", "qwen25-coder-0.5b"], 2, "without --drafter"),
        (["--drafter", "model", "--draft-model", "nothing"], 2, "neither a file or folder nor a profile"),
        (["--drafter", "dflash2", "--draft-model", "qwen25-coder-0.5b"], 2, "named by its file or folder"),
        (["--drafter", "model", "--draft-model", "gemma3-270m"], 3, "need the same vocabulary"),
        (["--drafter", "dflash2", "--draft-model", str(block_drafter(tmp_path))], 3, "was made for a hidden_size"),
        ([*drafter, "--draft-acceptance", "typical"], 2, "choose from exact, rejection"),
    ):
        assert main(["plan", *small, *wrong]) == code, wrong
        shown = capsys.readouterr().err.strip()
        assert words in shown and "\n" not in shown


def test_the_engine_is_told_what_the_plan_decided_for_the_drafter() -> None:
    from slimserve.cli.opening import EngineFlags

    flags = EngineFlags(drafter="model", draft_model="qwen25-coder-0.5b", drafts=3)
    resolved = resolve("qwen25-coder-1.5b", hardware=machine(16 * GIB), flags=flags.settings())
    config, result = admit(flags.with_draft_model(resolved)[0])
    assert result.drafter_cache is not None
    assert config.speculation.cache_bytes == result.drafter_cache.budget_bytes
    hidden = admit(resolve("glm53f-q2-1", hardware=machine(16 * GIB, 141 * GIB), device="cuda"))[0]
    assert hidden.speculation.cache_bytes is None


def test_weights_in_host_memory_do_not_count_on_the_device() -> None:
    profile = resolve("qwen38fn-offload-2", platform="2x-rdna4-32g")
    result = plan_profile(profile)
    host = [term for term in result.terms if term.device == "host"]
    assert host and sum(term.num_bytes for term in host) > 100 * GIB
    assert result.total_bytes < 32 * GIB


# --- profiles on machines ---


def machine(memory: int, *gpus: int) -> Hardware:
    cards = tuple(Accelerator(i, DeviceKind.CUDA, "some card", size, size) for i, size in enumerate(gpus))
    return Hardware("p", 4, frozenset(), memory, memory, cards)


@pytest.mark.parametrize("name", tiny_synthetic.NAMES)
def test_made_weights_are_planned_as_a_cpu_holds_them(name: str) -> None:
    model, memory = tiny_synthetic.tiny(name), DeviceMemory("cpu", GIB, GIB)
    described = describe_config(name, model.config, model.rules, model.present)
    held = load_source(lay_out(model).source("cpu")).resident_bytes
    table = sum(term.num_bytes for term in made_terms(described, memory))
    planned = table + sum(term.num_bytes for term in weight_terms(described, memory))
    assert planned <= held < planned * 1.04  # panels are filled up, which shows at this size
    assert (table > 0) == (name == "qwen35-4b")  # the one whose head is tied
    assert not made_terms(described, GPU)


def test_a_table_in_memory_counts_only_where_weights_are_made() -> None:
    profile = resolve("qwen35-4b", device="cpu", hardware=pretend(hardware_module.detect(), memory=64 * GIB))
    read, made = plan_profile(profile), plan_profile(profile, made=True)
    sizes = {term.name: term.num_bytes for term in made.terms}
    assert sizes["weights.table"] == sizes["weights.embedding.Q6_K"]
    assert made.total_bytes - read.total_bytes == sizes["weights.table"]
    assert admit(profile, made=True)[1].total_bytes == made.total_bytes


def test_made_weights_are_planned_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimserve.cli.main import main
    from slimserve.cli.opening import EngineFlags, open_model

    opened = open_model("smollm2-135m", None, EngineFlags(device="cpu"), serving=True, weights="synthetic")
    assert [term.num_bytes > 0 for term in opened.plan.terms if term.name == "weights.table"] == [True]
    arguments = ["plan", "smollm2-135m", "--device", "cpu", "--json"]
    for more, count in (([], 0), (["--weights", "synthetic"], 1)):
        assert main([*arguments, *more]) == 0
        terms = json.loads(capsys.readouterr().out)["terms"]
        assert sum(term["name"] == "weights.table" for term in terms) == count
    # A word that is no kind of weights is named before memory is.
    monkeypatch.setattr("slimserve.profiles.planning.plan_profile", pytest.fail)
    with pytest.raises(UsageError, match="the only value is synthetic"):
        open_model("smollm2-135m", None, EngineFlags(device="cpu"), serving=True, weights="real")


def test_values_that_nobody_chose_are_lowered_to_fit_and_chosen_ones_are_not() -> None:
    card = machine(64 * GIB, 32 * GIB)
    profile = resolve("qwen38-nvfp4-1", hardware=card)
    assert not plan_profile(profile).fits
    lowered = fitted(profile)
    assert plan_profile(lowered).fits
    assert lowered.settings["max_sequences"].origin is Origin.MACHINE
    assert lowered.settings["max_sequences"].recorded == 32
    chosen = resolve("qwen38-nvfp4-1", hardware=card, flags={"max_context": 262144, "max_sequences": 32})
    assert fitted(chosen) == chosen
    by_flag = fitted(resolve("qwen38-nvfp4-1", hardware=card, flags={"max_sequences": 2}))
    assert by_flag.value("max_sequences") == 2 and plan_profile(by_flag).fits


def test_the_device_that_was_named_is_the_one_planned_and_used() -> None:
    two = machine(64 * GIB, 24 * GIB, 80 * GIB)
    second = resolve("qwen35-4b", hardware=two, device="cuda:1", flags={"max_context": 4096, "max_sequences": 2})
    config, result = admit(second)
    assert config.device == "cuda:1" and result.memory.total_bytes == 80 * GIB
    with pytest.raises(Exception, match="needs 1 x cuda"):
        admit(resolve("qwen35-4b", hardware=two, device="cuda:2"))
    with pytest.raises(UsageError, match="cuda:one"):
        resolve("qwen35-4b", hardware=two, device="cuda:one")


def test_admit_gives_the_engine_the_planned_budget() -> None:
    config, result = admit(resolve("smollm2-135m", hardware=machine(16 * GIB)))
    assert result.cache is not None and config.cache.budget_bytes == result.cache.budget_bytes
    assert config.device == "cpu"
    with pytest.raises(Exception, match="does not fit"):
        admit(resolve("smollm2-135m", hardware=machine(GIB // 2)))
    with pytest.raises(Exception, match="does not run in this build"):
        admit(resolve("glm53f-nvfp4-4", platform="4x-blackwell-96g"))


def test_plan_on_the_command_line_for_a_machine_one_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    from slimserve.cli.main import main

    assert main(["plan", "qwen38-nvfp4-1", "--gpu-memory", "48GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["device_total_bytes"] == 48 * GIB
    assert all(set(term) == {"name", "bytes", "device", "source"} for term in data["terms"])
    assert main(["plan", "qwen38-nvfp4-1", "--gpu-memory", "16GiB", "--json"]) == 3
    shown = capsys.readouterr()
    assert json.loads(shown.out)["shortfall_bytes"] > 0
    assert shown.err.strip().count("\n") == 0 and "does not fit" in shown.err
    assert main(["plan", "qwen38-nvfp4-1", "--gpu-memory", "much"]) == 2
    capsys.readouterr()
    # A remedy is offered only where it works, an option is never ignored, and flags are called by their names.
    assert main(["plan", "qwen35-4b", "--gpu-memory", "2GiB", "--drafter", "nextn"]) == 3
    assert "no context fits here" in capsys.readouterr().err
    assert main(["plan", "qwen38-q2kxl-1", "--platform", "mi300x", "--gpu-memory", "96GiB"]) == 2
    assert "mi300x is none" in capsys.readouterr().err
    assert main(["plan", "smollm2-135m", "--gpu-memory", "8GiB", "--ctx", "63"]) == 2
    assert "--ctx: " in capsys.readouterr().err


def test_plan_on_the_command_line_for_several_gpus_and_for_a_computer(capsys: pytest.CaptureFixture[str]) -> None:
    from slimserve.cli.main import main

    def shown(*arguments: str) -> Any:
        assert main(["plan", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    one, four = (shown("qwen35-4b", "--gpu-memory", "48GiB", "--gpus", count, "--ctx", "8192") for count in ("1", "4"))
    assert {term["device"] for term in four["terms"]} == {"each of 4 gpus"} and one["device"] == "gpu0"
    weights = [sum(t["bytes"] for t in plan["terms"] if t["name"].startswith("weights.linear")) for plan in (one, four)]
    assert weights[1] == pytest.approx(weights[0] / 4, rel=0.01)
    computer = shown("nano-qwen3_5", "--device", "cpu", "--memory", "4GiB", "--drafter", "nextn", "--drafts", "2")
    assert {term["device"] for term in computer["terms"]} == {"cpu"} and computer["binding"]
    assert any(term["name"].startswith("cache.mtp") for term in computer["terms"])
    less = shown("nano-qwen3_5", "--device", "cpu", "--memory", "4GiB", "--no-spec")
    assert not any(term["name"].startswith("cache.mtp") for term in less["terms"])
    assert less["tokens_per_extra_gib"] > 0 and less["sequences_per_extra_gib"] > 0


# --- the floor ---


def test_distinct_experts_are_those_of_the_formula() -> None:
    # 288 experts, 8 per token: the series that the formula gives at 1, 2, 4, ... rows.
    expected = {1: 8, 2: 15.8, 4: 30.7, 8: 58.1, 16: 104.5, 32: 171.1, 64: 240.5}
    for rows, count in expected.items():
        assert distinct_experts(288, 8, rows) == pytest.approx(count, abs=0.06)
    assert distinct_experts(0, 0, 4) == 0


def test_the_floor_of_known_models() -> None:
    """27B in NVFP4 and FP8 moves 19.1 GB of weights per token, GLM-5.3-Flash in two bits about 10 with its state."""
    dense = step_floor(description("qwen38-nvfp4-1"), 1, context=0, bandwidth=4e12)
    weights = sum(term.num_bytes for term in dense.terms if term.name.startswith("weights."))
    assert weights == pytest.approx(19.1e9, rel=0.02)
    experts = step_floor(description("glm53f-q2-1"), 1, context=0, bandwidth=4e12)
    routed = next(term.num_bytes for term in experts.terms if term.name == "weights.expert")
    assert routed == pytest.approx(2.4e9, rel=0.05)
    assert 8e9 < experts.num_bytes < 11e9
    assert experts.milliseconds == pytest.approx(1e3 * experts.num_bytes / 4e12)


def test_the_floor_grows_with_context_and_rows_as_it_must() -> None:
    model = description("qwen25-coder-0.5b")
    one, far = (step_floor(model, 1, context=c, bandwidth=1e10) for c in (0, 1000))
    assert far.num_bytes - one.num_bytes == pytest.approx(1000 * 12288)
    many = step_floor(model, 8, context=0, bandwidth=1e10)
    assert many.num_bytes < 1.2 * one.num_bytes and many.tokens_per_second > 6 * one.tokens_per_second
    window = description("gemma3-270m")
    grown = [step_floor(window, 1, context=c, bandwidth=1e10).num_bytes for c in (600, 1600)]
    assert grown[1] - grown[0] == pytest.approx(1000 * 3 * 1024)  # three full layers grow, fifteen windows do not


# --- plan and measurement ---


def test_the_comparison_marks_what_leaves_its_margin() -> None:
    result = plan("qwen25-coder-0.5b", 8192, 8)
    exact = {term.name: term.num_bytes for term in result.terms if term.name != "reserve"}
    rows = compare(result, exact)
    assert all(row.within for row in rows) and rows[-1].name == "total" and rows[-1].difference == 0
    grouped = compare(result, {"weights": 10 * GIB})
    weights = next(row for row in grouped if row.name == "weights")
    assert not weights.within and weights.measured == 10 * GIB
    assert any(row.measured is None for row in grouped)
    assert any(line.endswith("!") for line in comparison_lines(grouped))
    assert not compare(result, {"total": 2 * result.total_bytes})[-1].within


# --- pieces ---


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("1.5g", 3 * GIB // 2), ("512MiB", GIB // 2), ("77", 77)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 parsec", "1e9"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_sizes_are_shown_with_their_unit() -> None:
    assert [format_bytes(n) for n in (5, 5 << 10, 5 << 20, 5 << 30)] == ["5 B", "5.0 KiB", "5.0 MiB", "5.00 GiB"]


def test_layers_lists() -> None:
    assert parse_layers("0-2,5") == {0, 1, 2, 5}
    for bad in ("", "a", "1-", "-3", "1;2"):
        with pytest.raises(UsageError):
            parse_layers(bad)


def test_side_scales_are_counted() -> None:
    spec = next(s for s in description("nano-qwen3_5").config.parameters() if s.name == "layers.0.gate.weight")
    rows, columns = spec.shape
    assert parameter_bytes(FormatRule("*", "F8_E4M3", scales="channel"), spec) == rows * columns + 4 * rows
    packed = rows * columns // 2
    assert parameter_bytes(FormatRule("*", "E2M1_G16", scales="group16"), spec) == packed + rows * columns // 16 + 4
    assert parameter_bytes(FormatRule("*", "INT4", scales="group128"), spec) == packed + 2 * rows * columns // 128


def test_this_machine_is_seen_within_the_containers_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = hardware_module.detect()
    assert 0 < here.memory_free <= here.memory_total and here.num_cores >= 1 and here.describe()
    (tmp_path / "memory.max").write_text(str(3 * GIB), encoding="ascii")
    (tmp_path / "memory.current").write_text(str(2 * GIB), encoding="ascii")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n", encoding="ascii")
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    monkeypatch.setattr(hardware_module, "_cgroups", lambda: [tmp_path])
    limited = hardware_module.detect()
    assert limited.memory_total == 3 * GIB and limited.memory_free <= 2 * GIB
    assert limited.num_cores == min(2, len(os.sched_getaffinity(0)))


def test_pretended_machines() -> None:
    other = pretend(machine(GIB), gpu_memory=24 * GIB, num_gpus=2, memory=8 * GIB)
    assert len(other.accelerators) == 2 and other.memory_free == 8 * GIB and other.pretended
    with pytest.raises(UsageError, match="no machine to plan for"):
        pretend(machine(GIB), gpu_memory=5)


def test_plan_json_is_plain_data() -> None:
    json.dumps(plan_json(plan("qwen35-4b", 4096, 2)))
