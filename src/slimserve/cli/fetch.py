"""`slimserve fetch PROFILE ...`: bring the files of profiles into the cache, or say why not."""

from __future__ import annotations

from typing import Annotated

import typer

from slimserve.cli.terminal import say, speak
from slimserve.errors import UsageError


def command(
    profiles: Annotated[list[str], typer.Argument(help="Profiles of `slimserve list`.")],
    offline: Annotated[bool, typer.Option("--offline", help="Only look whether the files are here.")] = False,
) -> None:
    """Fetch and verify the files of profiles; prints their paths."""
    from slimserve import fetch
    from slimserve.profiles.registry import find_record

    settings = fetch.FetchSettings.from_environment(offline=offline)
    for name in profiles:
        record = find_record(name)
        if not record.model.files:
            raise UsageError(f"{name} names no files yet; give the model with --model PATH")
        for path in fetch.ensure_all(record.model.files, fetch.TerminalProgress(), settings):
            speak(f"{path}\n")
        say(f"{name}: {len(record.model.files)} verified")
