"""`slimserve bench exact | sustained | floor | kernels | step | speculate`: figures that can be reproduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimserve.cli.terminal import say, speak
from slimserve.errors import UsageError

if TYPE_CHECKING:
    from slimserve.engine.build import EngineSettings
    from slimserve.engine.config import EngineConfig
    from slimserve.profiles.resolve import ResolvedProfile
    from slimserve.weights.synthetic import SyntheticModel

group = typer.Typer(
    help="Measure: exact token counts against any OpenAI server, sustained load, the physical floor.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", help="Server address, like http://127.0.0.1:8000/v1.")]
ModelName = Annotated[str, typer.Option("--model-name", help="The model's name there; default its first.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Key to send.")]
Shape = Annotated[str, typer.Option("--shape", help="PROMPT/OUTPUT tokens.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the whole report as JSON to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers of a list like 1,8,16; UsageError otherwise."""
    try:
        values = tuple(int(piece) for piece in text.split(","))
    except ValueError as error:
        raise UsageError(f"--{name} {text!r} is not a list of numbers like 1,8,16") from error
    if not values or min(values) < 1:
        raise UsageError(f"--{name} {text!r} must hold numbers of at least 1")
    return values


def shape_of(text: str) -> tuple[int, int]:
    """(prompt, output) tokens of "1000/300"."""
    pieces = text.split("/")
    if len(pieces) != 2 or not all(piece.isdigit() and int(piece) > 0 for piece in pieces):
        raise UsageError(f"--shape {text!r} is not PROMPT/OUTPUT, like 1000/300")
    return int(pieces[0]), int(pieces[1])


def finish(report: dict[str, Any], lines: list[str], as_json: bool, out: Path | None) -> None:
    """Print a report, and write it where asked."""
    if out is not None:
        try:
            out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{out} cannot be written ({error.strerror})") from error
    speak((json.dumps(report, indent=2) if as_json else "\n".join(lines)) + "\n")


