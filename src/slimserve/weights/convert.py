"""A safetensors folder as one GGUF file, quantized on the way: tables of both containers say what becomes what.

Like the loader this module stands above models/: it asks an architecture for its parameter tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from slimserve.errors import RefusalError, UsageError
from slimserve.models import glm5_gguf
from slimserve.models.contract import ParameterSpec
from slimserve.models.glm5_config import Glm5Config
from slimserve.quant.decode import dequantize
from slimserve.quant.encode import encode
from slimserve.quant.formats import BF16, F32, NVFP4
from slimserve.quant.tensor import BlockFormat, PackedTensor
from slimserve.weights.gguf_write import TensorPlan, write_gguf
from slimserve.weights.imatrix import Importances, read_imatrix
from slimserve.weights.loader import read_config
from slimserve.weights.quantize import requantize
from slimserve.weights.quantize_report import Progress, QuantizeReport
from slimserve.weights.quantize_rules import GGML_FILE_TYPES, Family, check_families, gguf_choice, writable_format
from slimserve.weights.source import Source, open_source
from slimserve.weights.tokenizer.gguf_export import tokenizer_metadata
from slimserve.weights.transforms import RULES

Load = Callable[[], PackedTensor]


def convert(
    source: Path,
    target: Path,
    type_name: str,
    *,
    imatrix: Path | None = None,
    head: str | None = None,
    keep: Sequence[str] = (),
    families: Sequence[Family] = (),
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write the GGUF file `target` from the safetensors folder `source`, weights as `type_name`, tokenizer included.

    `families` give chosen names another type; small tensors that decide routing, decay and selection stay float32 or
    bfloat16. One matrix stands in float32 at a time, one tensor of the file in memory. Raises UsageError, RefusalError
    naming an architecture that has no GGUF form here, or FormatError.
    """
    opened = open_source(source)
    _, config = read_config(opened)
    if not isinstance(config, Glm5Config):
        raise RefusalError(f"{source}: only glm5_next folders become GGUF files here, not {config.architecture}")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no folder {target.parent}")
    fmt = writable_format(type_name)
    if fmt is NVFP4:
        raise UsageError("NVFP4 needs a scale per matrix: write a BF16 file first, then quantize that to NVFP4")
    wanted_head = writable_format(head) if head is not None else None
    importances: Importances = read_imatrix(imatrix) if imatrix is not None else {}
    report = QuantizeReport(bytes_in=opened.num_bytes)
    plans: list[TensorPlan] = []
    tensors = _tensors(config, opened)
    check_families(families, [spec.gguf_name for spec, _ in tensors])
    for spec, parts in tensors:
        shape = _file_shape(spec)
        chosen = gguf_choice(spec.gguf_name, shape, fmt, wanted_head, keep, families)
        importance = None if chosen is None else report.importance_of(importances, spec.gguf_name)
        plans.append(_plan(spec, shape, chosen, importance, parts))
        report.count(plans[-1].format.name, plans[-1].num_bytes)
    metadata = {**glm5_gguf.gguf_metadata(config), "general.name": source.resolve().name}
    metadata |= {"general.file_type": GGML_FILE_TYPES[fmt.name], "general.quantization_version": 2}
    metadata |= tokenizer_metadata(opened.folder)
    write_gguf(target, metadata, plans, progress=_watch(progress, plans))
    return report


def _plan(
    spec: ParameterSpec,
    shape: tuple[int, ...],
    chosen: BlockFormat | None,
    importance: torch.Tensor | None,
    parts: Sequence[Load],
) -> TensorPlan:
    """An untouched tensor is float32 where the model holds it so, bfloat16 where it is a matrix."""
    plain = F32 if spec.keep is torch.float32 else BF16

    def part(number: int, load: Load) -> torch.Tensor:
        if chosen is None:
            return encode(dequantize(load()), plain, name=spec.hf_name).data
        own = importance if importance is None or importance.dim() == 1 else importance[number]
        return requantize(load(), chosen, own)

    def data() -> torch.Tensor:
        made = [part(number, load) for number, load in enumerate(parts)]
        return made[0] if len(shape) < 3 or len(made) == 1 else torch.stack(made)

    return TensorPlan(spec.gguf_name, shape, chosen or plain, data)


def _file_shape(spec: ParameterSpec) -> tuple[int, ...]:
    return RULES[spec.gguf_transform.kind].source_shape(spec.shape, spec.gguf_transform.argument)


def _tensors(config: Glm5Config, source: Source) -> list[tuple[ParameterSpec, list[Load]]]:
    """Every tensor of the file with how to make its parts (one, or one per expert).

    Both tables name parameters alike; where their transforms are equal too, the stored tensors are the same.
    """
    own = {spec.name: spec for spec in config.parameters()}
    found: list[tuple[ParameterSpec, list[Load]]] = []
    for spec in glm5_gguf.gguf_form(config).parameters():
        hf = own.get(spec.name)
        if hf is None:
            found.append((spec, [_half_of_kv(config, own, spec, source)]))
        elif hf.hf_transform.kind == "stack_experts":
            names = [hf.hf_name.format(expert=expert) for expert in range(hf.hf_transform.argument)]
            found.append((spec, [partial(source.packed, name) for name in names]))
        elif hf.hf_transform == spec.gguf_transform:
            found.append((spec, [partial(source.packed, hf.hf_name)]))
        else:
            raise AssertionError(f"{spec.name}: {hf.hf_transform} is not {spec.gguf_transform}")
    return found


def _half_of_kv(config: Glm5Config, own: dict[str, ParameterSpec], spec: ParameterSpec, source: Source) -> Load:
    """Keys, transposed per head, or values of kv_b, which the HF form stores together."""
    stem, _, part = spec.name.removesuffix(".weight").rpartition(".")
    whole, shape = own[f"{stem}.kv_b.weight"], config.latent

    def load() -> PackedTensor:
        plain = dequantize(source.packed(whole.hf_name))
        heads = plain.view(shape.num_heads, shape.qk_dim + shape.value_dim, shape.latent_dim)
        half = heads[:, : shape.qk_dim].transpose(1, 2) if part == "k_b" else heads[:, shape.qk_dim :]
        return PackedTensor(F32, spec.shape, half.contiguous(), spec.gguf_name)

    return load


def _watch(progress: Progress | None, plans: Sequence[TensorPlan]) -> Callable[[TensorPlan], None]:
    total, done = sum(plan.num_bytes for plan in plans), 0

    def watch(plan: TensorPlan) -> None:
        nonlocal done
        if progress is not None:
            progress(plan.name, done, total)
        done += plan.num_bytes

    return watch
