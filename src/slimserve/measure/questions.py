"""Forty short questions with answers that a program can check, asked without thinking."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slimserve.measure.gates import GateResult, Trial, digest

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What is 7 + 5? Answer with the number only.", r"\b12\b"),
    ("What is 9 times 6? Answer with the number only.", r"\b54\b"),
    ("What is 100 minus 37? Answer with the number only.", r"\b63\b"),
    ("What is 48 divided by 6? Answer with the number only.", r"\b8\b"),
    ("What is 2 to the power of 10? Answer with the number only.", r"\b1,?024\b"),
    ("What is the square root of 81? Answer with the number only.", r"\b9\b"),
    ("Write the number 255 in hexadecimal.", r"(?i)\b(0x)?ff\b"),
    ("Write the number 5 in binary.", r"\b(0b)?101\b"),
    ("How many minutes are in two hours? Answer with the number only.", r"\b120\b"),
    ("How many days are in a leap year? Answer with the number only.", r"\b366\b"),
    ("What is the capital of France?", r"\bParis\b"),
    ("What is the capital of Japan?", r"\bTokyo\b"),
    ("What is the capital of Italy?", r"\bRome\b"),
    ("On which continent is Egypt?", r"\bAfrica\b"),
    ("Which planet is known as the red planet?", r"\bMars\b"),
    ("What is the chemical symbol of gold?", r"\bAu\b"),
    ("What is the chemical formula of water?", r"H2O|H₂O"),
    ("Who wrote Romeo and Juliet?", r"Shakespeare"),
    ("What colour do you get when you mix blue and yellow?", r"(?i)\bgreen\b"),
    ("What is the opposite of hot?", r"(?i)\bcold\b"),
    ("Translate 'thank you' into French.", r"(?i)merci"),
    ("Translate 'good morning' into Spanish.", r"(?i)buenos d[ií]as"),
    ("What is the plural of 'mouse' (the animal)?", r"(?i)\bmice\b"),
    ("What is the past tense of 'go'?", r"(?i)\bwent\b"),
    ("Which letter comes after Q in the English alphabet?", r"\bR\b"),
    ("Reverse the word 'stop'.", r"(?i)\bpots\b"),
    ("Which is larger, 0.9 or 0.11? Answer with the number only.", r"\b0\.9\b"),
    ("In Python, which keyword defines a function?", r"\bdef\b"),
    ("In Python, what does len([1, 2, 3]) return? Answer with the number only.", r"\b3\b"),
    ("In Python, which built-in function gives the length of a list?", r"\blen\b"),
    ("In Python, which keyword leaves a loop early?", r"\bbreak\b"),
    ("In Python, which exception does int('x') raise?", r"ValueError"),
    ("In Python, what is the value of 7 // 2? Answer with the number only.", r"\b3\b"),
    ("In Python, which method appends an element to a list?", r"\bappend\b"),
    ("Which HTTP status code means 'not found'?", r"\b404\b"),
    ("In SQL, which keyword removes duplicate rows from a SELECT?", r"(?i)\bdistinct\b"),
    ("In git, which command creates a copy of a remote repository?", r"(?i)\bclone\b"),
    ("What does CPU stand for?", r"(?i)central processing unit"),
    ("What does HTML stand for?", r"(?i)hyper ?text markup language"),
    ("Which data structure works first in, first out?", r"(?i)\bqueue\b"),
)


LONGEST_ANSWER = 48
"""Tokens of an answer that are looked at."""


def task_score(trial: Trial) -> GateResult:
    """How many of the forty are right, greedily answered; at least as many as the record asks must be."""
    asked = QUESTIONS[:6] if trial.quick else QUESTIONS
    answers = [
        str(trial.chat(question, max_tokens=LONGEST_ANSWER)["message"].get("content") or "") for question, _ in asked
    ]
    wrong = wrong_answers(answers)
    right, least = len(asked) - len(wrong), trial.record.task_score * len(asked) / len(QUESTIONS)
    return GateResult(
        "task-score", right >= least, f"{right} of {len(asked)} questions answered rightly (asked: {least:.0f}); "
        f"wrong: {' | '.join(wrong)}", {"right": right, "asked": len(asked)}, {"answers": digest(answers)},
    )  # fmt: skip


def wrong_answers(answers: Sequence[str]) -> list[str]:
    """The questions, from the first on, whose answers do not hold what is expected."""
    judged = zip(QUESTIONS, answers, strict=False)
    return [question for (question, expected), text in judged if re.search(expected, text) is None]
