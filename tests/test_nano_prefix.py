"""Prefix hits of the trained hybrids: what is restored, counted exactly, and every bit as from a cold engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import nano_models
import pytest
import torch
from nano_models import GLM, QWEN

from slimserve.cache.budget import CacheDemand, full_budget, minimum_budget
from slimserve.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.step import RequestOutput
from slimserve.serve.model_text import model_text
from slimserve.weights.loader import LoadedModel, load_model

SPACING = 256
CONTEXT = 1536
REPLY = 27


@dataclass
class Answer:
    """A reply with its log probabilities, and what the engine said about the cache."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    cached: int = 0
    cut_by: str | None = None


class Desk:
    """A warm engine whose every answer is compared with a cold one's."""

    def __init__(self, loaded: LoadedModel, *, scale: float | None = None) -> None:
        self.loaded = loaded
        self.warm = self._engine(scale, prefix_caching=True)
        self.cold = self._engine(None, prefix_caching=False)
        self.count = 0

    def _engine(self, scale: float | None, *, prefix_caching: bool) -> Engine:
        config = CacheConfig(prefix_caching=prefix_caching, snapshot_spacing=SPACING)
        scheduler = SchedulerConfig(max_sequences=4, max_context=CONTEXT, token_budget=300, mixed_prefill_budget=128)
        specs = self.loaded.model.config.caches(config.dtype.torch)
        demand = CacheDemand(scheduler.max_sequences, CONTEXT, scheduler.token_budget, SPACING)
        budget = full_budget(specs, demand) if scale is None else int(minimum_budget(specs, demand) * scale)
        cache = CacheConfig(prefix_caching=prefix_caching, snapshot_spacing=SPACING, budget_bytes=budget)
        return Engine(self.loaded.model, EngineConfig(cache=cache, scheduler=scheduler, numerics=self.loaded.numerics))

    def _request(self, name: str, prompt: list[int], count: int) -> Request:
        return Request(name, list(prompt), SamplingParams(temperature=0.0, logprobs=2), count, ignore_eos=True)

    def ask(self, prompt: list[int], count: int = 3) -> Answer:
        """The warm engine's answer; fails where the cold engine gives another bit."""
        return self.ask_all({"q": (prompt, count)})["q"]

    def ask_all(self, prompts: dict[str, tuple[list[int], int]]) -> dict[str, Answer]:
        """The same for requests that arrive together."""
        answers = []
        for engine in (self.warm, self.cold):
            self.count += 1
            for name, (prompt, count) in prompts.items():
                engine.submit(self._request(f"{name}/{self.count}", prompt, count))
            answers.append(self._drain(engine))
        warm, cold = answers
        for name, answer in warm.items():
            assert answer.tokens == cold[name].tokens, f"{name}: a hit of {answer.cached} tokens changed the text"
            assert answer.logprobs == cold[name].logprobs, f"{name}: a hit of {answer.cached} tokens changed bits"
        return warm

    @staticmethod
    def _drain(engine: Engine) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        while engine.has_work:
            for output in engine.step():
                _take(found.setdefault(output.request_id.partition("/")[0], Answer()), output)
            engine.audit()
        return found


def _take(answer: Answer, output: RequestOutput) -> None:
    assert output.error is None, output.error
    answer.tokens += output.token_ids
    answer.logprobs += output.logprobs
    answer.cached, answer.cut_by = output.num_cached_tokens, output.cache_cut_by


@pytest.fixture(scope="module", params=[QWEN, GLM])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model = load_model(nano_models.any_form(request.param))
    if nano_models.is_reference(model):
        pytest.skip("the C++ kernels are not built here; the torch references would take minutes")
    return model


