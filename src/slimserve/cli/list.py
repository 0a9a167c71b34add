"""`slimserve list`: every profile, whether it fits this machine, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from slimserve.cli.terminal import say, speak


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the profiles: status, whether each fits here, and why, in one line each."""
    from slimserve.hardware import detect
    from slimserve.profiles.report import list_lines, list_rows

    machine = detect()
    rows, problems = list_rows(machine)
    if as_json:
        speak(json.dumps({"machine": machine.describe(), "profiles": [row.as_json() for row in rows]}, indent=2) + "\n")
    else:
        say(machine.describe())
        speak("\n".join(list_lines(rows)) + "\n")
    for problem in problems:
        say(f"slimserve: {problem}")
