"""From a profile's name or a path, and flags, to everything that a run needs; the only place that ties them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimserve.cli.terminal import ask, is_interactive, say
from slimserve.engine.config import Acceptance, DrafterKind, SpeculationConfig
from slimserve.engine.messages import EngineInfo, EngineSpec
from slimserve.errors import UsageError
from slimserve.plan.memory import MemoryPlan
from slimserve.serve.text import TextModel

if TYPE_CHECKING:
    from slimserve.profiles.companion import DraftModel
    from slimserve.profiles.resolve import ResolvedProfile
    from slimserve.serve.model_text import ModelText


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Engine flags of the command line; None = what record and model say."""

    ctx: int | None = None
    max_seqs: int | None = None
    threads: int | None = None
    device: str | None = None
    kv_dtype: str | None = None
    prefix_cache: bool = True
    speculate: bool = True
    drafter: str | None = None
    draft_model: str | None = None
    drafts: int | None = None
    draft_acceptance: str | None = None

    def settings(self) -> dict[str, Any]:
        """By the names of profiles.settings; what no flag sets stays out."""
        return {
            "max_context": self.ctx,
            "max_sequences": self.max_seqs,
            "num_threads": self.threads,
            "kv_dtype": self.kv_dtype,
            "prefix_caching": None if self.prefix_cache else False,
            "drafter": self.drafter if self.speculate else "none",
            "draft_schedule": None if self.drafts is None else [[1, 4096, self.drafts]],
        }

    def with_draft_model(self, resolved: ResolvedProfile) -> tuple[ResolvedProfile, DraftModel | None]:
        """The profile with what the flags say of its drafter, for a plan, and the drafter's own model where it has one.

        UsageError where a flag asks for a drafter without its model, or names a model that no drafter reads. A record's
        drafter without a model can be planned, not run.
        """
        from slimserve.profiles.companion import find_draft_model

        config = resolved.planned_config().speculation
        acceptance = _acceptance(self.draft_acceptance, config.acceptance)
        resolved = replace(resolved, draft_acceptance=acceptance)
        if self.draft_model is None and not (self.speculate and self.drafter):
            return resolved, None
        path = self.speculation(config).model_path
        if path is None:
            return resolved, None
        found = find_draft_model(path, config.drafter, resolved.description)
        return replace(resolved, draft_model=found.description), found

    def speculation(self, resolved: SpeculationConfig) -> SpeculationConfig:
        """The resolved settings with the drafter's own model; UsageError where one is needed or useless."""
        needed = resolved.drafter in (DrafterKind.MODEL, DrafterKind.DFLASH2)
        if needed and self.draft_model is None:
            raise UsageError(
                f"drafter {resolved.drafter.value} has a model of its own; give its path with --draft-model"
            )
        if not needed and self.draft_model is not None and self.speculate:
            raise UsageError("--draft-model is given without --drafter model or --drafter dflash2")
        return replace(
            resolved,
            model_path=self.draft_model if needed else None,
            acceptance=_acceptance(self.draft_acceptance, resolved.acceptance),
        )


def _acceptance(name: str | None, default: Acceptance) -> Acceptance:
    if name is None:
        return default
    known = [rule.value for rule in Acceptance]
    if name not in known:
        raise UsageError(f"--draft-acceptance {name!r} is not known; choose from {', '.join(known)}")
    return Acceptance(name)


@dataclass(slots=True)
class Opened:
    """A model ready to be loaded: its text side, how to build its engine, names, and lines for the start."""

    text: TextModel
    spec: EngineSpec
    names: tuple[str, ...]
    title: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    plan: MemoryPlan | None = None
    serving: bool = False

    def describe(self, info: EngineInfo) -> None:
        """Say what was loaded, on standard error; a server also lays the memory plan beside what was measured."""
        say(self.title)
        for name, value in info.facts.items():
            say(f"  {name}: {value}")
        for note in self.notes:
            say(f"  {note}")
        if self.serving and self.plan is not None:
            from slimserve.plan.compare import compare, comparison_lines

            for line in comparison_lines(compare(self.plan, info.memory)):
                say(f"  {line}")


