"""A profile record: what one TOML file of the catalog says, read strictly."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from slimserve.errors import FormatError, SlimServeError, UsageError
from slimserve.fetch import BundledPlace, FileSource, HubPlace, IndexPart, IndexPlace, Notice, Place, UrlPlace
from slimserve.hardware import DeviceKind, parse_bytes
from slimserve.models.format_map import FormatRule
from slimserve.plan.description import CacheTerm, RecordedWeights
from slimserve.profiles.reading import Table, nearest
from slimserve.profiles.settings import SETTINGS, SettingValue, check
from slimserve.weights.small_file import read_small_file

_MOST_BYTES = 4 << 20

CACHE_KINDS = ("attention", "window", "latent", "indexer", "recurrent")
SAMPLING_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0.0, 1e6),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


class Stage(Enum):
    """What a record is before any evidence; `supported` is not among them because it is computed."""

    REFERENCE = "reference"
    IN_PROGRESS = "in-progress"


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """A setting's value and, where the record says so, why."""

    value: SettingValue
    why: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """Recorded rates: one value per concurrency (or one alone), with the peer's where it was measured."""

    what: str
    values: tuple[float, ...]
    unit: str = "tok/s"
    concurrency: tuple[int, ...] = ()
    control: tuple[float, ...] = ()
    note: str = ""

    def line(self) -> str:
        """One line: "decode: c1 228.5, c8 776 tok/s (note)"."""
        if self.concurrency:
            shown = ", ".join(f"c{c} {v:g}" for c, v in zip(self.concurrency, self.values, strict=True))
        else:
            shown = " / ".join(f"{value:g}" for value in self.values)
        control = f"; peer {' / '.join(f'{v:g}' for v in self.control)}" if self.control else ""
        return f"{self.what}: {shown} {self.unit}{control}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a platform record was tuned for: kind and number of devices, memory of each, part of their names."""

    kind: DeviceKind
    count: int = 1
    memory_bytes: int = 0
    names: tuple[str, ...] = ()

    def describe(self) -> str:
        """In words: "4 x RTX PRO 6000 96 GiB"."""
        if self.kind is DeviceKind.CPU:
            return "CPU"
        name = " or ".join(self.names) or self.kind.value
        size = f" {self.memory_bytes / 2**30:.0f} GiB" if self.memory_bytes else ""
        return f"{self.count} x {name}{size}"


