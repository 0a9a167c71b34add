"""The needle ladder: what was said once in a long prompt is known at its end, and not known where it was not said."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from slimserve.measure.gates import GateResult, Trial, digest
from slimserve.measure.prompts import fixed_text
from slimserve.profiles.record import NeedleStyle, QualifyRecord

_LONG = 2048
"""Tokens beyond which half as many needles are tried."""
CHANCE = 0.05
"""Least probability, if needles were found as often as the record says, of finding as few as were found."""
_FILLER_SENTENCES = 4000
_FILLER_CHARACTERS = 120_000

_PLACES = ("harbour", "garden", "castle", "river", "market", "northern", "lower", "bridge", "mill", "abbey")
_COLOURS = ("violet", "green", "yellow", "white", "black", "silver", "blue", "red", "brown", "golden")
_COUNTS = ("seven", "nine", "three", "eleven", "four", "twelve", "six", "two", "eight", "five")
_NAMES = ("Mira", "Kate", "Leo", "Daisy", "Julia", "Tom", "Anna", "Ben")


@dataclass(frozen=True, slots=True)
class Needle:
    """One trial: token ids of the prompt, of the same prompt with filler in the needle's place, and of the answer."""

    prompt: tuple[int, ...]
    control: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float


@cache
def documentation() -> str:
    """The help topics that come with Python: text of a kind that the models asked for codes were trained on.

    In the template sentences of the fixed text such a model loses the code as the text grows, whoever computes it.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))[:_FILLER_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Speech:
    """How texts become tokens: plain ones (`mark`: with the beginning mark), and a chat of one message."""

    plain: Callable[[str], list[int]]
    marked: Callable[[str], list[int]]
    chat: Callable[[str], list[int]]

    def frame(self, style: NeedleStyle) -> tuple[list[int], list[int]]:
        """What stands before and behind the words of a prompt."""
        if style is NeedleStyle.CONTINUE:
            first, second = self.marked("Yes."), self.marked("Now.")
            return first[: _common(first, second)], []
        first, second = self.chat("Yes."), self.chat("Now.")
        behind = _common(first[::-1], second[::-1])
        return first[: _common(first, second)], first[len(first) - behind :]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two lists begin with together."""
    shorter = min(len(first), len(second))
    return next((n for n in range(shorter) if first[n] != second[n]), shorter)


def needles_of(speech: Speech, style: NeedleStyle, length: int, count: int) -> list[Needle]:
    """`count` trials of exactly `length` tokens, the same on every machine; depths are spread evenly."""
    head, tail = speech.frame(style)
    filler = speech.plain(documentation() if style is NeedleStyle.CODE else fixed_text(_FILLER_SENTENCES))
    made = []
    for number in range(count):
        choose = random.Random(1000 * length + number)
        if style is NeedleStyle.CODE:
            name, secret = choose.choice(_NAMES), str(choose.randrange(10_000, 100_000))
            said, asked = f" The secret code of {name} is {secret}.", f"\n\nWhat is the secret code of {name}?"
        else:
            said = f" The password of the {choose.choice(_PLACES)} gate is"
            secret = f" {choose.choice(_COLOURS)} {choose.choice(_COUNTS)}"
            said, asked = f"{said}{secret}.", said
        planted, question = speech.plain(said), speech.plain(asked)
        room = length - len(head) - len(planted) - len(question) - len(tail)
        start = choose.randrange(len(filler) - length)
        text = filler[start : start + room]
        depth = number / max(1, count - 1)
        cut = int(depth * room)
        other = filler[start + room : start + room + len(planted)]
        made.append(
            Needle(
                (*head, *text[:cut], *planted, *text[cut:], *question, *tail),
                (*head, *text[:cut], *other, *text[cut:], *question, *tail),
                tuple(speech.plain(secret)),
                depth,
            )
        )
    return made


def trials_at(record: QualifyRecord, length: int) -> int:
    """Needles tried at a length."""
    return record.trials if length <= _LONG else max(1, record.trials // 2)


def likely_least(share: float, trials: int) -> int:
    """The fewest of `trials`, but at least one, that are found with a probability of CHANCE or more if each is found
    with `share`."""
    below = 0.0
    for found in range(trials + 1):
        below += math.comb(trials, found) * share**found * (1 - share) ** (trials - found)
        if below >= CHANCE:
            return max(1, found)
    return trials


def needles(trial: Trial) -> GateResult:
    """At every length no fewer needles are found than the record's share lets expect, none where none was planted,
    and the same tokens with the same probabilities cold and from the cache."""
    record = trial.record
    speech = Speech(trial.ids, lambda text: trial.ids(text, mark=True), trial.chat_ids)
    found: dict[str, int] = {}
    asked: dict[str, int] = {}
    least: dict[str, int] = {}
    cached: dict[str, float] = {}
    ran = [_ladder_step(trial, speech, length) for length in (record.needles[:1] if trial.quick else record.needles)]
    for step, share in zip(ran, record.recall, strict=False):
        name = str(step.length)
        found[name], asked[name] = step.found, step.asked
        least[name], cached[name] = likely_least(share, step.asked), step.cached
    without, different = sum(step.without for step in ran), sum(step.different for step in ran)
    enough = all(found[name] >= least[name] for name in found)
    shown = ", ".join(f"{name} tokens {found[name]} of {asked[name]} (asked: {least[name]})" for name in found)
    missed = [f"{step.length} at {depth:.0%}" for step in ran for depth in step.missed]
    return GateResult(
        "needles", enough and without == 0 and different == 0 and min(cached.values()) >= 0.5,
        f"found: {shown}; {without} where nothing was planted; {different} differ between cold and cached"
        + (f"; missed: {', '.join(missed)}" if missed else ""),
        {"found": found, "asked": asked, "least": least, "without_needle": without, "cached_share": cached},
        {"replies": digest([step.replies for step in ran])},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LadderStep:
    """All needles of one length. `cached`: median share of the prompt that the second asking took from the cache."""

    length: int
    asked: int
    found: int
    without: int
    different: int
    cached: float
    missed: tuple[float, ...]
    replies: str


def _ladder_step(trial: Trial, speech: Speech, length: int) -> _LadderStep:
    hits, without, different = 0, 0, 0
    reused, missed, replies = [], [], []
    made = needles_of(speech, trial.record.needle_style, length, trials_at(trial.record, length))
    for number, needle in enumerate(made):
        salt, wanted = f"needle {length} {number}", list(needle.answer)
        cold = trial.generate(list(needle.prompt), len(wanted), cache_salt=salt)
        warm = trial.generate(list(needle.prompt), len(wanted), cache_salt=salt)
        control = trial.generate(list(needle.control), len(wanted), cache_salt=salt)
        hits += cold[0] == wanted
        without += control[0] == wanted
        different += cold[:2] != warm[:2] or cold[2] != 0
        reused.append(warm[2] / length)
        replies.append(cold[:2])
        if cold[0] != wanted:
            missed.append(needle.depth)
    return _LadderStep(
        length, len(made), hits, without, different, statistics.median(reused), tuple(missed), digest(replies)
    )
