"""`slimserve quantize IN OUT --type T`: quantize a checkpoint, or chosen families of it into a sidecar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from slimserve.cli.terminal import LoadProgress, say, with_progress
from slimserve.errors import UsageError


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A GGUF file, or a folder with safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A GGUF file, or a new folder.")],
    type_name: Annotated[
        str | None, typer.Option("--type", metavar="T", help="GGUF: Q4_K, Q8_0 ...; folder: FP8, NVFP4, INT4 ...")
    ] = None,
    imatrix: Annotated[Path | None, typer.Option("--imatrix", metavar="F", help="An importance matrix.")] = None,
    head: Annotated[str | None, typer.Option("--head", metavar="T", help="Embeddings and head (GGUF).")] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", metavar="PATTERN", help="Leave these alone.")] = None,
    other: Annotated[
        list[str] | None, typer.Option("--as", metavar="PATTERN=T", help="Give these names another type (GGUF).")
    ] = None,
    swap: Annotated[
        list[str] | None, typer.Option("--swap", metavar="PATTERN=T", help="Write a sidecar with these families only.")
    ] = None,
) -> None:
    """Quantize a checkpoint; weights that decide routing and decay stay as they are."""
    from slimserve.weights.convert import convert
    from slimserve.weights.quantize import quantize as run
    from slimserve.weights.quantize_rules import Family
    from slimserve.weights.sidecar import make_sidecar

    if swap:
        if type_name is not None or head is not None or keep or other:
            raise UsageError("--swap names a type for each family; --type, --as, --head and --keep do not go with it")
        families = [Family.parse(text) for text in swap]
        report = with_progress(lambda bar: make_sidecar(source, target, families, imatrix=imatrix, progress=_on(bar)))
    elif type_name is None:
        raise UsageError("give --type T, or --swap PATTERN=T for a sidecar")
    else:
        wanted, patterns, families = type_name, keep or [], [Family.parse(text) for text in other or []]
        # A folder becomes a GGUF file where the target is called one.
        make = convert if source.is_dir() and target.suffix == ".gguf" else run
        report = with_progress(
            lambda bar: make(
                source, target, wanted, imatrix=imatrix, head=head, keep=patterns, families=families, progress=_on(bar)
            )
        )
    if report.without_importance:
        names = ", ".join(report.without_importance[:3])
        say(f"{len(report.without_importance)} weights have no importances in {imatrix} (e.g. {names})")
    formats = ", ".join(f"{count} {name}" for name, count in report.formats.items())
    say(f"{target}: {report.bytes_in:,} bytes became {report.bytes_out:,} ({formats})")


def _on(bar: LoadProgress) -> Callable[[str, int, int], None]:
    """The progress bar as a quantization's progress callback."""
    return lambda name, done, total: bar("quantizing", done, total)


command = quantize
