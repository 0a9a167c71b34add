"""Qualification: evidence is complete, readable and counted only for its own settings; a whole run with -m slow."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slimserve import fetch
from slimserve.errors import RunError, UsageError
from slimserve.hardware import Hardware
from slimserve.measure.booted import BootedProfile
from slimserve.measure.client import Endpoint
from slimserve.measure.gates import GateResult, Trial, digest, likelihood, load_oracle, prefix_cache, row_independence
from slimserve.measure.gates_load import live_beside_plan
from slimserve.measure.gates_needles import Speech, likely_least, needles, needles_of
from slimserve.measure.page import evidence_page
from slimserve.measure.prompts import PromptSource
from slimserve.measure.qualify import MADE, WORDLESS, calibrated, qualify, revision, without_places, write_evidence
from slimserve.measure.questions import QUESTIONS, task_score
from slimserve.profiles import evidence as evidence_module
from slimserve.profiles.evidence import CHANGED, EVIDENCE_FOLDER, Status, find_evidence, load_evidence
from slimserve.profiles.planning import fitted
from slimserve.profiles.record import NeedleStyle
from slimserve.profiles.registry import load_catalog
from slimserve.profiles.report import list_rows, show_lines
from slimserve.profiles.resolve import resolve

MIB = 1 << 20


def evidence(**changes: Any) -> dict[str, Any]:
    profile = resolve("smollm2-135m", device="cpu")
    assert profile.record is not None
    rate = {"median": 20.0, "lowest": 18.0, "highest": 21.0, "spread": 0.15, "count": 3}
    ran = {
        "canary-text": GateResult("canary-text", True, "<b>said & done</b>"),
        "bench-exact": GateResult("bench-exact", True, "fine", {"tokens_per_second": {"1": rate, "8": rate}}),
        "needles": GateResult(
            "needles", True, "found", {"found": {"256": 7}, "asked": {"256": 8}, "without_needle": 0}
        ),
        "memory": GateResult(
            "memory", True, "as planned", {"planned_bytes": 9 * MIB, "live_bytes": 8 * MIB, "start_bytes": 7 * MIB}
        ),
    }
    results = [ran.get(name, GateResult(name, True, "fine")) for name in profile.record.qualify.gates]
    return {
        "profile": profile.name,
        "platform": "cpu",
        "settings_hash": profile.config_hash,
        "started": "2026-01-01T00:00:00Z",
        "boot_seconds": [1.0, 0.5],
        "hardware": {"cpu": "a processor", "cores": 2, "memory_bytes": 1 << 30, "accelerators": []},
        "versions": {"python": "3.11"},
        "revision": "abc",
        "settings": {"max_sequences": 8},
        "files": [],
        "plan": {"terms": [{"name": "runtime", "bytes": 1 << 20, "source": "measured"}]},
        "gates": [calibrated([result, result]) for result in results],
        "passed": True,
        **changes,
    }


def test_written_evidence_supports_its_configuration_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "EVIDENCE_FOLDER", tmp_path)

    def status(**changes: Any) -> tuple[Status, str]:
        data, page = write_evidence(evidence(**changes), tmp_path)
        assert data.exists() and page.exists()
        profile = resolve("smollm2-135m", device="cpu")
        return profile.status, profile.status_reason

    assert status() == (Status.SUPPORTED, "qualified 2026-01-01 at revision abc")
    assert resolve("smollm2-135m", device="cpu", flags={"max_sequences": 2}).status is not Status.SUPPORTED
    assert any("evidence" in line and "these settings: passed" in line for line in show_lines(resolve("smollm2-135m")))
    few = [gate for gate in evidence()["gates"] if gate["name"] not in ("needles", "soak")]
    assert status(gates=few) == (Status.IN_PROGRESS, "qualified without needles, soak; run slimserve qualify again")
    assert "local changes" in status(revision=f"abc{CHANGED}")[1]
    assert status(settings_hash="quick run of it")[0] is Status.IN_PROGRESS
    row = next(row for row in list_rows()[0] if row.name == "smollm2-135m")
    assert row.status is Status.IN_PROGRESS and list_rows()[1] == ()
    assert row.as_json()["status_reason"] == "qualified with other settings; run slimserve qualify again"
    assert any("other settings" in line for line in show_lines(resolve("smollm2-135m", device="cpu")))


def test_settings_lowered_for_a_small_machine_are_not_the_qualified_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_evidence(evidence(), tmp_path)
    monkeypatch.setattr(evidence_module, "EVIDENCE_FOLDER", tmp_path)
    whole = resolve("smollm2-135m", device="cpu")
    small = replace(whole, hardware=replace(whole.hardware, memory_total=3 << 30, memory_free=1200 << 20))
    assert whole.status is Status.SUPPORTED and fitted(small).settings != small.settings
    assert fitted(small).status is Status.IN_PROGRESS and "lowered" in fitted(small).status_reason


QUALIFIED = ("qwen25-coder-0.5b", "smollm2-135m", "gemma3-270m", "nano-qwen3_5", "nano-glm5-next")


@pytest.mark.parametrize("path", sorted(EVIDENCE_FOLDER.glob("*/*.json")), ids=lambda path: f"{path.parent.name}")
def test_evidence_in_the_tree(path: Path) -> None:
    """It parses, names a revision, its page is its own, and it supports exactly the settings that it is about; of made
    weights it supports nothing."""
    body = json.loads(path.read_text(encoding="utf-8"))
    run = next(run for run in load_evidence(path.parent.name) if run.path.name == path.name)
    made = run.platform.endswith(MADE)
    profile = resolve(run.profile, platform=run.platform.removesuffix(MADE))
    current = profile.config_hash == run.settings_hash
    assert made or current == (profile.status is Status.SUPPORTED), profile.status_reason
    if made:
        assert body["passed"] and not body["files"] and [gate["name"] for gate in body["gates"]] == [*WORDLESS]
    # A device's machine may hold no checkout: there the revision is stated to it, and the evidence says so.
    stated = r"[0-9a-f]{12}( as stated, in no checkout)?"
    assert re.fullmatch(stated, run.revision), "evidence names a commit without local changes"
    assert path.with_suffix(".html").read_text(encoding="utf-8") == evidence_page(body)
    for text in (path, path.with_suffix(".html")):
        found = re.search(r"/(root|home|work|tmp|opt|usr|Users)/", text.read_text(encoding="utf-8"))
        assert found is None, f"{text.name} names a folder of the machine that wrote it"
    assert profile.record is not None
    asked = {"needle_style": profile.record.qualify.needle_style.value}
    if current:
        assert body["asked"] == json.loads(json.dumps({**asdict(profile.record.qualify), **asked})), (
            "asked less or more"
        )
        assert all(len(gate["seconds"]) == 2 for gate in body["gates"]), "every gate is calibrated by a second run"


def test_the_readme_says_what_is_computed() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    claimed = {}
    for names, _, status in rows:
        known = [name for name in re.findall(r"`([^`]+)`", names) if name in load_catalog().records]
        words = [word.strip() for word in status.split(",")]
        claimed |= dict(zip(known, words * (len(known) if len(words) == 1 else 1), strict=True))
    plain = Hardware("a processor", 4, frozenset(), 64 << 30, 64 << 30)
    computed = {row.name: row.status.value for row in list_rows(plain)[0]}
    assert set(QUALIFIED) <= set(claimed) and claimed == {name: computed[name] for name in claimed}


def test_stale_evidence_is_told_and_never_breaks_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUALIFIED:
        write_evidence(evidence(profile=name, settings_hash="0" * 16), tmp_path)
    monkeypatch.setattr(evidence_module, "EVIDENCE_FOLDER", tmp_path)
    rows, problems = list_rows()
    assert problems == () and not [row.name for row in rows if row.status is Status.SUPPORTED]
    assert resolve("nano-qwen3_5", device="cpu").status_reason == (
        "qualified with other settings; run slimserve qualify again"
    )


def test_two_runs_of_one_build_are_compared() -> None:
    def run(rate: float, bits: str = "a", passed: bool = True) -> GateResult:
        figures = {"tokens_per_second": {"1": {"median": rate, "lowest": 0.5 * rate}}}
        return GateResult("bench-exact", passed, f"{rate}", figures, {"replies": bits})

    level = calibrated([run(100.0), run(90.0)])
    assert level["passed"] and level["noise"] == {
        "tokens_per_second.1.median": pytest.approx(0.1),
        "tokens_per_second.1.lowest": pytest.approx(0.1),
    }
    busy = calibrated([run(100.0), run(60.0)])
    assert not busy["passed"] and "too busy" in busy["detail"]
    other = calibrated([run(100.0), run(100.0, "b")])
    assert not other["passed"] and "DIFFER in replies" in other["detail"]
    failed = calibrated([run(100.0), run(99.0, passed=False)])
    assert not failed["passed"] and failed["detail"].startswith("99")


def test_evidence_leaves_out_where_it_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.node", lambda: "somebodys-box")
    said = {"said": [f"{Path.home()}/x failed on somebodys-box", ("a", 1)], "n": 2}
    assert without_places(said) == {"said": ["~/x failed on <host>", ["a", 1]], "n": 2}
    monkeypatch.setenv("SLIMSERVE_CACHE", str(tmp_path / "kept"))
    assert without_places(f"reused from {tmp_path}/kept/triton") == "reused from <cache>/triton"


def test_the_page_is_well_formed_and_escapes_what_models_say() -> None:
    page = evidence_page(evidence())
    assert "&lt;b&gt;said &amp; done&lt;/b&gt;" in page and "<b>said" not in page
    assert page.count("<svg") == 3 and "slimserve qualify smollm2-135m" in page

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


@pytest.mark.parametrize("name", QUALIFIED)
def test_oracles_are_whole(name: str) -> None:
    oracle = load_oracle(name)
    assert oracle is not None and oracle["source"] and len(oracle["cases"]) >= 6
    assert oracle["likelihood"]["source"] and 0 < oracle["likelihood"]["nats_per_token"] < 10
    for case in oracle["cases"]:
        assert len(case["output_token_ids"]) == len(case["margins"]) == 48 and case["prompt_token_ids"]
        assert min(case["margins"]) >= 0
    assert load_oracle("no-such-profile") is None


def test_the_revision_is_known() -> None:
    assert re.fullmatch(r"[0-9a-f]{12}( with changes)?|unknown", revision())


@cache
def number_of(word: str) -> int:
    """A token id for a word of the fake model's tokenizer."""
    return 9000 + int(digest(word)[:4], 16)