@group.command("exact")
def exact(
    url: Url,
    model_name: ModelName = "",
    api_key: ApiKey = "",
    shape: Shape = "1000/300",
    concurrency: Annotated[str, typer.Option("--concurrency", help="Streams at once, like 1,8,16.")] = "1,8",
    passes: Annotated[int, typer.Option("--passes", min=1, help="Timed passes after the warm-up.")] = 3,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests per stream and pass.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 42,
    first_offset: Annotated[
        int, typer.Option("--first-offset", min=0, help="First prompt; a repeated one hits a prefix cache.")
    ] = 0,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Exact token counts: N distinct prompts, a list of concurrencies, medians with spread, hashes per request."""
    from slimserve.measure.client import Endpoint
    from slimserve.measure.exact import ExactShape, exact_lines, run_exact

    prompt_tokens, output_tokens = shape_of(shape)
    wanted = ExactShape(
        prompt_tokens, output_tokens, numbers(concurrency, "concurrency"), passes, requests,
        temperature=temperature, seed=seed, first_offset=first_offset,
    )  # fmt: skip
    report = run_exact(Endpoint(url, model_name, api_key), wanted, say)
    finish(report, exact_lines(report), as_json, out)


@group.command("sustained")
def sustained(
    url: Url,
    model_name: ModelName = "",
    api_key: ApiKey = "",
    shape: Shape = "1000/300",
    seconds: Annotated[float, typer.Option("--seconds", help="How long requests come.")] = 60.0,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests per second, not waiting for replies.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Streams without pause.")] = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Load that keeps coming: open-loop arrivals (--rate) or a fixed concurrency."""
    from slimserve.measure.client import Endpoint
    from slimserve.measure.exact import ExactShape
    from slimserve.measure.sustained import Load, run_sustained, sustained_lines

    prompt_tokens, output_tokens = shape_of(shape)
    load = Load(seconds, rate, concurrency)
    report = run_sustained(Endpoint(url, model_name, api_key), ExactShape(prompt_tokens, output_tokens), load, say)
    finish(report, sustained_lines(report), as_json, out)


@group.command("floor")
def floor(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Rows of a step, like 1,8,16.")] = "1,8,16,32,64",
    context: Annotated[int, typer.Option("--context", min=0, help="Tokens behind each row.")] = 1000,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", help="Bytes per second, like 4.17TB; default: measured here.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16 or fp8.")] = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """The physical floor: bytes a step must move, term by term, and the time at the machine's copy bandwidth."""
    from slimserve.hardware import DeviceKind, copy_bandwidth, parse_bytes
    from slimserve.measure.floor import floor_lines, floor_report
    from slimserve.profiles.resolve import resolve

    resolved = resolve(profile, model=model, flags={"kv_dtype": kv_dtype})
    if bandwidth is not None:
        rate, source = float(parse_bytes(bandwidth.removesuffix("/s"))), "given"
    else:
        device = "cpu" if resolved.device is DeviceKind.CPU else "cuda"
        measured = copy_bandwidth(device)
        rate = measured.median
        source = f"copy on {device}, {measured.lowest / 1e9:.0f} to {measured.highest / 1e9:.0f} GB/s"
    report = floor_report(resolved, numbers(concurrency, "concurrency"), context, rate, source)
    finish(report, floor_lines(report), as_json, out)


@group.command("kernels")
def kernels(
    profile: Annotated[str | None, typer.Argument(help="The matrices and sequence operations of this profile.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    families: Annotated[
        str | None,
        typer.Option("--families", help="Of products,attention,latent,selection,delta-rule,convolution; default all."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Without a profile: every kernel once at toy sizes, for its check.")
    ] = False,
    formats: Annotated[
        str | None, typer.Option("--formats", help="Without a profile: formats like Q4_K,NVFP4; default all.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option("--shapes", help="Without a profile, on a GPU: weight shapes by name; default all.")
    ] = None,
    experts: Annotated[
        str | None, typer.Option("--experts", help="Without a profile, on a GPU: gate+down formats; empty for none.")
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Rows of products and decode steps, like 1,8,64.")] = None,
    context: Annotated[str | None, typer.Option("--context", help="Tokens of context, like 1000,8000.")] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=0, help="Tokens of a prompt's step; 0 times decode steps alone.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16, fp16 or fp8.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="On a GPU: other tile shapes too.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Single kernels beside the copy bandwidth and the matrix rate, every output checked; synthetic weights, random
    inputs. Exit 1 where an output is wrong."""
    from dataclasses import replace

    import torch

    from slimserve.engine.build import check_device
    from slimserve.engine.config import CacheDtype
    from slimserve.measure import kernel_bench
    from slimserve.profiles.resolve import resolve

    named = profile is not None or model is not None
    flags = {"tiny": tiny or None, "formats": formats, "shapes": shapes, "experts": experts}
    given = [flag for flag, value in flags.items() if value is not None]
    if named and given:
        raise UsageError(f"--{given[0]} is for runs without a profile; a profile brings its own matrices")
    wanted = "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device
    target = check_device(wanted)
    if target.type == "cpu" and (sweep or shapes is not None or experts is not None):
        raise UsageError(
            "--sweep, --shapes and --experts are about a GPU's kernels; the processor has one form of each"
        )
    if tiny and (shapes is not None or experts is not None):
        raise UsageError("--tiny has shapes of its own and no experts; leave --shapes and --experts out")
    chosen = kernel_bench.FAMILIES if families is None else _words(families)
    unknown = [family for family in chosen if family not in kernel_bench.FAMILIES]
    if unknown or not chosen:
        raise UsageError(f"--families: {families!r} must be some of {', '.join(kernel_bench.FAMILIES)}")
    if named:
        resolved = resolve(profile, model=model, flags={"kv_dtype": kv_dtype}, device=target.type)
        dtype = CacheDtype(resolved.value("kv_dtype")).torch
        work = kernel_bench.model_work(resolved.name, resolved.description, dtype)
    else:
        if kv_dtype not in (None, "bf16", "fp16", "fp8"):
            raise UsageError(f"--kv-dtype {kv_dtype!r} is not known; there are bf16, fp16 and fp8")
        dtype = CacheDtype(kv_dtype or "bf16").torch
        pairs = None if experts is None else _words(experts)
        work = kernel_bench.fixed_work(target, _words(formats), _words(shapes), pairs, tiny=tiny)
    shape = kernel_bench.defaults(target, named=named, tiny=tiny)
    shape = replace(shape, kv_dtype=dtype, sweep=sweep, families=tuple(dict.fromkeys(chosen)))
    if rows is not None:
        shape = replace(shape, rows=numbers(rows, "rows"), step_rows=numbers(rows, "rows"))
    if context is not None:
        shape = replace(shape, contexts=numbers(context, "context"))
    if prompt is not None:
        shape = replace(shape, prompt=prompt)
    report = kernel_bench.measure_kernels(work, target, shape, say)
    finish(report, kernel_bench.kernel_lines(report), as_json, out)
    kernel_bench.refuse_wrong_outputs(report)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


@group.command("step")
def step(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="synthetic: the profile's geometry, weights made on the device.")
    ] = None,
    streams: Annotated[str, typer.Option("--streams", help="Rows of a step, like 1,8.")] = "1,8",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens behind each row.")] = 1000,
    steps: Annotated[int, typer.Option("--steps", min=8, help="Most timed steps.")] = 24,
    seconds: Annotated[float, typer.Option("--seconds", help="After which no timed step begins.")] = 20.0,
    trace: Annotated[bool, typer.Option("--trace", help="Time per family of operations beside its floor.")] = False,
    null_model: Annotated[
        bool, typer.Option("--null-model", help="No model at all: what the engine itself costs (on the CPU).")
    ] = False,
    vocab: Annotated[int, typer.Option("--vocab", min=2, help="Vocabulary of the null model.")] = 151_936,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16, fp16 or fp8.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """A decode step of this build, in this process: its time, its floor and, with --trace, where the time goes."""
    from slimserve.measure.overhead import overhead_lines, overhead_report
    from slimserve.measure.step import StepShape, measure_step, step_lines
    from slimserve.profiles.planning import admit
    from slimserve.profiles.resolve import resolve
    from slimserve.profiles.synthetic import synthetic_of

    counts = numbers(streams, "streams")
    if null_model:
        if profile or model or weights or trace:
            raise UsageError("--null-model takes neither a profile nor a model, --weights or --trace")
        plain = overhead_report(counts, vocab)
        finish(plain, overhead_lines(plain), as_json, out)
        return
    shape = StepShape(counts, context, steps, seconds, trace)
    flags = {"max_sequences": max(counts), "max_context": shape.max_context, "kv_dtype": kv_dtype, "drafter": "none"}
    resolved = resolve(profile, model=model, flags=flags, device=None if device == "auto" else device)
    made = synthetic_of(resolved, weights)
    config, _ = admit(resolved, made=made is not None)
    report = measure_step(resolved.name, _engine_settings(resolved, config, made), resolved.description, shape, say)
    finish(report, step_lines(report), as_json, out)


def _engine_settings(resolved: ResolvedProfile, config: EngineConfig, made: SyntheticModel | None) -> EngineSettings:
    """What the engine is built from: the profile's files, or synthetic weights."""
    from slimserve.engine.build import EngineSettings, encode_config
    from slimserve.fetch import TerminalProgress

    path = "" if made is not None else str(resolved.model_path(TerminalProgress()))
    return EngineSettings(path=path, name=resolved.name, config=encode_config(config), synthetic=made)


@group.command("speculate")
def speculate(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    drafter: Annotated[str, typer.Option("--drafter", help="lookup, nextn, dflash2 or model.")] = "lookup",
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", metavar="PATH", help="The drafter's own files, or a profile.")
    ] = None,
    drafts: Annotated[int | None, typer.Option("--drafts", min=1, max=15, help="Most drafted tokens a step.")] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Of edit, text, code.")] = "edit,text,code",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest reply.")] = 600,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds after the warm-up.")] = 3,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests at once.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    draft_acceptance: Annotated[
        str | None, typer.Option("--draft-acceptance", help="exact (default) or rejection.")
    ] = None,
    always: Annotated[bool, typer.Option("--always", help="Never let the control switch drafting off.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """The same replies with and without drafting, in turns: acceptance, tokens and steps per second, same text."""
    from dataclasses import replace

    from slimserve.cli.opening import EngineFlags
    from slimserve.fetch import TerminalProgress
    from slimserve.measure.speculate import SpeculateShape, measure_speculation, speculate_lines
    from slimserve.profiles.planning import admit
    from slimserve.profiles.resolve import resolve

    flags = EngineFlags(
        max_seqs=streams, ctx=2048 + tokens, drafter=drafter, draft_model=draft_model, drafts=drafts,
        draft_acceptance=draft_acceptance,
    )  # fmt: skip
    shape = SpeculateShape(tuple(tasks.split(",")), tokens, rounds, streams, temperature=temperature)
    resolved = resolve(profile, model=model, flags=flags.settings(), device=None if device == "auto" else device)
    resolved, own = flags.with_draft_model(resolved)
    config, _ = admit(resolved)
    speculation = replace(flags.speculation(config.speculation), measured=not always)
    if own is not None:
        speculation = replace(speculation, model_path=str(own.locate(TerminalProgress())))
    report = measure_speculation(str(resolved.model_path()), replace(config, speculation=speculation), shape, say)
    finish(report, speculate_lines(report), as_json, out)
