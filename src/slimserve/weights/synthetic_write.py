"""Writing a synthetic model to disk, tensor by tensor: a GGUF file or a safetensors folder, tokenizer included."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from slimserve.errors import RefusalError, UsageError
from slimserve.quant.export import mixed_quantization_config, stored_tensors
from slimserve.quant.formats import find_format
from slimserve.quant.schemes import SchemeKind
from slimserve.quant.tensor import PackedTensor
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.quantize_folder import ShardWriter
from slimserve.weights.source import Container
from slimserve.weights.synthetic import SyntheticModel, SyntheticSource, lay_out
from slimserve.weights.tokenizer.stand_in import stand_in_metadata, write_stand_in

Progress = Callable[[str, int, int], None]
"""Called with (tensor name, bytes done, bytes in all)."""

SHARD_BYTES = 1 << 30

_KINDS = {
    ("E2M1_G16", "group16"): SchemeKind.NVFP4_COMPRESSED,
    ("F8_E4M3", "channel"): SchemeKind.FP8_CHANNEL,
    ("INT4", "group128"): SchemeKind.INT4_COMPRESSED,
}


def synthesize(model: SyntheticModel, target: Path, progress: Progress | None = None) -> Container:
    """Write the model to `target`: the GGUF file of that name, or a new folder; says which it was.

    Memory is bounded by one tensor of a GGUF file, or one file of a folder (1 GiB and a tensor). Raises RefusalError
    for formats that the container cannot hold, UsageError for a place that cannot be written.
    """
    laid_out = lay_out(model)
    if laid_out.container is Container.GGUF:
        if target.suffix != ".gguf":
            raise UsageError(f"{model.name} becomes a GGUF file; give a name that ends in .gguf instead of {target}")
        _write_gguf(laid_out, target, progress)
    else:
        if target.suffix == ".gguf":
            raise UsageError(f"{model.name} becomes a safetensors folder; give a folder instead of {target}")
        _write_folder(laid_out, target, progress)
    return laid_out.container


def _write_gguf(laid_out: SyntheticSource, target: Path, progress: Progress | None) -> None:
    make = laid_out.packed("cpu")
    plans = []
    for name, maker in laid_out.makers.items():
        fmt = find_format(maker.rule.format)
        assert fmt is not None, "lay_out looked at every format"
        plans.append(TensorPlan(name, maker.shape, fmt, partial(_data, make, name)))
    total, done = sum(plan.num_bytes for plan in plans), 0

    def watch(plan: TensorPlan) -> None:
        nonlocal done
        if progress is not None:
            progress(plan.name, done, total)
        done += plan.num_bytes

    metadata = {**laid_out.metadata, **stand_in_metadata(laid_out.parsed.vocab_size)}
    write_gguf(target, metadata, plans, progress=watch)


def _data(make: Callable[[str], PackedTensor], name: str) -> torch.Tensor:
    return make(name).data


def _write_folder(laid_out: SyntheticSource, target: Path, progress: Progress | None) -> None:
    kinds = {name: _kind(laid_out, name) for name in laid_out.makers}
    if target.exists() and any(target.glob("*.safetensors")):
        raise UsageError(f"{target} already holds safetensors files; give an empty folder")
    make, total, done = laid_out.packed("cpu"), laid_out.source().num_bytes, 0
    modules: dict[SchemeKind, list[str]] = {}
    ignored: list[str] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(target, SHARD_BYTES)
        for name, kind in kinds.items():
            if progress is not None:
                progress(name, done, total)
            packed = make(name)
            done += packed.num_bytes
            writer.add({name: packed.data} if kind is None else stored_tensors(packed, kind))
            if kind is not None:
                modules.setdefault(kind, []).append(name.removesuffix(".weight"))
            elif name.endswith("_proj.weight"):
                ignored.append(name.removesuffix(".weight"))
        writer.finish()
        config = {**laid_out.metadata, "quantization_config": mixed_quantization_config(modules, ignored)}
        if not modules:
            del config["quantization_config"]
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_stand_in(target, laid_out.parsed.vocab_size)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None


def _kind(laid_out: SyntheticSource, name: str) -> SchemeKind | None:
    """How a folder stores a tensor; None for a plain one."""
    rule = laid_out.makers[name].rule
    if rule.format in ("F32", "F16", "BF16"):
        return None
    kind = _KINDS.get((rule.format, rule.scales))
    if kind is None:
        raise RefusalError(
            f"tensor {name}: {rule.format} {rule.scales} has no form in a safetensors folder written here"
        )
    return kind
