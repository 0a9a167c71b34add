"""Qualification: evidence is complete, readable and counted only for its own settings; a whole run with -m slow."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slimserve import fetch
from slimserve.errors import RunError, UsageError
from slimserve.measure.booted import BootedProfile
from slimserve.measure.client import Endpoint
from slimserve.measure.gates import GateResult, Trial, load_oracle, needles, prefix_cache, row_independence
from slimserve.measure.page import evidence_page
from slimserve.measure.prompts import PromptSource
from slimserve.measure.qualify import qualify, revision, write_evidence
from slimserve.measure.questions import QUESTIONS
from slimserve.profiles import evidence as evidence_module
from slimserve.profiles.evidence import Status
from slimserve.profiles.resolve import resolve


def evidence(**changes: Any) -> dict[str, Any]:
    profile = resolve("smollm2-135m", device="cpu")
    rate = {"median": 20.0, "lowest": 18.0, "highest": 21.0, "spread": 0.15, "count": 3}
    gates = [
        GateResult("canary-text", True, "<b>said & done</b>"),
        GateResult("bench-exact", True, "fine", {"tokens_per_second": {"1": rate, "8": rate}}, {"c1": 0.15}),
        GateResult("needles", True, "found", {"gain": {"256": 12.5}}),
    ]
    return {
        "profile": profile.name,
        "platform": "cpu",
        "settings_hash": profile.config_hash,
        "started": "2026-01-01T00:00:00Z",
        "boot_seconds": 1.0,
        "hardware": {"cpu": "a processor", "cores": 2, "accelerators": []},
        "versions": {"python": "3.11"},
        "revision": "abc",
        "plan": {"terms": [{"name": "runtime", "bytes": 1 << 20, "source": "measured"}]},
        "gates": [gate.as_json() for gate in gates],
        "passed": True,
        **changes,
    }


def test_written_evidence_supports_its_configuration_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, page = write_evidence(evidence(), tmp_path)
    assert json.loads(data.read_text(encoding="utf-8"))["passed"] and page.exists()
    monkeypatch.setattr(evidence_module, "EVIDENCE_FOLDER", tmp_path)
    assert resolve("smollm2-135m", device="cpu").status is Status.SUPPORTED
    assert resolve("smollm2-135m", device="cpu", flags={"max_sequences": 2}).status is not Status.SUPPORTED
    write_evidence(evidence(settings_hash="quick run of it"), tmp_path)
    assert resolve("smollm2-135m", device="cpu").status is not Status.SUPPORTED


def test_the_page_is_well_formed_and_escapes_what_models_say() -> None:
    page = evidence_page(evidence())
    assert "&lt;b&gt;said &amp; done&lt;/b&gt;" in page and "<b>said" not in page
    assert page.count("<svg") == 2 and "slimserve qualify smollm2-135m" in page

    class Reader(html.parser.HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "br"):
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    reader = Reader()
    reader.feed(page)
    assert reader.open_tags == []


def test_evidence_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="another folder with --out"):
        write_evidence(evidence(), tmp_path / "file")


def test_only_recorded_configurations_qualify() -> None:
    with pytest.raises(UsageError, match="max_sequences changed"):
        qualify(resolve("smollm2-135m", device="cpu", flags={"max_sequences": 2}))
    with pytest.raises(UsageError, match="no tuned record"):
        qualify(resolve("qwen38-nvfp4-1", device="cpu"))


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RunError, match=r"did not start: .*there is no profile"), BootedProfile(["no-such-profile"]):
        pass


def test_forty_questions_with_checkable_answers() -> None:
    assert len(QUESTIONS) == 40 == len({question for question, _ in QUESTIONS})
    for _, pattern in QUESTIONS:
        assert re.compile(pattern).search("no idea whatsoever") is None
    by_question = {question.split("?")[0]: pattern for question, pattern in QUESTIONS}
    assert re.search(by_question["What is 9 times 6"], "The answer is 54.")
    assert not re.search(by_question["What is 9 times 6"], "The answer is 545.")


@pytest.mark.parametrize("name", ["qwen25-coder-0.5b", "smollm2-135m", "gemma3-270m", "nano-qwen3_5", "nano-glm5-next"])
def test_oracles_are_whole(name: str) -> None:
    oracle = load_oracle(name)
    assert oracle is not None and oracle["source"] and len(oracle["cases"]) >= 6
    for case in oracle["cases"]:
        assert len(case["output_token_ids"]) == len(case["margins"]) == 48 and case["prompt_token_ids"]
        assert min(case["margins"]) >= 0
    assert load_oracle("no-such-profile") is None


def test_the_revision_is_known() -> None:
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?|unknown", revision())


class FakeTrial(Trial):
    """A trial whose model is a function; `crossing` lets a request's answer depend on others, `stale` on the cache."""

    def __init__(self, *, crossing: bool = False, stale: bool = False, forgetful: bool = False) -> None:
        profile = resolve("smollm2-135m", device="cpu")
        assert profile.record is not None
        source = PromptSource(Endpoint("http://127.0.0.1:1"), ids=tuple(range(5000)))
        super().__init__(BootedProfile([]), profile, profile.record.qualify, source, lambda: 1)
        self.crossing, self.stale, self.forgetful = crossing, stale, forgetful
        self.seen: list[tuple[int, ...]] = []

    def ids(self, text: str) -> list[int]:
        return [9000 + len(word) for word in text.split()]

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        known = 9000 in {token // 1 for token in token_ids[:-3]} or sum(t > 9000 for t in token_ids) > 12
        value = -1.0 if known and not self.forgetful else -3.0
        if self.stale and tuple(token_ids) in self.seen:
            value -= 1e-6
        self.seen.append(tuple(token_ids))
        return [(value, 0.0)] * (len(token_ids) - 1)

    def generate(self, token_ids: list[int], count: int, **more: Any) -> tuple[list[int], list[float], int]:
        key = tuple(token_ids)
        cached = 64 if any(key[:64] == old[:64] for old in self.seen) and "cache_salt" not in more else 0
        self.seen.append(key)
        drift = 1e-7 if self.crossing and more.get("cache_salt") == "together" else 0.0
        drift += 1e-7 if self.stale and cached else 0.0
        return [sum(token_ids) % 97] * count, [-1.0 - drift] * count, cached


def test_the_gates_catch_what_they_are_for() -> None:
    assert row_independence(FakeTrial()).passed
    assert not row_independence(FakeTrial(crossing=True)).passed
    assert prefix_cache(FakeTrial()).passed
    assert not prefix_cache(FakeTrial(stale=True)).passed
    assert needles(FakeTrial()).passed
    assert not needles(FakeTrial(stale=True)).passed
    assert not needles(FakeTrial(forgetful=True)).passed


@pytest.mark.slow
def test_a_whole_quick_run() -> None:
    profile = resolve("smollm2-135m", device="cpu")
    if fetch.locate(profile.files[0]) is None:
        pytest.skip("smollm2-135m is not in the model cache; slimserve fetch smollm2-135m brings it")
    result = qualify(replace(profile), quick=True)
    assert result["passed"], [gate for gate in result["gates"] if not gate["passed"]]
    assert {"canary-text", "agreement", "soak", "memory"} <= {gate["name"] for gate in result["gates"]}