def words(count: int, seed: int) -> list[int]:
    return torch.randint(32, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_the_same_prompt_twice(loaded: LoadedModel) -> None:
    desk = Desk(loaded)
    for k in range(1, 7):
        for length in (64 * k - 1, 64 * k, 64 * k + 1):
            prompt = words(length, seed=length)
            assert desk.ask(prompt).cached == 0
            again = desk.ask(prompt)
            assert again.cached == (length - 1) // 64 * 64, f"length {length}"
            assert again.cut_by is None


def test_shared_beginnings_with_different_tails(loaded: LoadedModel) -> None:
    """The second prompt restores the snapshot kept during the first's prefill, and marks where it left; the third
    restores all that is shared."""
    desk = Desk(loaded)
    shared = words(600, seed=1)
    assert desk.ask(shared + words(90, seed=2)).cached == 0
    second = desk.ask(shared + words(90, seed=3))
    assert second.cached == 2 * SPACING and second.cut_by == "recurrent"
    for seed in (4, 5):
        later = desk.ask(shared + words(90, seed=seed))
        assert later.cached == 576 and later.cut_by is None


def test_a_chat_of_ten_turns(loaded: LoadedModel) -> None:
    """Each turn restores up to the last block of the reply before it: the state at a reply's end is kept."""
    desk = Desk(loaded)
    history, computed, beyond_prompt = words(130, seed=0), 0, 0
    for turn in range(10):
        prompt = history + words(29, seed=turn + 1)
        answer = desk.ask(prompt, REPLY)
        assert answer.cached == computed // 64 * 64, f"turn {turn}"
        last_prompt_block = (len(history) - REPLY) // 64 * 64
        beyond_prompt += turn > 0 and answer.cached > last_prompt_block
        history = prompt + answer.tokens
        computed = len(history) - 1  # the last token of a reply is never fed
    assert beyond_prompt >= 2, "some turns must restart from the state at the end of a reply, not of a prompt"
    before = len(history) - REPLY - 29
    edited = desk.ask(history[:before] + words(50, seed=99))
    assert edited.cached == before // 64 * 64, "editing the last turn goes back to where it began"


def test_chats_that_share_a_system_prompt(loaded: LoadedModel) -> None:
    desk = Desk(loaded)
    system = words(200, seed=7)
    cached = [desk.ask(system + words(130 + 30 * i, seed=20 + i), 4).cached for i in range(4)]
    # The first computes it, the second finds no state at 192 but marks it, from the third on it is restored.
    assert cached == [0, 0, 192, 192]


def test_turns_rendered_by_the_template(loaded: LoadedModel) -> None:
    """Messages in, as a client sends them: a turn restores the deepest kept boundary that its text still shares."""
    text = model_text(loaded.source, loaded.model.config.vocab_size)
    desk = Desk(loaded)
    messages = [{"role": "system", "content": nano_models.documentation()[1000:1700]}]
    kept, past, hits = {0}, [], []
    for question in ("Who are you?", "What is the capital of France?", "Tell me a story.", "What is 7 + 5?"):
        messages.append({"role": "user", "content": question})
        prompt = text.encode_chat(messages, None, {})
        answer = desk.ask(prompt, 40)
        shared = next((i for i, (a, b) in enumerate(zip(prompt, past, strict=False)) if a != b), len(past))
        usable = max(0, min(shared, len(past) - 1, len(prompt) - 1))
        assert answer.cached == max(b for b in kept if b <= usable), f"{question}: shares {shared} of {len(past)}"
        hits.append(answer.cached)
        past = prompt + answer.tokens
        kept |= {(len(prompt) - 1) // 64 * 64, len(prompt) // 64 * 64, (len(past) - 1) // 64 * 64}
        kept |= {usable // 64 * 64, *range(SPACING, len(prompt), SPACING)}
        end = next((i for i, token in enumerate(answer.tokens) if token in text.end_token_ids), len(answer.tokens))
        reply = text.decode(answer.tokens[:end], keep_control=True)
        messages.append({"role": "assistant", "content": reply})
    assert hits[0] == 0 and all(hit >= 192 for hit in hits[1:])


def test_four_interleaved_chats(loaded: LoadedModel) -> None:
    """Turns of four chats arrive together; each restores its own past."""
    desk = Desk(loaded)
    chats = [words(70 + 40 * i, seed=30 + i) for i in range(4)]
    for turn in range(3):
        prompts = {str(i): (chats[i] + words(29 + i, seed=100 + 10 * turn + i), REPLY) for i in range(4)}
        for name, answer in desk.ask_all(prompts).items():
            i = int(name)
            assert answer.cached == (0 if turn == 0 else (len(chats[i]) - 1) // 64 * 64), f"chat {i}, turn {turn}"
            chats[i] = prompts[name][0] + answer.tokens


def test_eviction_in_between(loaded: LoadedModel) -> None:
    """A cache for little more than one sequence: prompts push each other out, and no bit changes."""
    desk = Desk(loaded, scale=1.0)
    popular, hits = words(300, seed=0), 0
    for i in range(8):
        hits += desk.ask(popular, 3).cached > 0
        assert desk.ask(words(500 + 90 * (i % 8), seed=200 + i), 3).cached == 0
    assert any(usage.num_evictions for usage in desk.warm.cache.usage()), "nothing was ever pushed out"
    assert hits >= 4, "what is asked again and again stays"


def test_bytes_of_every_group_are_the_cache_tables(loaded: LoadedModel) -> None:
    """Memory per token and per sequence: the live tensors, and the formula written out from the geometry."""
    desk = Desk(loaded)
    engine, config = desk.warm, loaded.model.config
    storage = engine.cache.storage
    assert storage is not None and storage.num_bytes == engine.cache_plan.used_bytes
    recurrent = config.recurrent
    num_recurrent = config.num_layers - 2
    state = recurrent.heads * recurrent.key_dim * recurrent.value_dim * 4
    tail = 3 * recurrent.conv_dim * 4
    expected = {"recurrent": num_recurrent * (state + tail)}
    if hasattr(config, "latent"):
        expected["latent"] = 2 * 64 * config.latent.latent_dim * 2
        expected["indexer"] = 2 * (64 // config.pool) * config.index_dim * 2
    else:
        expected["attention"] = 2 * 64 * 2 * config.num_kv_heads * config.head_dim * 2
    assert {plan.name: plan.unit_bytes for plan in engine.cache_plan.groups} == expected
