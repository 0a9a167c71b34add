"""MTP drafting on trained and random hybrids: no token changes, hits stay whole, drafts are the checkpoint's own."""

from __future__ import annotations

import random
from pathlib import Path

import nano_models
import pytest
import torch
from speculation_rig import (
    Recorder,
    Reply,
    ScriptedDrafter,
    acceptance,
    make_engine,
    mixed_requests,
    said,
    serve,
)
from tiny_mtp import NANO, DirectMTP, save_tiny

from slimserve.engine.config import CacheDtype, DraftDraw, DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.errors import RefusalError
from slimserve.ops import Activations, NumericsConfig
from slimserve.weights.loader import LoadedModel, load_model

NEXTN = DrafterKind.NEXTN
FLOAT = NumericsConfig(activation_dtype=torch.float32, cpu_activations=Activations.FLOAT)
NANO_NAMES = ("nano-qwen3_5", "nano-glm5-next")


def nano(name: str, numerics: NumericsConfig | None = None) -> LoadedModel:
    if not (NANO / name).exists():
        pytest.skip(f"the trained checkpoint {name} is not beside the checkout")
    return load_model(NANO / name, numerics=numerics)


@pytest.fixture(scope="module", params=nano_models.on_devices(NANO_NAMES))
def trained(request: pytest.FixtureRequest) -> LoadedModel:
    return nano_models.load_on(*request.param)


@pytest.fixture(scope="module")
def plain(trained: LoadedModel) -> dict[str, Reply]:
    """32 mixed requests at once, nothing drafted, nothing cached."""
    return serve(make_engine(trained, prefix_caching=False), mixed_requests(32, 4096))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_on_equals_off_among_32(trained: LoadedModel, plain: dict[str, Reply], prefix_caching: bool) -> None:
    engine = make_engine(trained, NEXTN, prefix_caching=prefix_caching)
    assert said(serve(engine, mixed_requests(32, 4096))) == said(plain)
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert len(engine.drafter._tracker) == 0, "ended requests are kept"  # type: ignore[union-attr]
    if prefix_caching:
        again = serve(engine, mixed_requests(32, 4096))
        assert said(again) == said(plain), "on prefix hits"
        assert sum(reply.num_cached for reply in again.values()) > 1500


def test_on_equals_off_alone(trained: LoadedModel, plain: dict[str, Reply]) -> None:
    requests = mixed_requests(32, 4096)
    for i in (0, 3, 5, 14):
        engine = make_engine(trained, NEXTN, max_draft=7)
        for turn in ("cold", "on a hit"):
            assert serve(engine, [requests[i]])[f"r{i}"].said == plain[f"r{i}"].said, f"request {i} {turn}"


def test_preempted_again_and_again(trained: LoadedModel, plain: dict[str, Reply]) -> None:
    """Requests lose their memory while they draft, and go on where they were."""
    rng = random.Random(5)

    def preempt(engine: Engine, step: int) -> None:
        running = [job for job in engine.scheduler._running if job.sequence is not None]
        if step % 3 == 2 and running:
            engine.scheduler._preempt(rng.choice(running), {})

    for prefix_caching in (True, False):
        engine = make_engine(trained, NEXTN, prefix_caching=prefix_caching)
        requests = mixed_requests(32, 4096)[:10]
        found = serve(engine, requests, each_step=preempt)
        assert engine.scheduler.counters.num_preemptions > 5
        assert said(found) == said({r.request_id: plain[r.request_id] for r in requests})


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_that_are_always_wrong_or_right(trained: LoadedModel, plain: dict[str, Reply], right: float) -> None:
    expected = {name: reply.token_ids for name, reply in plain.items()}
    engine = make_engine(trained, drafter=ScriptedDrafter(expected, right, vocab_size=4096), max_draft=5)
    assert said(serve(engine, mixed_requests(32, 4096))) == said(plain)
    counters = engine.scheduler.counters
    if right == 0.0:
        assert counters.accepted_tokens == 0 < counters.drafted_tokens
    if right == 1.0:
        assert counters.accepted_tokens == counters.drafted_tokens > 0