class FakeTrial(Trial):
    """A trial whose model is a function.

    `crossing`: a request's answer depends on others, `stale`: on the cache; `forgetful`: it finds no needle,
    `guessing`: it always names the same answer.
    """

    def __init__(self, **faults: bool) -> None:
        profile = resolve("smollm2-135m", device="cpu")
        assert profile.record is not None
        source = PromptSource(Endpoint("http://127.0.0.1:1"), ids=tuple(range(5000)))
        super().__init__(BootedProfile([]), profile, profile.record.qualify, source, lambda: 1)
        names = ("crossing", "stale", "forgetful", "guessing")
        assert set(faults) <= set(names)
        self.crossing, self.stale, self.forgetful, self.guessing = (faults.get(name, False) for name in names)
        self.seen: list[tuple[Any, ...]] = []

    def ids(self, text: str, mark: bool = False) -> list[int]:
        return [1] * mark + [number_of(word) for word in re.findall(r"\w+|[^\w\s]", text)]

    def score(self, token_ids: list[int]) -> list[tuple[float, float]]:
        return [(-2.0, -1.0)] * (len(token_ids) - 1)

    def generate(self, token_ids: list[int], count: int, **more: Any) -> tuple[list[int], list[float], int]:
        salt = str(more.get("cache_salt", ""))
        key = (salt, *token_ids)
        known = any(key[:64] == old[:64] for old in self.seen)
        cached = len(token_ids) // 64 * 64 if known and (not salt or salt.startswith("needle")) else 0
        self.seen.append(key)
        drift = 1e-7 if self.crossing and salt == "together" else 0.0
        drift += 1e-7 if self.stale and cached else 0.0
        made = [sum(token_ids) % 97] * count
        if salt.startswith("needle") and not self.forgetful:
            made = self.recalled(token_ids, count) or made
        return made, [-1.0 - drift] * count, cached

    def recalled(self, token_ids: list[int], count: int) -> list[int]:
        """What followed the earlier place that reads like the end of the prompt."""
        end = token_ids[-6:]
        for start in range(len(token_ids) - 7, 0, -1):
            if token_ids[start : start + 6] == end:
                return token_ids[start + 6 : start + 6 + count]
        return self.ids("golden nine") if self.guessing else []


