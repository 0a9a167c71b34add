"""The control of drafting: up, down, off and on again, by what steps cost and bring on a simulated machine."""

from __future__ import annotations

import random

import pytest

from slimserve.engine.speculate import SpeculationControl


class Machine:
    """Decodes `rows` requests: a step costs `plain` seconds and `per_draft` more for each drafted token of a row; a
    draft at position i holds with probability acceptance[i], given that those before it did."""

    def __init__(
        self, control: SpeculationControl, rows: int, *, per_draft: float, acceptance: list[float], plain: float = 1.0,
        noise: float = 0.03, seed: int = 1,
    ) -> None:  # fmt: skip
        self.control, self.rows, self.plain, self.per_draft = control, rows, plain, per_draft
        self.acceptance, self.noise = acceptance, noise
        self.rng = random.Random(seed)
        self.seconds = self.tokens = 0.0

    def run(self, steps: int) -> list[int]:
        """The draft length of each step."""
        lengths = []
        for _ in range(steps):
            length = self.control.draft_length(self.rows)
            held = []
            for _ in range(self.rows):
                accepted = 0
                while accepted < length and self.rng.random() < self.acceptance[accepted]:
                    accepted += 1
                held.append((length, accepted))
            tokens = sum(1 + accepted for _, accepted in held)
            seconds = self.cost(length) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            self.seconds += seconds
            self.tokens += tokens
            self.control.observe(self.rows, length > 0, tokens, seconds, held if length else ())
            lengths.append(length)
        return lengths

    def rate(self, length: int) -> float:
        """Tokens per second and row with a fixed length."""
        tokens = reached = 1.0
        for share in self.acceptance[:length]:
            reached *= share
            tokens += reached
        return tokens / self.cost(length)

    def cost(self, length: int) -> float:
        """Seconds of a step."""
        return self.plain + self.per_draft * length

    @property
    def best(self) -> int:
        return max(range(len(self.acceptance) + 1), key=self.rate)


class Steep(Machine):
    """A step over more than eight tokens costs much more than one over eight, as on CPUs."""

    def cost(self, length: int) -> float:
        tokens = self.rows * (1 + length)
        return self.plain + self.per_draft * self.rows * length + (2.5 if tokens > 8 else 0.0)


