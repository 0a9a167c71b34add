"""Prints, as JSON, a digest of what the CPU kernels of this process compute: the same for every build of them.

Run as a program by test_cpu_instruction_sets, with $SLIMSERVE_CXXFLAGS naming the instruction set.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nano_models
import tiny_models
import torch
from hybrid_driver import HybridDriver
from step_driver import StepDriver
from test_cpu_linear import ALL, random_packed

from slimserve import ops
from slimserve.ops import Activations, NumericsConfig
from slimserve.ops.cpu import library
from slimserve.weights.loader import LoadedModel, load_model

PROMPT, DECODED = 150, 3


def digest(*tensors: torch.Tensor) -> str:
    """Of the bits, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def products() -> Iterator[tuple[str, str]]:
    """Every format, few rows (packed codes) and many (decoded panels), both kinds of activations."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(50, 512, generator=generator)
    for name in ALL:
        for activations in Activations:
            numerics = NumericsConfig(cpu_activations=activations)
            weight = ops.prepare_linear([random_packed(name, 37, 512, seed=3)], numerics=numerics)
            yield f"{name} {activations.value}", digest(ops.linear(x[:3], weight), ops.linear(x, weight))


def norms() -> Iterator[tuple[str, str]]:
    """Lengths that are and are not multiples of any vector."""
    generator = torch.Generator().manual_seed(6)
    for length in (5, 8, 24, 63, 64, 100, 129, 896, 1000):
        x, weight = torch.randn(4, length, generator=generator), torch.randn(length, generator=generator)
        yield f"rms_norm {length}", digest(ops.rms_norm(x, weight, 1e-6))
        yield f"layer_norm {length}", digest(ops.layer_norm(x, weight, weight, 1e-6))


def model_digest(loaded: LoadedModel, kv_dtype: torch.dtype) -> str:
    """Logits of one prefill and a few steps."""
    specs = loaded.model.config.caches(kv_dtype)
    hybrid = any(spec.kind.value not in ("attention", "window") for spec in specs)
    driver = HybridDriver(loaded.model, kv_dtype=kv_dtype) if hybrid else StepDriver(loaded.model, kv_dtype=kv_dtype)
    row, found = driver.new(), []
    tokens = [(7 * i * i + 3 * i) % 250 for i in range(PROMPT)]
    for part in (tokens[:-DECODED], *([token] for token in tokens[-DECODED:])):
        found.append(driver.step([(row, part)]))
    return digest(*found)


def models(folder: Path) -> Iterator[tuple[str, str]]:
    """The packaged hybrids and small random dense models, int8 products, half-precision pages."""
    for name in (nano_models.QWEN, nano_models.GLM):
        yield name, model_digest(load_model(nano_models.packaged(name)), torch.float16)
    for case, kind in (("qwen2", "Q5_0"), ("gemma3", "Q8_0"), ("llama", "Q4_0")):
        path = tiny_models.save_gguf(tiny_models.build(case), case, folder / f"{case}.gguf", quantize=kind)
        yield f"{case} {kind}", model_digest(load_model(path), torch.bfloat16)


def main() -> None:
    """All digests and the instruction set they were computed with."""
    library.set_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        found = {**dict(products()), **dict(norms()), **dict(models(Path(folder)))}
    json.dump({"instruction_set": library.instruction_set(), "digests": found}, sys.stdout)


if __name__ == "__main__":
    main()
