"""What drafting brings: the same replies with and without it, in turns, in one process.

Speed and acceptance are told apart: tokens per second of both, steps per second, tokens of a step, and the share of
drafts that held at each position. Texts must be the same token for token; a run in which they are not says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimserve.engine.build import check_device, check_vocabularies
from slimserve.engine.config import Acceptance, CacheConfig, DrafterKind, EngineConfig, SpeculationConfig
from slimserve.engine.loop import Engine
from slimserve.engine.messages import EngineStats
from slimserve.engine.request import Request, SamplingParams
from slimserve.errors import UsageError
from slimserve.measure.figures import Figure, figure
from slimserve.measure.speculate_tasks import TASKS
from slimserve.serve.model_text import model_text
from slimserve.weights.loader import load_model

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SpeculateShape:
    """What is measured: each task `rounds` times with and without drafting, `streams` requests at once."""

    tasks: tuple[str, ...] = ("edit", "text", "code")
    output_tokens: int = 600
    rounds: int = 3
    streams: int = 1
    temperature: float = 0.0
    seed: int = 42

    def __post_init__(self) -> None:
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise UsageError(f"task {unknown[0]!r} is not known; choose from {', '.join(TASKS)}")
        for name in ("output_tokens", "rounds", "streams"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Run:
    """One task on one engine: replies in the order of the streams, seconds to and after the first token."""

    replies: tuple[tuple[int, ...], ...]
    first_seconds: float
    decode_seconds: float
    steps: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(len(reply) for reply in self.replies)

    @property
    def rate(self) -> float:
        """Tokens per second after the first token of the last stream."""
        return self.num_tokens / self.decode_seconds

    @property
    def total_rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.num_tokens / (self.first_seconds + self.decode_seconds)


def measure_speculation(
    path: str, config: EngineConfig, shape: SpeculateShape, say: Say = lambda text: None
) -> dict[str, Any]:
    """The report as plain data (see `speculate_lines`); config.speculation says who drafts."""
    speculation = config.speculation
    device = check_device(config.device)
    loaded = load_model(path, device=device, numerics=config.numerics)
    companion = None
    if speculation.model_path is not None:
        is_block = speculation.drafter is DrafterKind.DFLASH2
        companion = load_model(speculation.model_path, device=device, numerics=config.numerics, drafter=is_block)
        if not is_block:
            check_vocabularies(loaded.source, companion.source)
    text = model_text(loaded.source, loaded.config.vocab_size)
    if text.chat_problem is not None:
        raise UsageError(f"the tasks are chats, and {text.chat_problem}")
    # Every round computes its prompt: a hit would leave nothing of the prefill in one of the two.
    cache = CacheConfig(config.cache.dtype, config.cache.budget_bytes, prefix_caching=False)
    base = replace(config, cache=cache)
    rows = []
    for task in shape.tasks:
        prompt = text.encode_chat([{"role": "user", "content": TASKS[task]}], None, {})
        plain = Engine(loaded.model, replace(base, speculation=SpeculationConfig()), end_token_ids=text.end_token_ids)
        drafted = Engine(
            loaded.model,
            base,
            end_token_ids=text.end_token_ids,
            companion=companion.model if companion is not None else None,
        )
        runs: tuple[list[Run], list[Run]] = ([], [])
        for number in range(shape.rounds + 1):
            pair = [_run(engine, prompt, shape) for engine in (plain, drafted)]
            if not number:
                say(f"{task}: warm-up, {pair[0].num_tokens} tokens")
                warm = drafted.read_stats()
                continue
            for run, kept in zip(pair, runs, strict=True):
                kept.append(run)
            say(f"{task}, round {number}: {pair[0].rate:.2f} tok/s plain, {pair[1].rate:.2f} with drafts")
        rows.append(_row(task, len(prompt), runs, warm, drafted.read_stats()))
    return {
        "kind": "speculate",
        "model": str(path),
        "drafter": speculation.drafter.value,
        "draft_model": speculation.model_path,
        "max_draft": speculation.max_draft,
        "acceptance_rule": speculation.acceptance.value,
        "measured_control": speculation.measured,
        "streams": shape.streams,
        "temperature": shape.temperature,
        "rounds": shape.rounds,
        "same_text": all(row["same_text"] for row in rows),
        "tasks": rows,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _run(engine: Engine, prompt: Sequence[int], shape: SpeculateShape) -> Run:
    names = [f"stream{i}" for i in range(shape.streams)]
    replies: dict[str, list[int]] = {name: [] for name in names}
    started = time.perf_counter()
    for number, name in enumerate(names):
        sampling = SamplingParams(shape.temperature, top_p=0.95, top_k=20, seed=shape.seed + number)
        engine.submit(Request(name, list(prompt), sampling, shape.output_tokens))
    first, steps = started, 0
    while engine.has_work:
        waiting = any(not reply for reply in replies.values())
        for output in engine.step():
            if output.error is not None:
                raise UsageError(f"the request failed: {output.error}")
            replies[output.request_id].extend(output.token_ids)
        if waiting:
            first = time.perf_counter()
        else:
            steps += 1
    ended = time.perf_counter()
    return Run(tuple(tuple(replies[name]) for name in names), first - started, ended - first, steps)


def _row(
    task: str, prompt_tokens: int, runs: tuple[list[Run], list[Run]], warm: EngineStats, stats: EngineStats
) -> dict[str, Any]:
    plain, drafted = runs
    reached = _difference(stats.drafted_at, warm.drafted_at)
    held = _difference(stats.accepted_at, warm.accepted_at)
    rows, tokens = stats.decode_rows - warm.decode_rows, stats.decode_tokens - warm.decode_tokens
    return {
        "task": task,
        "prompt_tokens": prompt_tokens,
        "output_tokens": plain[0].num_tokens,
        "same_text": all(run.replies == plain[0].replies for run in (*plain, *drafted)),
        "plain_tokens_per_second": _json(figure([run.rate for run in plain])),
        "drafted_tokens_per_second": _json(figure([run.rate for run in drafted])),
        "plain_steps_per_second": _json(figure([run.steps / run.decode_seconds for run in plain])),
        "drafted_steps_per_second": _json(figure([run.steps / run.decode_seconds for run in drafted])),
        "gain": _json(figure([b.rate / a.rate for a, b in zip(plain, drafted, strict=True)])),
        "gain_with_prefill": _json(figure([b.total_rate / a.total_rate for a, b in zip(plain, drafted, strict=True)])),
        "tokens_per_row": tokens / max(1, rows),
        "drafted": reached,
        "accepted": held,
        "control": {"lengths": stats.draft_lengths, "gains": stats.draft_gains, "switches": stats.draft_switches},
    }


def _difference(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [value - (before[i] if i < len(before) else 0) for i, value in enumerate(after)]


def _json(value: Figure | None) -> dict[str, float] | None:
    return None if value is None else value.as_json()


def speculate_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    own = f" ({report['draft_model']})" if report["draft_model"] else ""
    lines = [
        f"{report['model']}: drafter {report['drafter']}{own}, up to {report['max_draft']} tokens, "
        f"{report['streams']} streams, {report['rounds']} rounds in turns, temperature {report['temperature']:g}",
        f"{'task':<6} {'plain tok/s':>20} {'with drafts':>20} {'gain':>18} {'tokens/step':>11} accepted",
    ]
    for row in report["tasks"]:
        shares = [f"{held / max(1, of):.0%}" for held, of in zip(row["accepted"], row["drafted"], strict=True)]
        lines.append(
            f"{row['task']:<6} {_shown(row['plain_tokens_per_second']):>20} "
            f"{_shown(row['drafted_tokens_per_second']):>20} {_shown(row['gain']):>18} {row['tokens_per_row']:>11.2f} "
            f"{' '.join(shares) or '-'}"
        )
        lengths = ", ".join(f"{length} up to {rows} rows" for rows, length in row["control"]["lengths"].items())
        lines.append(
            f"       {row['output_tokens']} tokens after {row['prompt_tokens']}; steps/s "
            f"{_shown(row['plain_steps_per_second'])} and {_shown(row['drafted_steps_per_second'])}; with prefill "
            f"{_shown(row['gain_with_prefill'])}; control: {lengths or 'not asked'}; "
            + _texts(row["same_text"], report)
        )
    return lines


def _texts(same: bool, report: dict[str, Any]) -> str:
    if same:
        return "same text"
    by_ratio = report["acceptance_rule"] == Acceptance.REJECTION.value and report["temperature"] > 0
    return "other text, as rejection sampling gives" if by_ratio else "OTHER TEXT"


def _shown(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['median']:.2f} ({value['lowest']:.2f}-{value['highest']:.2f})"
