"""`slimserve show PROFILE`: everything resolved, and where each value comes from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from slimserve.cli.terminal import speak


def command(
    profile: Annotated[str | None, typer.Argument(help="A profile of `slimserve list`.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="PATH", help="A file or folder instead.")] = None,
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
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Which kernel serves which tensors, and what refused them before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a profile: settings with their origins, files, platforms, figures, what is missing."""
    from slimserve.cli.opening import EngineFlags
    from slimserve.profiles.planning import fitted
    from slimserve.profiles.report import show_json, show_lines
    from slimserve.profiles.resolve import resolve

    given = EngineFlags(
        ctx=ctx, max_seqs=max_seqs, kv_dtype=kv_dtype, prefix_cache=not no_prefix_cache, speculate=not no_spec,
        drafter=drafter, draft_model=draft_model, drafts=drafts, draft_acceptance=draft_acceptance,
    )  # fmt: skip
    resolved = resolve(profile, model=model, flags=given.settings(), platform=platform, device=device)
    resolved = fitted(given.with_draft_model(resolved)[0])
    if as_json:
        body = show_json(resolved)
        if kernels:
            from slimserve.profiles.kernels import kernel_uses

            body["kernels"] = [asdict(use) for use in kernel_uses(resolved)]
        speak(json.dumps(body, indent=2) + "\n")
    else:
        lines = show_lines(resolved)
        if kernels:
            from slimserve.profiles.kernels import kernel_lines

            lines += kernel_lines(resolved)
        speak("\n".join(lines) + "\n")