@dataclass(frozen=True, slots=True)
class PlatformRecord:
    """One tuned record: a machine, its settings, its figures and what keeps it from running here."""

    name: str
    machine: Machine
    stage: Stage
    settings: Mapping[str, RecordedSetting]
    figures: tuple[Figure, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The model and its files, and its geometry before any of them is here.

    `config` is a config.json of an architecture of this build; `present` names tensors that decide optional parts;
    `formats` map parameters to storage formats. Where an architecture is not in this build, `weights` and `caches`
    hold recorded sizes instead. `active_bytes` holds recorded bytes per token by name.
    """

    title: str
    licence: str
    size: str
    max_context: int
    chat: bool
    files: tuple[FileSource, ...] = ()
    architecture: str = ""
    quantization: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    formats: tuple[FormatRule, ...] = ()
    weights: tuple[RecordedWeights, ...] = ()
    caches: tuple[CacheTerm, ...] = ()
    active_bytes: Mapping[str, int] = field(default_factory=dict)


class NeedleStyle(Enum):
    """How a needle is planted and asked for: as a sentence to continue, or as a code asked for in a chat."""

    CONTINUE = "continue"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class QualifyRecord:
    """What a qualification run asks of the model, besides the gates that every profile passes.

    canary, expect: a plain question (or a text to continue where the model does not chat) and a regular expression
    of its answer. agreement: least share of steps with the oracle's argmax; margin: most nats by which the oracle
    prefers its token where the two differ. likelihood: most nats per token between the fixed text's likelihood and
    the reference's. needles: prompt lengths, trials: needles planted at each, recall: the share of them that is known
    to be found (by the model's card, or by another engine on the same file); no fewer may be found than that share
    lets expect. task_score: least number
    of right answers to the forty questions, 0 where they are not asked. prompt_tokens, output_tokens, concurrency: of
    the exact bench.
    """

    canary: str = "What is the capital of France?"
    expect: str = "Paris"
    thinks: bool = False
    calls_tools: bool = False
    agreement: float = 0.97
    margin: float = 0.4
    likelihood: float = 0.03
    needle_style: NeedleStyle = NeedleStyle.CONTINUE
    needles: tuple[int, ...] = (256, 1024)
    recall: tuple[float, ...] = (0.9, 0.9)
    trials: int = 8
    task_score: int = 0
    prompt_tokens: int = 128
    output_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4, 8)
    soak_seconds: int = 30

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the gates that evidence must hold before it supports anything.

        The agreement with an oracle is asked besides, wherever one is recorded.
        """
        thinking = ("canary-thinking",) if self.thinks else ()
        tool = ("canary-tool",) if self.calls_tools else ()
        task = ("task-score",) if self.task_score else ()
        return (
            "canary-text", *thinking, *tool, "likelihood", "needles", "row-independence", "prefix-cache",
            "concurrency", "bench-exact", *task, "soak", "memory",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """One profile. `settings` hold for every platform unless the platform's own say otherwise."""

    name: str
    summary: str
    model: ModelRecord
    settings: Mapping[str, RecordedSetting]
    platforms: tuple[PlatformRecord, ...]
    sampling: Mapping[str, float]
    served_name: str
    reasoning_parser: str
    tool_parser: str
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    qualify: QualifyRecord
    path: Path

    def platform(self, name: str) -> PlatformRecord:
        """The platform called `name`; UsageError with the valid names."""
        for entry in self.platforms:
            if entry.name == name:
                return entry
        names = [entry.name for entry in self.platforms]
        raise UsageError(f"profile {self.name} has no platform {name!r}{nearest(name, names)}")


def read_record(path: Path) -> ProfileRecord:
    """Read and check one record; every error is one sentence that names file and key."""
    try:
        values = tomllib.loads(read_small_file(path, _MOST_BYTES).decode("utf-8"))
    except FormatError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    return parse_record(values, path)


def parse_record(values: Mapping[str, Any], path: Path) -> ProfileRecord:
    """The record in a parsed TOML document."""
    top = Table(values, path.name)
    name = top.text("name")
    if name != path.stem:
        raise top.error("name", f"is {name!r}, but the file is called {path.name}; they must agree")
    serving = top.table("serving")
    record = ProfileRecord(
        name=name,
        summary=top.text("summary"),
        model=_model(top.table("model")),
        settings=_settings(top.table("engine")),
        platforms=tuple(_platform(table) for table in top.tables("platform")),
        sampling=_sampling(top.table("sampling")),
        served_name=serving.text("served_name", name),
        reasoning_parser=serving.text("reasoning_parser", ""),
        tool_parser=serving.text("tool_parser", ""),
        missing=top.texts("missing"),
        notes=top.texts("notes"),
        qualify=_qualify(top.table("qualify")),
        path=path,
    )
    serving.finish()
    top.finish()
    names = [platform.name for platform in record.platforms]
    if not names:
        raise UsageError(f"{path.name}: it has no [[platform]]; a profile is a model on a machine")
    if len(set(names)) != len(names):
        raise UsageError(f"{path.name}: two platforms share a name ({', '.join(sorted(names))})")
    return record


def _model(table: Table) -> ModelRecord:
    model = ModelRecord(
        title=table.text("title"),
        licence=table.text("licence"),
        size=table.text("size"),
        max_context=table.integer("max_context", minimum=64, maximum=1 << 31),
        chat=table.boolean("chat"),
        architecture=table.text("architecture", ""),
        quantization=table.text("quantization", ""),
        config=table.mapping("config"),
        present=table.texts("present"),
        formats=tuple(_rule(row) for row in table.tables("formats")),
        weights=tuple(_weights(row) for row in table.tables("weights")),
        caches=tuple(_cache(row) for row in table.tables("caches")),
        active_bytes={key: _active(table, key, value) for key, value in table.mapping("active_bytes").items()},
        files=_files(table),
    )
    table.finish()
    if not model.config and not model.weights:
        raise table.error("config", "and weights are both missing; the plan needs one of them")
    if model.config and bool(model.formats) == bool(model.weights):
        raise table.error("formats", "or weights must say how many bytes the weights take, and only one of them")
    return model


def _active(table: Table, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise table.error(f"active_bytes.{key}", f"is {value!r}, expected bytes")
    return value


def _rule(table: Table) -> FormatRule:
    rule = FormatRule(
        match=table.text("match"), format=table.text("format"), layers=table.text("layers", ""),
        scales=table.choice("scales", ("", "tensor", "channel", "block128", "group16", "group128"), ""),
    )  # fmt: skip
    table.finish()
    return rule


def _weights(table: Table) -> RecordedWeights:
    weights = RecordedWeights(
        table.text("family"), table.text("format"), table.integer("bytes", minimum=1),
        table.choice("source", ("recorded", "derived", "bound")), table.boolean("host", False),
    )  # fmt: skip
    table.finish()
    return weights


def _cache(table: Table) -> CacheTerm:
    term = CacheTerm(
        name=table.text("name"),
        kind=table.choice("kind", CACHE_KINDS),
        bytes_per_token=table.integer("bytes_per_token", 0),
        bytes_per_sequence=table.integer("bytes_per_sequence", 0),
        window=table.optional_integer("window", minimum=1),
        scales_with_dtype=table.boolean("scales_with_dtype", True),
    )
    table.finish()
    if bool(term.bytes_per_token) == bool(term.bytes_per_sequence):
        raise table.error("bytes_per_token", "or bytes_per_sequence must be set, and only one of them")
    return term


def _files(table: Table) -> tuple[FileSource, ...]:
    folder = table.text("folder", "")
    files = []
    for row in table.tables("files"):
        name = row.text("name")
        try:
            source = FileSource(
                name=name,
                num_bytes=row.integer("bytes", minimum=1),
                sha256=row.text("sha256"),
                places=tuple(_place(place) for place in row.tables("places")),
                folder=folder,
                notices=tuple(_notice(notice) for notice in row.tables("notices")),
            )
        except SlimServeError as error:
            raise UsageError(f"{row.where}: {error}" if row.where not in str(error) else str(error)) from error
        row.finish()
        files.append(source)
    if len(files) > 1 and not folder:
        raise table.error("folder", "is missing; a model of several files lies in a folder of its own")
    return tuple(files)


def _place(table: Table) -> Place:
    kind = table.choice("kind", ("hub", "index", "url", "bundled"))
    place: Place
    if kind == "hub":
        place = HubPlace(table.text("repository"), table.text("path"), table.text("revision", "main"))
    elif kind == "index":
        place = IndexPlace.numbered(
            table.text("package"), table.text("version"), table.text("member"),
            table.integer("parts", 1, minimum=1, maximum=4096),
        )  # fmt: skip
    elif kind == "url":
        place = UrlPlace(table.text("url"))
        if not place.url.startswith(("http://", "https://")):
            raise table.error("url", f"is {place.url!r}, expected http:// or https://")
    else:
        place = BundledPlace(table.text("path"))
    table.finish()
    return place


def _notice(table: Table) -> Notice:
    name, text, package = table.text("name"), table.text("text", ""), table.text("package", "")
    part = IndexPart(package, table.text("version"), table.text("member")) if package else None
    table.finish()
    if bool(text) == bool(part):
        raise table.error("text", "or package must be set, and only one of them")
    return Notice(name, text, part)


def _settings(table: Table) -> dict[str, RecordedSetting]:
    """Settings, each a value or {value, why}."""
    settings = {}
    for key in table.names():
        if key not in SETTINGS:
            raise UsageError(f"{table.where}: unknown key {key!r}{nearest(key, SETTINGS)}")
        value, why = table.raw(key), ""
        if isinstance(value, dict):
            inner = table.table(key)
            value, why = inner.raw("value"), inner.text("why")
            inner.finish()
        settings[key] = RecordedSetting(check(key, value, table.where), why)
    return settings


def _platform(table: Table) -> PlatformRecord:
    machine = table.table("machine")
    memory = machine.text("memory", "")
    record = PlatformRecord(
        name=table.text("name"),
        machine=Machine(
            kind=DeviceKind(machine.choice("kind", [kind.value for kind in DeviceKind])),
            count=machine.integer("count", 1, minimum=1, maximum=64),
            memory_bytes=parse_bytes(memory) if memory else 0,
            names=machine.texts("names"),
        ),
        stage=Stage(table.choice("stage", [stage.value for stage in Stage])),
        settings=_settings(table.table("engine")),
        figures=tuple(_figure(row) for row in table.tables("figures")),
        missing=table.texts("missing"),
        notes=table.texts("notes"),
    )
    machine.finish()
    table.finish()
    return record


def _figure(table: Table) -> Figure:
    figure = Figure(
        what=table.text("what"),
        values=table.numbers("values"),
        unit=table.text("unit", "tok/s"),
        concurrency=tuple(int(number) for number in table.numbers("concurrency")),
        control=table.numbers("control"),
        note=table.text("note", ""),
    )
    table.finish()
    if not figure.values:
        raise table.error("values", "is empty")
    if figure.concurrency and len(figure.concurrency) != len(figure.values):
        raise table.error("values", f"has {len(figure.values)} entries for {len(figure.concurrency)} concurrencies")
    return figure


def _qualify(table: Table) -> QualifyRecord:
    plain = QualifyRecord()
    agreement = table.number("agreement", minimum=0.0, maximum=1.0)
    margin = table.number("margin", minimum=0.0, maximum=10.0)
    likelihood = table.number("likelihood", minimum=0.0, maximum=10.0)
    needles = tuple(int(length) for length in table.numbers("needles")) or plain.needles
    record = QualifyRecord(
        canary=table.text("canary", plain.canary),
        expect=table.text("expect", plain.expect),
        thinks=table.boolean("thinks", plain.thinks),
        calls_tools=table.boolean("calls_tools", plain.calls_tools),
        agreement=plain.agreement if agreement is None else agreement,
        margin=plain.margin if margin is None else margin,
        likelihood=plain.likelihood if likelihood is None else likelihood,
        needle_style=NeedleStyle(
            table.choice("needle_style", [style.value for style in NeedleStyle], plain.needle_style.value)
        ),
        needles=needles,
        recall=table.numbers("recall") or (plain.recall[0],) * len(needles),
        trials=table.integer("trials", plain.trials, minimum=1, maximum=1000),
        task_score=table.integer("task_score", plain.task_score, minimum=0, maximum=40),
        prompt_tokens=table.integer("prompt_tokens", plain.prompt_tokens, minimum=1),
        output_tokens=table.integer("output_tokens", plain.output_tokens, minimum=1),
        concurrency=tuple(int(count) for count in table.numbers("concurrency")) or plain.concurrency,
        soak_seconds=table.integer("soak_seconds", plain.soak_seconds, minimum=1, maximum=86400),
    )
    table.finish()
    try:
        re.compile(record.expect)
    except re.error as error:
        raise table.error("expect", f"is no regular expression ({error})") from error
    if min(record.needles) < 64 or min(record.concurrency) < 1:
        raise table.error("needles", "must be at least 64 tokens and concurrency at least 1")
    if len(record.recall) != len(record.needles) or not all(0.0 < share <= 1.0 for share in record.recall):
        raise table.error("recall", f"must hold a share above 0 and up to 1 for each of {len(record.needles)} needles")
    return record


def _sampling(table: Table) -> dict[str, float]:
    """The maker's sampling defaults."""
    values = {}
    for key, (low, high) in SAMPLING_BOUNDS.items():
        value = table.number(key, minimum=low, maximum=high)
        if value is not None:
            values[key] = value
    table.finish()
    return values