def lengths_and_turns(vocab_size: int) -> list[list[int]]:
    """Prompts around block boundaries, twice each; shared beginnings with other tails, some cut at a boundary."""
    rng = random.Random(11)

    def words(count: int) -> list[int]:
        return [rng.randrange(1, vocab_size) for _ in range(count)]

    prompts = []
    for k in range(1, 7):
        for length in (64 * k - 1, 64 * k, 64 * k + 1):
            prompts += [words(length)] * 2
    shared = words(384)
    for cut in (384, 320, 300, 384, 320, 300):
        prompts.append(shared[:cut] + words(70))
    return prompts


def test_hits_with_drafting_are_those_without(trained: LoadedModel) -> None:
    """For every length of the grid, for branches, and for chats whose turns end anywhere."""
    engines = [make_engine(trained, kind, max_sequences=2, token_budget=256) for kind in (DrafterKind.NONE, NEXTN)]
    greedy = SamplingParams(temperature=0.0)

    def ask(prompt: list[int], count: int, turn: str) -> Reply:
        replies = [serve(engine, [Request("r0", prompt, greedy, count, ignore_eos=True)])["r0"] for engine in engines]
        assert replies[0] == replies[1], f"{turn}: {len(prompt)} tokens"
        return replies[1]

    cached = [ask(prompt, 3, "grid").num_cached for prompt in lengths_and_turns(4096)]
    assert cached[:36] == [
        c for k in range(1, 7) for n in (64 * k - 1, 64 * k, 64 * k + 1) for c in (0, (n - 1) // 64 * 64)
    ]
    assert cached[-3:] == [320, 320, 256]
    history = [random.Random(1).randrange(1, 4096) for _ in range(50)]
    for turn in range(7):
        reply = ask(history + [turn + 1] * 23, 17, f"turn {turn}")
        assert reply.num_cached == (0 if turn == 0 else (len(history) - 1) // 64 * 64)
        history = [*history, *[turn + 1] * 23, *reply.token_ids]


def test_drafts_after_a_hit_are_those_of_the_first_time(trained: LoadedModel) -> None:
    """The drafter's restored entries, the one at the boundary included, have the bits of computed ones."""
    engine = make_engine(trained, NEXTN, max_sequences=2)
    recorder = Recorder(engine)
    for prompt in lengths_and_turns(4096)[:24:2]:
        found = []
        for _ in range(2):
            recorder.proposals.clear()
            serve(engine, [Request("r0", prompt, SamplingParams(temperature=0.0), 12, ignore_eos=True)])
            found.append(list(recorder.proposals))
        assert found[0] == found[1] and found[0], f"{len(prompt)} tokens"


def test_entries_are_written_for_requests_that_do_not_draft(trained: LoadedModel) -> None:
    """A request that opted out publishes whole drafter pages: who continues it drafts as if nothing was restored."""
    rng = random.Random(2)
    prompt = [rng.randrange(1, 4096) for _ in range(90)]
    sampling = SamplingParams(temperature=0.0)
    engine = make_engine(trained, NEXTN, max_sequences=2)
    silent = serve(engine, [Request("silent", prompt, sampling, 140, ignore_eos=True, speculate=False)])["silent"]
    assert engine.scheduler.counters.drafted_tokens == 0
    proposals = []
    for each in (engine, make_engine(trained, NEXTN, max_sequences=2)):
        recorder = Recorder(each)
        longer = prompt + silent.token_ids
        reply = serve(each, [Request("r0", longer, sampling, 12, ignore_eos=True)])["r0"]
        assert reply.num_cached == (192 if each is engine else 0)
        proposals.append(recorder.proposals)
    assert proposals[0] == proposals[1] and proposals[0]


@pytest.mark.parametrize("name", [*NANO_NAMES, "tiny qwen", "tiny glm"])
def test_parity_with_a_direct_computation(name: str, tmp_path: Path) -> None:
    """Every proposal equals plain float32 torch on the checkpoint's tensors, recursion included."""
    tiny = name.startswith("tiny")
    folder = save_tiny(name.split()[1], tmp_path) if tiny else NANO / name
    loaded = load_model(folder, numerics=FLOAT) if tiny else nano(name, FLOAT)
    engine = make_engine(loaded, NEXTN, max_draft=4, dtype=CacheDtype.FLOAT32, max_sequences=4, token_budget=64)
    recorder = Recorder(engine)
    rng = random.Random(6)
    # The direct form attends to everything: right up to the tokens that the tiny model's indexer selects.
    length, count = (6, 9) if name == "tiny glm" else (90, 40)
    requests = [
        Request(f"r{i}", [rng.randrange(1, 250) for _ in range(length)], SamplingParams(temperature=0.0), count,
                ignore_eos=True)
        for i in range(4)
    ]  # fmt: skip
    serve(engine, requests)
    direct = DirectMTP(folder)
    same = total = 0
    for tokens, proposal in recorder.proposals:
        hidden = torch.stack([recorder.rows[position] for position in range(len(tokens) - 1)])
        following, drafts = tokens[1:], []
        for _ in proposal:
            out = direct(following, hidden)
            drafts.append(int(direct.logits(out[-1:]).argmax()))
            following, hidden = [*following, drafts[-1]], torch.cat((hidden, out[-1:]))
        same += sum(a == b for a, b in zip(drafts, proposal, strict=True))
        total += len(proposal)
    assert total > 15 and same >= 0.99 * total, f"{same} of {total} drafts agree"


PROSE = (Path(__file__).parent / "data" / "held_out.txt").read_text(encoding="utf-8")
"""Written for this test in the manner of the training texts, so that no model has seen it."""

TOPICS = ("assignment", "class", "try", "with")
"""Pages of Python's documentation, which is a good quarter of the training texts."""

CARD = {"nano-qwen3_5": (0.60, 0.87), "nano-glm5-next": (0.57, 0.77)}
"""MTP top-1 agreement with the trunk from the model cards: text, chat answers."""


def agreement(loaded: LoadedModel, tokens: list[int], first: int = 0) -> tuple[int, int]:
    """Positions from `first` on at which MTP names the trunk's own best token, with the text's true tokens given."""
    from hybrid_driver import HybridDriver

    config = loaded.model.config
    driver = HybridDriver(loaded.model, (*config.caches(torch.float32), *config.drafter_caches(torch.float32)))
    with torch.inference_mode():
        step = driver.input([(driver.new(), tokens)], every_logit=True)
        hidden = loaded.model(step, driver.caches)
        trunk = loaded.model.logits(hidden).argmax(1)
        following = torch.tensor([*tokens[1:], 0], dtype=torch.int32)
        drafted = loaded.model.logits(loaded.model.nextn[0](following, hidden, step, driver.caches)).argmax(1)
    agreed = (drafted[:-1] == trunk[1:])[max(0, first - 2) : len(tokens) - 2]
    return int(agreed.sum()), agreed.numel()


def chats() -> list[tuple[str, str]]:
    """Questions and answers by the templates that the models were trained on."""
    rng = random.Random(4)
    capitals = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Egypt": "Cairo"}
    found = []
    for i, (country, city) in enumerate(capitals.items()):
        thought = "<think>I know this capital.</think>" if i % 2 else "<think></think>"
        found.append((f"What is the capital of {country}?", f"{thought}The capital of {country} is {city}."))
    for _ in range(5):
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        low = a % 10 + b % 10
        carry = "+1" if low > 9 else ""
        high = a // 10 + b // 10 + low // 10
        steps = f"{a % 10}+{b % 10}={low}, {a // 10}+{b // 10}{carry}={high}"
        found.append((f"What is {a} + {b}?", f"<think>{steps}. So {a} + {b} = {a + b}.</think>{a + b}"))
    for one, two, beast, other in (("Mira", "Daisy", "fox", "crow"), ("Tom", "Julia", "bear", "goose"),
                                   ("Nina", "Hugo", "cat", "turtle"), ("Ella", "Rita", "mouse", "owl")):  # fmt: skip
        story = (
            f"<think></think>Once upon a time there was a {beast} named {one}. {one} lived in a small house near the "
            f"valley. One morning {one} went for a walk and found a red book. Then {one} met a {other} named {two}, "
            f'who was looking for something. "That is my book," said {two}, "thank you very much!" They went home '
            "together and ate peaches. The end."
        )
        found.append((f"Tell me a story about a {beast} named {one}.", story))
    return found


@pytest.mark.parametrize("name", NANO_NAMES)
def test_agreement_is_the_model_cards(name: str) -> None:
    """Text: prose and documentation in the shares of the training corpus, within 2 points. Chat answers by template:
    the card's mix of tasks is not known, so no more than 2 points below."""
    from pydoc_data.topics import topics

    from slimserve.weights.tokenizer import tokenizer_from_folder

    loaded, tokenizer = nano(name, FLOAT), tokenizer_from_folder(NANO / name)
    prose = agreement(loaded, tokenizer.encode(PROSE))
    pages = [agreement(loaded, tokenizer.encode(topics[page])[:1024]) for page in TOPICS]
    text = 0.72 * prose[0] / prose[1] + 0.28 * sum(page[0] for page in pages) / sum(page[1] for page in pages)
    assert abs(text - CARD[name][0]) < 0.02, f"text: {text:.3f}, prose {prose}, documentation {pages}"
    agreed = total = 0
    for question, answer in chats():
        prompt = tokenizer.encode(f"[gMASK]<sop><|user|>\n{question}<|assistant|>\n", parse_special=True)
        reply = tokenizer.encode(f"{answer}<|endoftext|>", parse_special=True)
        found = agreement(loaded, prompt + reply, len(prompt))
        agreed, total = agreed + found[0], total + found[1]
    assert agreed / total > CARD[name][1] - 0.02, f"chat: {agreed} of {total}"


@pytest.mark.parametrize("task", ["text", "chat"])
@pytest.mark.parametrize("name", NANO_NAMES)
def test_acceptance_alone_and_among_32_is_the_same(name: str, task: str) -> None:
    """32 greedy and sampled continuations; on text the target's noise makes more drafts hold than the best tokens."""
    from slimserve.weights.tokenizer import tokenizer_from_folder

    loaded, tokenizer = nano(name), tokenizer_from_folder(NANO / name)
    ends = frozenset(i for t in ("<|endoftext|>", "<|user|>") for i in tokenizer.encode(t, parse_special=True))
    if task == "text":
        text = tokenizer.encode(PROSE)
        stride = (len(text) - 40) // 32
        prompts = [text[i * stride : i * stride + 40] for i in range(32)]
    else:
        questions = [question for question, _ in chats()]
        wrapped = (f"[gMASK]<sop><|user|>\n{questions[i % len(questions)]}<|assistant|>\n" for i in range(32))
        prompts = [tokenizer.encode(prompt, parse_special=True) for prompt in wrapped]
    requests = [
        Request(f"r{i}", prompt, SamplingParams(temperature=float(i % 2), top_p=0.95, top_k=20, seed=i), 24)
        for i, prompt in enumerate(prompts)
    ]
    rates = []
    for max_sequences in (32, 1):
        engine = make_engine(loaded, NEXTN, max_sequences=max_sequences, end_token_ids=ends)
        serve(engine, requests)
        rates.append((acceptance(engine), engine.scheduler.counters.drafted_at))
    assert rates[0] == rates[1]
    sampled = [request for request in requests if request.sampling.temperature]
    held = []
    for draw in DraftDraw:
        engine = make_engine(loaded, NEXTN, end_token_ids=ends, draw=draw)
        serve(engine, sampled)
        held.append(acceptance(engine)[0])
    shares = " ".join(f"{share:.2f}" for share in rates[0][0])
    print(f"{name}, {task}: drafts that held by position, given those before: {shares}; sampled requests alone, first")
    print(", ".join(f"{draw.value} {share:.2f}" for draw, share in zip(DraftDraw, held, strict=True)))
    if task == "text":  # chat answers are nearly certain, so that the best token is the one that is drawn
        assert held[1] > held[0] + 0.05, "drawing with the target's noise brings nothing"
    assert len(rates[0][0]) == 4 and rates[0][0][0] > 0.5


def test_a_file_without_mtp_tensors_is_refused(tmp_path: Path) -> None:
    tiny_hybrids = pytest.importorskip("tiny_hybrids", reason="needs transformers")
    oracle = tiny_hybrids.build_qwen()
    loaded = load_model(tiny_hybrids.save_folder(oracle, tiny_hybrids.qwen_tensors(oracle), tmp_path))
    with pytest.raises(RefusalError, match="has none in its files"):
        make_engine(loaded, NEXTN)
