"""The plan's formulas beside the tensors that the engine's own code makes, on a GPU that is not there."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")

from fake_device import MIB, Allocator, fake_cuda

from slimserve.cache.storage import CacheStorage
from slimserve.engine.config import (
    CacheConfig,
    CacheDtype,
    DrafterKind,
    EngineConfig,
    NumericsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from slimserve.engine.forward import LEAST_CONTEXT
from slimserve.engine.inputs import Padding
from slimserve.engine.loop import Engine
from slimserve.engine.memory import draw_widest
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.speculate.model_drafter import ModelDrafter
from slimserve.models.format_map import find_rule
from slimserve.models.registry import find_hf
from slimserve.ops import expert_linear, prepare_experts, prepare_linear
from slimserve.ops.held import attention_scratch, held_bytes, held_parts, spare_bytes, widest_attention
from slimserve.ops.triton.attention import paged_attention
from slimserve.plan.description import Description, describe_config
from slimserve.plan.memory import DeviceMemory, MemoryPlan, plan_memory
from slimserve.plan.rounding import hold_weights, rounding_terms
from slimserve.plan.working import GRAPH_DRIVER, scratch_bytes
from slimserve.profiles.registry import find_record
from slimserve.quant.formats import find_format
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.loader import load_source
from slimserve.weights.synthetic import SyntheticModel, lay_out

GIB = 1 << 30
KEPT = 0
"""Stands among lengths where the engine makes the allocator keep one block."""
H200 = DeviceMemory("cuda", 140 * GIB, 140 * GIB)


@dataclass
class Seen:
    """Bytes that the engine's code asked for: by purpose, and what torch's rules reserve beside (`allocator`, as
    `engine.memory` counts it) and for a recorded step."""

    weights: int
    cache: int
    inputs: int
    working: int
    allocator: int
    graphs: int


def shallow(name: str, layers: int) -> tuple[SyntheticModel, Description]:
    """A record's model with its real widths and a few layers."""
    model = find_record(name).model
    config = {**model.config, "num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = list(config["layer_types"])[:layers]
    parsed = find_hf(config).from_hf(config, {})
    used = {find_rule(model.formats, spec) for spec in parsed.parameters()}
    rules = tuple(rule for rule in model.formats if rule in used)
    return SyntheticModel(name, config, rules, ()), describe_config(name, config, rules, ())


def observe(model: SyntheticModel, config: EngineConfig, lengths: list[int]) -> Seen:
    """Load, build, run prompts of `lengths` tokens and the widest decode step, record it."""
    allocator, device = Allocator(), torch.device("cuda:0")
    with fake_cuda(allocator):
        loaded = load_source(lay_out(model).source(device), device=device, numerics=config.numerics)
        weights = allocator.allocated
        allocator.empty_cache()
        engine = Engine(loaded.model, config)
        assert engine.cache.storage is not None
        cache, inputs = engine.cache.storage.num_bytes, engine.runner.forward.buffers.num_bytes
        allocator.empty_cache()
        base = allocator.allocated
        forward = engine.runner.forward
        forward.recorder = None
        peak = 0
        for length in (*lengths, KEPT, *lengths):
            if length == KEPT:  # as engine.memory does after its warm-up
                peak = max(peak, _draw(engine, allocator, base))
                allocator.empty_cache()
                allocator.release(allocator.allocate(peak + spare_bytes(peak)))
                continue
            name = f"r{length}, {allocator.reserved[0]}"
            engine.submit(Request(name, [1] * length, SamplingParams(temperature=0.0), 3, ignore_eos=True))
            plan = engine.scheduler.plan()
            assert sum(row.q_len for row in plan.rows) == length, (length, [row.q_len for row in plan.rows])
            allocator.peak = allocator.allocated
            computed = forward(plan)
            peak = max(peak, allocator.peak - base)
            del computed
            engine.abort(name)
            engine.scheduler.plan()
        peak = max(peak, _draw(engine, allocator, base))
        beside = allocator.reserved[0] - weights - cache - inputs - peak
        rows = config.scheduler.max_sequences
        results = forward.compute_widest()
        held = sum(part.numel() * part.element_size() for part in (results.hidden, results.logits, results.finite))
        del results
        allocator.pool = 1
        for context in (forward.buffers.max_context, LEAST_CONTEXT):
            forward._compute(forward.buffers.fill_rows((), engine.cache, Padding(rows, 1, context)))
        graphs = allocator.reserved[1] + held
    return Seen(weights, cache, inputs, peak, beside, graphs)


def _draw(engine: Engine, allocator: Allocator, base: int) -> int:
    """The peak of the widest draw."""
    allocator.peak = allocator.allocated
    draw_widest(engine)
    return allocator.peak - base


def planned(description: Description, config: EngineConfig) -> MemoryPlan:
    return plan_memory(description, config, H200)


def device_config(
    budget: int | None, speculation: SpeculationConfig | None = None, rows: int = 12, context: int = 4096
) -> EngineConfig:
    return EngineConfig(
        device="cuda:0",
        cache=CacheConfig(budget_bytes=budget),
        scheduler=SchedulerConfig(rows, context, token_budget=2048, mixed_prefill_budget=1024),
        speculation=speculation or SpeculationConfig(),
        numerics=NumericsConfig(activation_dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    ("name", "layers", "rows", "context"),
    [
        ("qwen25-coder-1.5b", 2, 12, 4096),
        ("gemma3-270m", 6, 12, 4096),
        pytest.param("qwen35-4b", 4, 12, 4096, marks=pytest.mark.slow),
        pytest.param("glm53f-q2-1", 4, 12, 4096, marks=pytest.mark.slow),
        # The shapes measured on an H200: many rows at a long context store segments of attention.
        pytest.param("qwen35-4b", 4, 64, 32768, marks=pytest.mark.slow),
        pytest.param("qwen38-nvfp4-1", 4, 64, 32768, marks=pytest.mark.slow),
        pytest.param("glm53f-q2-1", 4, 32, 32768, marks=pytest.mark.slow),
    ],
)
def test_terms_are_what_the_code_allocates(name: str, layers: int, rows: int, context: int) -> None:
    model, description = shallow(name, layers)
    config = device_config(20 * GIB if rows > 12 else 2 * GIB, rows=rows, context=context)
    plan = planned(description, config)
    terms = {term.name: term.num_bytes for term in plan.terms}
    assert plan.cache is not None
    config = replace(config, cache=replace(config.cache, budget_bytes=plan.cache.budget_bytes))
    scratch = next(term for term in plan.terms if term.name == "scratch")
    worst = int(scratch.source.split(" at ")[1].split()[0])
    seen = observe(model, config, sorted({2048, min(worst, 2048)}))
    groups = plan.by_group()
    for what, expected, got in (
        ("weights", groups["weights"], seen.weights),
        ("cache", plan.cache.used_bytes, seen.cache),
        ("inputs", terms["inputs"], seen.inputs),
        ("working", groups["working"], seen.working),
        ("graphs", terms["graphs"] - GRAPH_DRIVER, seen.graphs),
        ("allocator", groups["allocator"], seen.allocator),
    ):
        print(f"{name}, {layers} layers, {rows} rows: {what} planned {expected / MIB:.1f}, seen {got / MIB:.1f} MiB")
        leasts = {"cache": 1, "inputs": 1, "working": 64, "allocator": 64}
        assert abs(expected - got) <= max(0.1 * expected, leasts.get(what, 32) * MIB), what


def test_parts_of_a_layout_are_planned() -> None:
    """NVFP4 is held in two tensors, of which the larger leaves 1.5 MiB of its 44."""
    low, words = held_parts("E2M1_G16", (17408, 5120))
    assert (low, words) == (17408 * 5120 // 2, 17408 * 5120 // 16) and held_parts("BF16", (64, 64)) == ()
    assert abs(sum(held_parts("Q6_K", (248320, 2560))) - held_bytes("Q6_K", (248320, 2560), 0)) < 1 << 20


def test_stored_segments_are_those_of_the_kernels_launch() -> None:
    """What attention stores of a long context, by rows and by tokens of one row, up to its limit."""
    heads = (16, 4, 256)
    with fake_cuda(allocator := Allocator()):
        cuda = torch.device("cuda:0")
        pages = torch.empty((8, 4, 64, 256), dtype=torch.bfloat16, device=cuda)
        for context, rows, q_len in ((32768, 64, 1), (262144, 32, 1), (262144, 64, 1), (2048, 132, 1), (512, 4, 1),
                                     (32768, 1, 496), (32768, 1, 500), (4096, 1, 1055), (4096, 1, 1057)):  # fmt: skip
            q = torch.empty((rows * q_len, 16, 256), dtype=torch.bfloat16, device=cuda)
            integers = torch.empty(rows + 1, dtype=torch.int32, device=cuda)
            table = torch.empty((rows, context // 64), dtype=torch.int32, device=cuda)
            base = allocator.peak = allocator.allocated
            out = paged_attention(q, pages, pages, table, integers, integers, scale=1.0, max_q_len=q_len,
                                  max_context=context)  # fmt: skip
            stored = allocator.peak - base - out.numel() * 2
            expected = attention_scratch(heads, context, rows=rows, q_len=q_len)
            assert abs(stored - expected) <= 3 * MIB, (context, rows, q_len)
            if rows == 1:
                most, length = widest_attention(heads, context, 2048)
                assert stored <= most + 3 * MIB and (not expected or q_len <= length)


@pytest.mark.slow
def test_loading_leaves_few_holes() -> None:
    """Mixed NVFP4 and FP8 with tables of 248,320 rows: what loading left beside the weights was 1,521 MiB here."""
    model, description = shallow("qwen38-nvfp4-1", 4)
    allocator, device = Allocator(), torch.device("cuda:0")
    with fake_cuda(allocator):
        loaded = load_source(lay_out(model).source(device), device=device, numerics=device_config(GIB).numerics)
        assert allocator.peak - allocator.allocated < 1600 * MIB, "one large table at a time, and it once"
        allocator.empty_cache()
        left = allocator.reserved[0] - loaded.resident_bytes
    expected = sum(term.num_bytes for term in rounding_terms(hold_weights(description, H200), (), (), H200))
    print(f"loading leaves {left / MIB:.1f} MiB, {expected / MIB:.1f} planned")
    assert abs(left - expected) < 64 * MIB


def test_a_small_models_terms_are_what_the_code_allocates() -> None:
    """Weights, caches and buffers of a drafting model, and what reading and drafting take beside the model's steps."""
    target, description = shallow("gemma3-270m", 6)
    own, companion = shallow("qwen25-coder-1.5b", 2)
    own = replace(own, config={**own.config, "vocab_size": 262144})
    companion = describe_config("companion", own.config, own.rules, ())
    config = device_config(2 * GIB, SpeculationConfig(DrafterKind.MODEL, 3))
    plan = plan_memory(description, config, H200, max_draft=3, companion=companion)
    assert plan.cache is not None and plan.drafter_cache is not None
    groups = plan.by_group()
    speculation = replace(config.speculation, cache_bytes=plan.drafter_cache.budget_bytes)
    config = replace(config, speculation=speculation)
    allocator, device = Allocator(), torch.device("cuda:0")
    with fake_cuda(allocator):
        loaded = load_source(lay_out(target).source(device), device=device, numerics=config.numerics)
        before = allocator.allocated
        drafting = load_source(lay_out(own).source(device), device=device, numerics=config.numerics)
        weights = allocator.allocated - before
        engine = Engine(loaded.model, config, companion=drafting.model)
        drafter = engine.drafter
        assert isinstance(drafter, ModelDrafter) and drafter.cache.storage is not None
        base = allocator.peak = allocator.allocated
        draw_widest(engine)
        working = allocator.peak - base
    for what, expected, got in (
        ("weights", groups["drafter.weights"], weights),
        ("cache", plan.drafter_cache.used_bytes, drafter.cache.storage.num_bytes),
        ("buffers", groups["drafter.buffers"], drafter.buffer_bytes),
        ("working", groups["working"], working),
    ):
        print(f"{what} planned {expected / MIB:.2f}, allocated {got / MIB:.2f} MiB")
        least = (1 if what in ("cache", "buffers") else 32) * MIB
        assert abs(expected - got) <= max(0.1 * expected, least), what


@pytest.mark.parametrize(("rows", "context", "dtype"), [(2, 16384, CacheDtype.FP8), (64, 32768, CacheDtype.BF16)])
def test_caches_lie_where_the_plan_deals_them_out(rows: int, context: int, dtype: CacheDtype) -> None:
    """Tensors of the counts that are planned, in what the weights left; half a piece for each page and two states a
    sequence were 61 MiB more at 2 rows and 67 less at 64."""
    model = find_record("qwen38-nvfp4-1").model
    description = describe_config("m", model.config, model.formats, model.present)
    config = device_config(None, rows=rows, context=context)
    plan = planned(description, replace(config, cache=replace(config.cache, dtype=dtype)))
    assert plan.cache is not None
    held = hold_weights(description, H200)
    allocator, specs = held.allocator.fork(), description.caches(dtype.torch)
    with fake_cuda(allocator):
        storage = CacheStorage(specs, plan.cache, torch.device("cuda:0"))
        beside = allocator.reserved[0] - held.allocator.allocated - storage.num_bytes
    assert storage.num_bytes == plan.cache.used_bytes
    assert beside == next(term.num_bytes for term in plan.terms if term.name == "rounding")
    assert plan.total_bytes + plan.reserve_bytes <= H200.free_bytes


def test_routed_experts_are_planned_with_the_rows_that_their_products_read() -> None:
    """Both products in float32, the gated rows, and these as integers with sums for the minima: 81 MiB of 657."""
    _, description = shallow("glm53f-q2-1", 4)
    stack = {w.name.rpartition("experts.")[2]: w for w in description.weights if w.experts and w.layer == 3}
    tokens, slots, experts = 2048, description.experts_per_token, 2
    with fake_cuda(allocator := Allocator()):
        cuda = torch.device("cuda:0")

        def packed(part: str) -> PackedTensor:
            fmt, shape = find_format(stack[part].format), (experts, *stack[part].shape[1:])
            assert fmt is not None
            data = torch.empty((*shape[:-1], fmt.row_bytes(shape[-1])), dtype=torch.uint8)
            return PackedTensor(fmt, shape, data, part)

        parts = [packed(part) for part in ("gate", "up", "down")]
        numerics = NumericsConfig(activation_dtype=torch.bfloat16)
        prepared = prepare_experts(parts[:2], parts[2], device=cuda, numerics=numerics)
        x = torch.empty((tokens, description.hidden_size), dtype=torch.bfloat16, device=cuda)
        ids = torch.empty((tokens, slots), dtype=torch.int32, device=cuda)
        weights = torch.empty((tokens, slots), device=cuda)
        base = allocator.peak = allocator.allocated
        out = expert_linear(x, prepared, ids, weights, 1.0)
        taken = allocator.peak - base
    # The result and the rows that gate and up read are two of the residual's.
    residual = (description.config.streams + 6) * description.hidden_size
    routed = 2 * tokens * (description.routed_width - residual + 2 * description.hidden_size)
    expected = routed + scratch_bytes(description, tokens, "cuda", experts=True)
    print(f"planned {expected / MIB:.1f}, taken {taken / MIB:.1f} MiB")
    assert out.shape == x.shape and abs(taken - expected) < 0.02 * expected


def test_synthetic_weights_lie_as_those_of_a_file_do() -> None:
    """What tensors are made of on a device leaves no trace in the allocator: the loader's own code, from both."""
    model, _ = shallow("qwen38-nvfp4-1", 4)
    numerics, left = device_config(GIB).numerics, []
    for device in ("cpu", "cuda:0"):
        allocator, kept = Allocator(), []
        with fake_cuda(allocator):
            made = lay_out(model)
            packed = made.source(torch.device(device)).packed
            names = [n for n in made.makers if re.search(r"\.0\.(linear_attn\.(in_proj_(qkv|z)|out_proj)|mlp)", n)]
            for name in names:
                kept.append(prepare_linear([packed(name)], device=torch.device("cuda:0"), numerics=numerics))
            allocator.empty_cache()
            left.append(allocator.reserved[0] - allocator.allocated)
            kept.clear()
    assert len(names) == 6 and abs(left[0] - left[1]) <= 2 * MIB, [size / MIB for size in left]


def test_the_allocator_follows_torchs_rules() -> None:
    """Worked by hand: small blocks share 2 MiB, those below 10 MiB 20 MiB, large ones round up; freed ones merge."""
    allocator = Allocator()
    small = [allocator.allocate(700) for _ in range(3)]
    assert (allocator.allocated, allocator.reserved[0]) == (3 * 1024, 2 * MIB)
    middle = allocator.allocate(3 * MIB)
    assert allocator.reserved[0] == 22 * MIB
    large = allocator.allocate(10 * MIB + 1)
    # 12 MiB come from the 17 MiB that are left of the 20: the best fit, with a tail above 1 MiB split off.
    assert allocator.reserved[0] == 22 * MIB and allocator.allocated == 3 * 1024 + 13 * MIB + 512
    huge = allocator.allocate(31 * MIB)
    # The piece of 32 MiB stays whole: what is left over is 1 MiB, and torch counts it as the tensor's.
    assert allocator.reserved[0] == 54 * MIB and allocator.allocated == 3 * 1024 + 45 * MIB + 512
    for block in (large, middle, huge, *small):
        assert block is not None
        allocator.release(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved[0] == 0
