"""`slimserve qualify PROFILE`: run the profile's gates and leave evidence. Exit 1 where a gate fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimserve.cli.terminal import say, speak
from slimserve.errors import RunError


def command(
    profile: Annotated[str, typer.Argument(help="A profile of `slimserve list`.")],
    platform: Annotated[str | None, typer.Option("--platform", help="A platform of the record by name.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the evidence; default the package's own.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="synthetic: made weights; gates of words are left out.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases, to see that it works; supports nothing.")] = False,
) -> None:
    """Boot a profile as a user would, run its gates, write evidence as JSON and a readable page."""
    from slimserve.measure.qualify import qualify, write_evidence
    from slimserve.profiles.evidence import EVIDENCE_FOLDER
    from slimserve.profiles.resolve import resolve

    resolved = resolve(profile, platform=platform, device=device)
    evidence = qualify(resolved, weights=weights, quick=quick, say=say)
    data, page = write_evidence(evidence, out or EVIDENCE_FOLDER)
    speak(f"{data}\n{page}\n")
    failed = [gate["name"] for gate in evidence["gates"] if not gate["passed"]]
    if failed:
        raise RunError(f"{profile} does not qualify on {evidence['platform']}: {', '.join(failed)} failed")
