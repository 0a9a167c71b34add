"""`slimserve doctor`: what this machine is, what is installed, and what works. Exit 1 where nothing can run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from slimserve.cli.terminal import speak

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec")
_INTERESTING = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "i8mm")


def command() -> None:
    """Report versions, processor, memory, GPUs, kernels, the cache folder, and whether a step can run."""
    import typer

    width = 14
    healthy = True
    for name, value, good in checks():
        mark = "" if good else "   <-- "
        speak(f"{name:<{width}}{value}{mark}\n")
        healthy = healthy and good
    speak(f"{'verdict':<{width}}{'ready' if healthy else 'not everything works: see the marked lines'}\n")
    if not healthy:
        raise typer.Exit(1)


def checks() -> Iterator[tuple[str, str, bool]]:
    """(what, finding, whether it is good) of every check; a check that fails is a finding."""
    parts: tuple[Callable[[], Iterator[tuple[str, str, bool]]], ...] = (
        _versions,
        _machine,
        _gpus,
        _kernels,
        _folders,
        _step,
    )
    for part in parts:
        try:
            yield from part()
        except Exception as error:
            yield part.__name__.strip("_"), f"{type(error).__name__}: {error}", False


def _versions() -> Iterator[tuple[str, str, bool]]:
    import slimserve

    yield "slimserve", slimserve.__version__, True
    yield "python", f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 11)
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    missing = [entry for entry in found if entry.startswith("no ") and entry != "no triton"]
    yield "packages", ", ".join(found), not missing


def _machine() -> Iterator[tuple[str, str, bool]]:
    from slimserve.hardware import detect, format_bytes

    machine = detect()
    yield "processor", f"{machine.cpu_model}, {machine.num_cores} cores usable", True
    flags = [flag for flag in _INTERESTING if flag in machine.cpu_flags]
    yield "instructions", ", ".join(flags) or "none of those that the kernels use", True
    yield (
        "memory",
        f"{format_bytes(machine.memory_total)}, {format_bytes(machine.memory_free)} free",
        machine.memory_free > 1 << 30,
    )


def _gpus() -> Iterator[tuple[str, str, bool]]:
    import torch

    from slimserve.hardware import detect, format_bytes

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    yield "torch build", f"{torch.__version__}, {build}", True
    accelerators = detect().accelerators
    if not accelerators:
        yield "gpu", "none that torch sees: models run on the processor", True
    for device in accelerators:
        memory = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"
        yield f"gpu {device.index}", f"{device.name} ({device.capability}), {memory}", True


def _kernels() -> Iterator[tuple[str, str, bool]]:
    from slimserve.ops import compiled
    from slimserve.ops.cpu import build

    report = build.describe()
    yield "compiler", report.compiler or "none", report.compiler is not None
    yield "cpu kernels", report.note + (f" at {report.library}" if report.built else ""), report.compiler is not None

    if importlib.util.find_spec("triton") is not None:
        kept = compiled.kept_kernels()
        yield "gpu kernels", f"{kept} compiled in {compiled.kernel_folder()}; others at first use", True


def _folders() -> Iterator[tuple[str, str, bool]]:
    from slimserve.fetch import cache_folder
    from slimserve.hardware import format_bytes
    from slimserve.profiles.registry import load_catalog, user_folder

    folder = cache_folder()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(place, os.W_OK)
    models = folder / "models"
    files = [path for path in models.rglob("*") if path.is_file()] if models.exists() else []
    held = format_bytes(sum(path.stat().st_size for path in files))
    free = format_bytes(shutil.disk_usage(place).free)
    words = f"{folder}, {len(files)} files ({held}), {free} free" + ("" if writable else ", not writable")
    yield "cache", words, writable
    catalog = load_catalog()
    own = len(list(user_folder().glob("*.toml"))) if Path(user_folder()).exists() else 0
    yield "profiles", f"{len(catalog.records)} readable, {own} of your own", not catalog.problems
    for problem in catalog.problems:
        yield "profiles", problem, False


def _step() -> Iterator[tuple[str, str, bool]]:
    """One real operation per device: what a version number cannot promise."""
    import torch

    from slimserve import ops

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for name in devices:
        x = torch.arange(8.0, device=name).reshape(1, 8) + 1
        weight = torch.ones(8, device=name)
        got = ops.rms_norm(x, weight, 1e-6)
        expected = x / torch.sqrt((x * x).mean())
        good = bool(torch.allclose(got, expected, atol=1e-4))
        yield f"step on {name}", "computes" if good else "computes a wrong result", good