def average(lengths: list[int]) -> float:
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize(
    ("per_draft", "acceptance"),
    [
        (0.05, [0.95] * 12),  # cheap and right: as many as possible
        (0.12, [0.8] * 12),
        (0.30, [0.9, 0.6, 0.3] + [0.1] * 9),  # only the first few pay
        (0.20, [0.5, 0.2] + [0.1] * 10),
        (0.9, [0.6] * 12),  # none pays
    ],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_it_finds_a_draft_length_that_is_nearly_the_best(per_draft: float, acceptance: list[float], rows: int) -> None:
    control = SpeculationControl(12, first_length=3)
    machine = Machine(control, rows, per_draft=per_draft, acceptance=acceptance)
    machine.run(1500)
    machine.seconds = machine.tokens = 0.0
    machine.run(3000)
    reached = machine.tokens / machine.seconds / rows
    assert reached > 0.92 * machine.rate(machine.best), f"{control.lengths()} where {machine.best} is best"


@pytest.mark.parametrize(("rows", "share"), [(1, 0.97), (2, 0.97), (4, 0.85)])
def test_it_stays_below_a_jump_of_the_costs(rows: int, share: float) -> None:
    control = SpeculationControl(15, first_length=7)
    machine = Steep(control, rows, per_draft=0.13, acceptance=[share] * 15)
    machine.run(1000)
    machine.seconds = machine.tokens = 0.0
    machine.run(3000)
    reached = machine.tokens / machine.seconds / rows
    assert reached > 0.9 * machine.rate(machine.best), f"{control.lengths()} where {machine.best} is best"


def test_where_drafting_loses_it_is_off_and_costs_little() -> None:
    control = SpeculationControl(8, first_length=3)
    machine = Machine(control, 4, per_draft=0.5, acceptance=[0.3] * 8)
    lengths = machine.run(4000)
    assert sum(length > 0 for length in lengths[200:]) < 0.02 * len(lengths)
    assert machine.tokens / machine.seconds / 4 > 0.97 and set(control.lengths().values()) == {0}


def test_a_machine_that_slows_down_is_not_taken_for_drafts_that_do_not_pay() -> None:
    """Other work comes and goes: plain and drafting steps are slower alike, but few of the plain ones are seen."""
    control = SpeculationControl(8, first_length=3)
    machine = Machine(control, 1, per_draft=0.4, acceptance=[0.97] * 8)
    machine.run(300)
    lengths = []
    for speed in (2.5, 1.0, 4.0, 1.5):
        machine.plain, machine.per_draft = speed, 0.4 * speed
        lengths += machine.run(200)
    assert control.num_switches == 0 and sum(length > 0 for length in lengths) > 0.95 * len(lengths)


def test_dear_probes_are_rare() -> None:
    """A probe that costs 40 plain steps may not come every 64."""
    control = SpeculationControl(8, first_length=3)
    machine = Machine(control, 1, per_draft=13.0, acceptance=[0.2] * 8)
    machine.run(300)
    machine.seconds = machine.tokens = 0.0
    machine.run(12_000)
    assert machine.tokens / machine.seconds > 0.97


def test_it_follows_a_change_of_text() -> None:
    control = SpeculationControl(8, first_length=3)
    machine = Machine(control, 1, per_draft=0.15, acceptance=[0.95] * 8)
    assert average(machine.run(1000)[400:]) > 5
    machine.acceptance = [0.75, 0.2] + [0.05] * 6
    assert average(machine.run(2500)[1200:]) < 3
    machine.acceptance = [0.1] * 8
    assert average(machine.run(1500)[800:]) < 0.5
    machine.acceptance = [0.95] * 8
    assert average(machine.run(4000)[3000:]) > 4


def test_it_does_not_swing() -> None:
    """Equal gains of two lengths, and a gain of about one: decisions are few."""
    control = SpeculationControl(8, first_length=3)
    Machine(control, 2, per_draft=0.36, acceptance=[0.6, 0.6, 0.6, 0.6, 0.5, 0.4, 0.3, 0.2], noise=0.1).run(6000)
    assert control.num_switches + control.num_length_changes < 40
    control = SpeculationControl(1)
    Machine(control, 2, per_draft=0.5, acceptance=[0.5], noise=0.1).run(6000)
    assert control.num_switches < 30


def test_batch_sizes_have_lengths_of_their_own() -> None:
    control = SpeculationControl(8, first_length=3)
    alone = Machine(control, 1, per_draft=0.05, acceptance=[0.9] * 8)
    crowd = Machine(control, 32, per_draft=0.8, acceptance=[0.6] * 8)
    for _ in range(40):
        alone.run(50)
        crowd.run(50)
    assert control.lengths()[1] >= 6 and control.lengths()[32] == 0
    assert control.gains()[1] > 1.5


def test_the_schedule_bounds_what_is_measured() -> None:
    control = SpeculationControl(8, ((1, 4, 2), (5, 64, 0)))
    assert set(Machine(control, 2, per_draft=0.01, acceptance=[0.95] * 8).run(500)) == {0, 2}
    assert set(Machine(control, 16, per_draft=0.01, acceptance=[0.95] * 8).run(500)) == {0}


def test_preparation_is_shared_by_the_drafts_that_follow() -> None:
    """Reading a long prompt is charged to the drafts behind it, not taken for a slow step."""
    control = SpeculationControl(4)
    for _ in range(8):
        control.draft_length(1)
        control.observe(1, False, 1, 1.0)
    for step in range(64):
        control.draft_length(1)
        control.observe(1, True, 3, 1.5, [(4, 2)], 20.0 if step == 0 else 0.0)
    assert control.lengths()[1] > 0 and 1.6 < control.gains()[1] < 2.1
    for _ in range(200):
        if control.draft_length(1):
            control.observe(1, True, 3, 1.5, [(4, 2)], 4.0)
        else:
            control.observe(1, False, 1, 1.0)
    assert control.lengths()[1] == 0, "preparation at every step does not pay"


def test_reading_that_never_leads_to_drafts_is_given_up() -> None:
    """Long prompts with short replies: a drafting model that has not read them to their end brings nothing."""
    control = SpeculationControl(4, first_length=3)
    spent, steps = 0.0, 60_000
    for _ in range(steps):
        wanted = control.draft_length(1) > 0
        spent += 1.0 + 9.0 * wanted
        control.observe(1, False, 1, 1.0, (), 9.0 if wanted else 0.0)
    assert spent < 1.03 * steps and control.lengths() == {1: 0}
    for _ in range(40_000):
        drafts = control.draft_length(1)
        control.observe(1, drafts > 0, 1 + drafts, 1.0 + 0.2 * drafts, [(drafts, drafts)] if drafts else ())
    assert control.lengths()[1] > 0, "other requests bring it back"


def test_the_length_does_not_fall_where_all_drafts_hold() -> None:
    """A shorter draft may not look better than it can be, because few drafts were seen yet."""
    control = SpeculationControl(8, first_length=3)
    lengths = Machine(control, 1, per_draft=0.43, acceptance=[0.99] * 8, plain=1.0, noise=0.02).run(400)
    assert min(length for length in lengths[5:] if length) >= 3
    assert control.lengths()[1] >= 5