def test_the_gates_catch_what_they_are_for() -> None:
    assert row_independence(FakeTrial()).passed
    assert not row_independence(FakeTrial(crossing=True)).passed
    assert prefix_cache(FakeTrial()).passed
    assert not prefix_cache(FakeTrial(stale=True)).passed
    assert needles(FakeTrial()).passed
    assert not needles(FakeTrial(stale=True)).passed
    assert not needles(FakeTrial(forgetful=True)).passed
    assert not likelihood(FakeTrial()).passed, "other tokens and another likelihood than the reference's"


def test_a_needle_that_is_answered_where_none_was_planted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimserve.measure.gates_needles._COLOURS", ("golden",))
    monkeypatch.setattr("slimserve.measure.gates_needles._COUNTS", ("nine",))
    assert needles(FakeTrial()).passed
    result = needles(FakeTrial(guessing=True))
    assert not result.passed and result.figures["without_needle"] > 0


def test_how_few_needles_a_share_lets_expect() -> None:
    """Binomial tails by hand: of 5 at 1/2 none has 3.1 % and one at most 18.8 %, of 7 one at most 6.3 %."""
    assert likely_least(0.5, 5) == likely_least(0.5, 7) == 1 and likely_least(0.5, 10) == 2
    assert likely_least(0.5, 4) == 1, "none of four would be likely enough, but it is no recall"
    assert likely_least(1.0, 8) == 8 and likely_least(0.75, 20) == 12


