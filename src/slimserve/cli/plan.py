"""`slimserve plan PROFILE`: memory term by term, on this machine or on one that is not here. Exit 3: does not fit."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from slimserve.cli.terminal import speak


def command(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="synthetic: made weights, which a CPU holds all in memory.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Plan for a GPU of this size, like 24GiB.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, max=64, help="How many of them share the model.")] = 1,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="Plan for a computer with this much memory.")
    ] = None,
    platform: Annotated[str | None, typer.Option("--platform", help="A platform of the record by name.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    ctx: Annotated[int | None, typer.Option("--ctx", help="Longest prompt plus reply, in tokens.")] = None,
    max_seqs: Annotated[int | None, typer.Option("--max-seqs", help="Requests that run at once.")] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16 or fp8.")] = None,
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Never reuse earlier prompts.")] = False,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Never draft tokens.")] = False,
    drafter: Annotated[str | None, typer.Option("--drafter", help="lookup, nextn, dflash2, model or none.")] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", metavar="PATH", help="The drafter's own files, or a profile (dflash2, model)."),
    ] = None,
    drafts: Annotated[int | None, typer.Option("--drafts", min=1, max=15, help="Most drafted tokens a step.")] = None,
    draft_acceptance: Annotated[
        str | None, typer.Option("--draft-acceptance", help="exact (default) or rejection.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan memory: a named term for every byte, the longest context, sequences at it, and which pool binds."""
    from slimserve.cli.opening import EngineFlags
    from slimserve.errors import UsageError
    from slimserve.hardware import DeviceKind, detect, parse_bytes, pretend
    from slimserve.plan.memory import plan_json
    from slimserve.profiles.planning import fitted, plan_profile
    from slimserve.profiles.report import plan_lines
    from slimserve.profiles.resolve import resolve
    from slimserve.profiles.synthetic import synthetic_of

    machine = detect()
    given = EngineFlags(
        ctx=ctx, max_seqs=max_seqs, kv_dtype=kv_dtype, prefix_cache=not no_prefix_cache, speculate=not no_spec,
        drafter=drafter, draft_model=draft_model, drafts=drafts, draft_acceptance=draft_acceptance,
    )  # fmt: skip
    flags = given.settings()
    if gpu_memory is not None or memory is not None:
        machine = pretend(
            machine,
            gpu_memory=None if gpu_memory is None else parse_bytes(gpu_memory),
            num_gpus=gpus,
            memory=None if memory is None else parse_bytes(memory),
        )
        if gpu_memory is not None:
            device, flags["tensor_parallel"] = device or "cuda", gpus
    resolved = resolve(profile, model=model, flags=flags, hardware=machine, platform=platform, device=device)
    if gpu_memory is not None and resolved.device is not DeviceKind.CUDA:
        raise UsageError(
            f"--gpu-memory asks for a CUDA GPU of that size, and {platform or device} is none: leave one of them out"
        )
    made = synthetic_of(resolved, weights) is not None
    resolved = fitted(given.with_draft_model(resolved)[0], made=made)
    plan = plan_profile(resolved, made=made)
    if as_json:
        speak(json.dumps({"profile": resolved.name, **plan_json(plan)}, indent=2) + "\n")
    else:
        lines = plan_lines(plan)
        if resolved.invalidated:
            lines.append(f"note: {resolved.status_reason}")
        speak("\n".join(lines) + "\n")
    if not plan.fits:
        raise plan.refusal(resolved.name)
