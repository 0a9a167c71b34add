"""`slimserve synthesize PROFILE OUT`: a profile's synthetic weights as files, for measuring other engines on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimserve.cli.terminal import say, with_progress


def command(
    profile: Annotated[str, typer.Argument(help="A profile whose record holds config and formats.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A GGUF file or a new folder, as the formats ask.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Other weights of the same kind.")] = 0,
) -> None:
    """Write synthetic weights at a profile's real geometry: random values of ordinary size, a stand-in tokenizer."""
    from slimserve.profiles.registry import find_record
    from slimserve.profiles.synthetic import synthetic_model
    from slimserve.weights.synthetic_write import synthesize

    model = synthetic_model(find_record(profile), seed)
    container = with_progress(
        lambda bar: synthesize(model, target, lambda name, done, total: bar("synthesizing", done, total))
    )
    say(f"{target}: {container.value} with synthetic weights (seed {seed}); what such a model says means nothing")