@pytest.mark.parametrize("style", list(NeedleStyle))
def test_needles_are_planted_once_at_exact_lengths(style: NeedleStyle) -> None:
    trial = FakeTrial()
    speech = Speech(trial.ids, lambda text: trial.ids(text, mark=True), lambda text: [5, *trial.ids(text), 6, 7])
    made = needles_of(speech, style, 256, 9)
    assert {len(needle.prompt) for needle in made} == {len(needle.control) for needle in made} == {256}
    assert len({needle.prompt for needle in made}) == 9 and {needle.prompt[0] for needle in made} == {
        NeedleStyle.CONTINUE: {1}, NeedleStyle.CODE: {5},
    }[style]  # fmt: skip
    assert [needle.depth for needle in made] == [n / 8 for n in range(9)]
    for needle in made:
        planted = sum(needle.prompt[n : n + len(needle.answer)] == needle.answer for n in range(256))
        assert planted == 1 and needle.prompt != needle.control


def test_live_memory_lies_between_the_plan_without_caches_and_the_plan() -> None:
    assert live_beside_plan(980 * MIB, 1000 * MIB, 400 * MIB).passed
    assert live_beside_plan(1030 * MIB, 1000 * MIB, 400 * MIB).passed
    assert not live_beside_plan(1031 * MIB, 1000 * MIB, 400 * MIB).passed, "more than planned"
    assert live_beside_plan(540 * MIB, 1000 * MIB, 400 * MIB).passed
    assert not live_beside_plan(530 * MIB, 1000 * MIB, 400 * MIB).passed, "a term is not there at all"
    assert not live_beside_plan(0, 10 * MIB, 0).passed


def test_the_task_asks_forty_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = FakeTrial()
    trial.record = replace(trial.record, task_score=2)
    answers = iter(["12", "545", "sixty-three: 63", *["no idea"] * 37])
    monkeypatch.setattr(FakeTrial, "chat", lambda self, text, **more: {"message": {"content": next(answers)}})
    result = task_score(trial)
    assert result.passed and result.figures == {"right": 2, "asked": 40} and "9 times 6" in result.detail


@pytest.mark.slow
def test_a_whole_quick_run() -> None:
    profile = resolve("smollm2-135m", device="cpu")
    if fetch.locate(profile.files[0]) is None:
        pytest.skip("smollm2-135m is not in the model cache; slimserve fetch smollm2-135m brings it")
    result = qualify(replace(profile), quick=True)
    assert result["passed"], [gate for gate in result["gates"] if not gate["passed"]]
    assert {"canary-text", "agreement", "soak", "memory"} <= {gate["name"] for gate in result["gates"]}


def test_made_weights_pass_the_gates_without_words_and_support_nothing(tmp_path: Path) -> None:
    profile = resolve("nano-qwen3_5", device="cpu")
    found = qualify(profile, weights="synthetic", quick=True)
    # Memory is left to real runs: a server that a test process starts was seen to hold 70 MiB more than one of a shell.
    assert not [gate for gate in found["gates"] if not gate["passed"] and gate["name"] != "memory"]
    assert tuple(gate["name"] for gate in found["gates"]) == WORDLESS and found["files"] == []
    whole = {**found, "settings_hash": profile.config_hash}  # as both boots would leave it
    data, page = write_evidence(whole, tmp_path)
    assert data.name == "cpu-synthetic.json"
    text = page.read_text(encoding="utf-8")
    assert "cpu with synthetic weights" in text and "slimserve qualify nano-qwen3_5 --weights synthetic" in text
    loaded = load_evidence("nano-qwen3_5", tmp_path)
    none, why = find_evidence(loaded, "cpu", profile.config_hash, WORDLESS)
    assert none is None and why == "no qualification run on this platform"
    with pytest.raises(UsageError, match="the only value is synthetic"):
        qualify(profile, weights="random")
