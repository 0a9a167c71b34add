"""`slimserve bench exact | sustained | floor | speculate`: figures that can be reproduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slimserve.cli.terminal import say, speak
from slimserve.errors import UsageError

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


@group.command("speculate")
def speculate(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    drafter: Annotated[str, typer.Option("--drafter", help="lookup, nextn, dflash2 or model.")] = "lookup",
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", metavar="PATH", help="The drafter's own files.")
    ] = None,
    drafts: Annotated[int | None, typer.Option("--drafts", min=1, max=15, help="Most drafted tokens a step.")] = None,
    tasks: Annotated[str, typer.Option("--tasks", help="Of edit, text, code.")] = "edit,text,code",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest reply.")] = 600,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds after the warm-up.")] = 3,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Requests at once.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0)] = 0.0,
    always: Annotated[bool, typer.Option("--always", help="Never let the control switch drafting off.")] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """The same replies with and without drafting, in turns: acceptance, tokens and steps per second, same text."""
    from dataclasses import replace

    from slimserve.cli.opening import EngineFlags
    from slimserve.measure.speculate import SpeculateShape, measure_speculation, speculate_lines
    from slimserve.profiles.planning import admit
    from slimserve.profiles.resolve import resolve

    flags = EngineFlags(max_seqs=streams, ctx=2048 + tokens, drafter=drafter, draft_model=draft_model, drafts=drafts)
    shape = SpeculateShape(tuple(tasks.split(",")), tokens, rounds, streams, temperature=temperature)
    resolved = resolve(profile, model=model, flags=flags.settings(), device=None if device == "auto" else device)
    config, _ = admit(resolved)
    speculation = replace(flags.speculation(config.speculation), measured=not always)
    report = measure_speculation(str(resolved.model_path()), replace(config, speculation=speculation), shape, say)
    finish(report, speculate_lines(report), as_json, out)