def open_model(
    profile: str | None, model: str | None, flags: EngineFlags, *, serving: bool, weights: str | None = None
) -> Opened:
    """Resolve, check that it fits, fetch what is missing, read tokenizer and template. Nothing is loaded yet.

    A chat runs one sequence at a time unless a flag says otherwise. `weights` "synthetic" fetches nothing: the engine
    makes the weights on its device.
    """
    from slimserve.engine.build import EngineSettings, encode_config
    from slimserve.profiles.planning import admit
    from slimserve.profiles.resolve import resolve
    from slimserve.profiles.synthetic import SYNTHETIC_NAME, synthetic_of

    device = None if flags.device in (None, "auto") else flags.device
    resolved = resolve(profile, model=model, flags=flags.settings(), device=device)
    alone = {} if serving or flags.max_seqs is not None else {"max_sequences": 1}
    lowered = resolve(profile, model=model, flags={**flags.settings(), **alone}, device=device)
    lowered, draft_model = flags.with_draft_model(lowered)
    synthetic = synthetic_of(resolved, weights)
    config, plan = admit(lowered, made=synthetic is not None)
    config = replace(config, speculation=flags.speculation(config.speculation))
    path, text = _files_or_made(resolved, made=synthetic is not None)
    if draft_model is not None:
        from slimserve.fetch import TerminalProgress

        drafts = str(draft_model.locate(TerminalProgress()))
        config = replace(config, speculation=replace(config.speculation, model_path=drafts))
    names = (resolved.served_name, resolved.name) if resolved.served_name != resolved.name else (resolved.name,)
    if synthetic is not None:
        # The name that clients find first, so that whatever they report says so.
        names = (f"{resolved.served_name}-{SYNTHETIC_NAME}", *names)
    spec = EngineSettings(
        path=path,
        name=resolved.name,
        config=encode_config(config),
        end_token_ids=sorted(text.end_token_ids),
        synthetic=synthetic,
    ).spec()
    status = f"{resolved.status.value}: {resolved.status_reason}" if synthetic is None else "synthetic weights"
    title = f"{resolved.title} [{status}]"
    return Opened(text, spec, names, title, resolved.sampling, tuple(text.describe()), plan, serving)


def _files_or_made(resolved: ResolvedProfile, *, made: bool) -> tuple[str, ModelText]:
    """(path, text side): a model's files, fetched where missing; for made weights no path and a stand-in text side."""
    from slimserve.fetch import TerminalProgress
    from slimserve.serve.model_text import metadata_text, model_text
    from slimserve.weights.source import open_source
    from slimserve.weights.tokenizer.stand_in import stand_in_metadata

    vocab_size = resolved.description.vocab_size
    formats = {"reasoning": resolved.reasoning_parser, "calls": resolved.tool_parser}
    if made:
        return "", metadata_text(stand_in_metadata(vocab_size), vocab_size, **formats)
    path = resolved.model_path(TerminalProgress())
    return str(path), model_text(open_source(Path(path)), vocab_size, **formats)


def pick_profile() -> str:
    """Ask the person for a profile; UsageError where nobody is there to ask."""
    from slimserve.hardware import detect
    from slimserve.profiles.report import Verdict, list_rows

    if not is_interactive():
        raise UsageError("name a profile (slimserve list shows them) or give --model PATH")
    rows = [row for row in list_rows(detect())[0] if row.verdict is Verdict.FITS]
    if not rows:
        raise UsageError("no profile fits this machine; slimserve list says why")
    for number, row in enumerate(rows, start=1):
        here = "" if row.here else f", {row.download_bytes / 2**20:,.0f} MiB to fetch"
        say(f"{number:>3}  {row.name:<24}  {row.title}{here}")
    while True:
        try:
            answer = ask("profile (number or name): ").strip()
        except EOFError as error:
            raise UsageError("no profile was chosen") from error
        if answer.isdigit() and 1 <= int(answer) <= len(rows):
            return rows[int(answer) - 1].name
        if answer in {row.name for row in rows}:
            return answer
        say(f"{answer!r} is not in the list")
