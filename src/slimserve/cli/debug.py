"""`slimserve debug parity`: where a model's computation departs from the reference, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from slimserve.cli.terminal import say, speak
from slimserve.errors import UsageError

T = TypeVar("T")

group = typer.Typer(
    help="Look inside: compare a model layer by layer with the references or another file.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@group.callback()
def _root() -> None:
    """Keeps `parity` a verb of its own while it is the only one."""


@group.command("parity")
def parity(
    model: Annotated[str, typer.Argument(metavar="PROFILE-OR-PATH", help="A profile, a GGUF file or a model folder.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=65536, help="Tokens of the fixed text to run.")] = 256,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="PATH", help="Another file of the same model as the reference.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the candidate runs: cpu or cuda.")] = "cpu",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="Its caches: float32, bf16, fp16 or fp8.")] = "float32",
    activations: Annotated[str, typer.Option("--activations", help="float32 or bf16.")] = "float32",
    products: Annotated[str, typer.Option("--products", help="Products on the CPU: float or int8.")] = "float",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Serving kernels against torch references in float32, per layer: largest and relative error."""
    import torch

    from slimserve.engine.build import check_device
    from slimserve.engine.config import CacheDtype
    from slimserve.measure import parity as compare
    from slimserve.ops import Activations, NumericsConfig

    dtype = _one_of("--kv-dtype", kv_dtype, {kind.value: kind for kind in CacheDtype})
    activation = _one_of("--activations", activations, {"float32": torch.float32, "bf16": torch.bfloat16})
    product = _one_of("--products", products, {kind.value: kind for kind in Activations})
    target = str(check_device("cuda" if device == "cuda" else device))
    candidate = compare.Side(_path(model), target, dtype, NumericsConfig(activation, product))
    reference = compare.reference_of(candidate)
    if against is not None:
        # Another container of the model on the kernels that serve it, exact otherwise.
        reference = compare.Side(against)
    report = compare.parity(candidate, reference, tokens, say)
    speak((json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines())) + "\n")


def _path(model: str) -> Path:
    """A path as it is, else the files of a profile."""
    if Path(model).exists():
        return Path(model)
    from slimserve.fetch import TerminalProgress
    from slimserve.profiles.resolve import resolve

    return resolve(model).model_path(TerminalProgress())


def _one_of(flag: str, text: str, choices: dict[str, T]) -> T:
    if text not in choices:
        raise UsageError(f"{flag} {text!r} is not one of {', '.join(choices)}")
    return choices[text]
