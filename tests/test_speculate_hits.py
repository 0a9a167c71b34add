"""What a request finds in the prefix cache does not depend on drafting: chats, stops, interleaving, eviction."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_dflash2
from speculation_rig import Reply, ScriptedDrafter, make_engine, said, serve
from tiny_mtp import NANO, save_tiny

from slimserve.cache.budget import cache_bytes
from slimserve.engine.config import DrafterKind
from slimserve.engine.loop import Engine
from slimserve.engine.request import FinishReason, Request, SamplingParams
from slimserve.weights.loader import LoadedModel, load_model

VOCAB = 250
CASES = ("nano-qwen3_5 nextn", "nano-glm5-next nextn", "nano-glm5-next lookup", "tiny qwen dflash2")


Case = tuple[LoadedModel, dict[str, Any]]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model, and what makes an engine draft for it."""
    name, _, kind = request.param.rpartition(" ")
    if name.startswith("tiny"):
        pytest.importorskip("tiny_hybrids", reason="needs transformers")
        folder = tmp_path_factory.mktemp("models")
        companion = load_model(tiny_dflash2.save_folder(folder / "drafter", tiny_dflash2.tensors()), drafter=True)
        target = load_model(save_tiny(name.split()[1], folder / "target"))
        return target, {"kind": DrafterKind.DFLASH2, "companion": companion.model}
    if not (NANO / name).exists():
        pytest.skip(f"the trained checkpoint {name} is not beside the checkout")
    return load_model(NANO / name), {"kind": DrafterKind(kind)}


def engines_of(case: Case, **settings: Any) -> list[Engine]:
    loaded, drafting = case
    return [make_engine(loaded, **settings), make_engine(loaded, **drafting, **settings)]


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def ask(engines: list[Engine], requests: list[Request], turn: str) -> dict[str, Reply]:
    """The same of every engine; replies and hits must agree."""
    found = [serve(engine, requests) for engine in engines]
    for other in found[1:]:
        assert said(other) == said(found[0]), turn
        hits = [{name: (reply.num_cached, reply.cut_by) for name, reply in each.items()} for each in (found[0], other)]
        assert hits[0] == hits[1], f"{turn}: hits without and with drafts"
    return found[0]


def test_ten_turns_of_four_chats_at_once(case: Case) -> None:
    """A shared system prompt, turns of any length, replies that end at a stop or at their length; one chat edits its
    last turn. The hit is the last block boundary that the chat before this turn reached."""
    rng = random.Random(4)
    engines = engines_of(case, max_sequences=4, max_context=1024, token_budget=256)
    system = words(rng, 70)
    chats = [list(system) for _ in range(4)]
    reused = 0
    for turn in range(10):
        requests = []
        for number, chat in enumerate(chats):
            if number == 3 and turn == 5:
                del chat[-20:]
            chat += words(rng, rng.randrange(3, 40))
            sampling = SamplingParams(temperature=float(number % 2), top_p=0.95, top_k=20, seed=turn)
            stops = frozenset(rng.sample(range(VOCAB), 12))
            requests.append(Request(f"r{number}", list(chat), sampling, rng.randrange(4, 14), stop_token_ids=stops))
        for name, reply in ask(engines, requests, f"turn {turn}").items():
            chats[int(name[1:])] += reply.token_ids
            reused += reply.num_cached
    assert reused > 4 * 9 * 64
    assert engines[1].scheduler.counters.drafted_tokens > 0


def test_chats_one_after_another_in_a_cache_too_small(case: Case) -> None:
    """Chats that evict each other's blocks: drafting keeps and loses the same ones."""
    rng = random.Random(5)
    loaded, drafting = case
    settings: dict[str, Any] = {"max_sequences": 2, "max_context": 512, "token_budget": 192}
    engines = []
    for kind in ({}, drafting):
        roomy = make_engine(loaded, **kind, **settings).cache
        budget = cache_bytes([group.spec for group in roomy.groups], roomy.plan.demand, 9)
        engines.append(make_engine(loaded, **kind, **settings, budget_bytes=budget))
    plans = [engine.cache.plan.groups[: len(engines[0].cache.groups)] for engine in engines]
    assert [g.num_units for g in plans[0]] == [g.num_units for g in plans[1]], "caches of different sizes"
    chats = [words(rng, 100) for _ in range(4)]
    cached = []
    for turn in range(28):
        chat = rng.choice(chats) if turn % 3 else chats[turn % 4]
        chat += words(rng, rng.randrange(3, 30))
        if len(chat) > 380:
            del chat[rng.randrange(60, 200) :]
        request = Request("r0", list(chat), SamplingParams(temperature=0.0), rng.randrange(3, 14), ignore_eos=True)
        reply = ask(engines, [request], f"turn {turn}")["r0"]
        chat += reply.token_ids
        cached.append(reply.num_cached)
    assert (
        sum(count > 0 for count in cached) > 5 and sum(group.num_evictions for group in engines[0].cache.usage()) > 10
    )


@pytest.mark.parametrize("total", [63, 64, 65, 128])
def test_a_reply_that_ends_inside_a_draft_leaves_what_it_would_leave_without(case: Case, total: int) -> None:
    """The token that ends a reply is never computed without drafts; with drafts it may have been, and is not kept."""
    loaded, greedy = case[0], SamplingParams(temperature=0.0)
    plain = make_engine(loaded, max_sequences=1)
    for seed in range(40):  # until the twelfth token of the reply was not said before
        prompt = words(random.Random(seed), total - 12)
        reply = serve(plain, [Request("r0", prompt, greedy, 16, ignore_eos=True)])["r0"].token_ids
        if reply[11] not in reply[:11]:
            break
    settings: dict[str, Any] = {"max_sequences": 2, "max_draft": 7}
    engines = [make_engine(loaded, **settings)]
    for seed in range(3):
        scripted = ScriptedDrafter({"r0": reply, "next": []}, 1.0, seed=seed)
        engines.append(make_engine(loaded, drafter=scripted, **settings))
    first = ask(engines, [Request("r0", prompt, greedy, 30, stop_token_ids=frozenset({reply[11]}))], "the reply")["r0"]
    assert first.ends == [FinishReason.STOP] and first.token_ids == reply[:12]
    again = [*prompt, *reply[:12], 5, 6, 7]
    follow = ask(engines, [Request("next", again, greedy, 1, ignore_eos=True)], "the next turn")["next"]
    assert follow.num_cached == (total - 1) // 64 * 64
