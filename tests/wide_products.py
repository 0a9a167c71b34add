"""Compiles wide GPU products for Hopper, on a machine without a GPU, and prints what a check of registers needs.

Run as a program by test_ops_triton_registers: `wide_products.py FOLDER FORMAT:ROWS:WEIGHT-ROWS:SEGMENTS ...` prints, as
JSON, for each case the path of the compiled kernel, whose assembly lies beside it. Nothing is launched: a stand-in for
the driver names the architecture, and launches only compile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from test_cpu_linear import random_packed
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slimserve.ops import NumericsConfig
from slimserve.ops.triton import linear
from slimserve.ops.triton.launch import NO_FUSION

WIDTH = 1536


class Hopper:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def early(device: torch.device, pays: bool = False) -> tuple[bool, dict[str, bool]]:
    """Launch options as on the device."""
    return pays, {**NO_FUSION, "launch_pdl": True} if pays else NO_FUSION


def compiled(case: str, folder: Path) -> str:
    """Path of the machine code of a format's product with so many input rows and weight rows, K in so many segments."""
    name, rows, weight_rows, segments = case.split(":")
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: object, **options: object) -> object:
        kernel = run(self, *arguments, **{**options, "warmup": True})
        found.append(kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        packed = random_packed(name, int(weight_rows), WIDTH, 3)
        served = linear.TritonLinear(packed, torch.device("cpu"), NumericsConfig())
        served.segments = int(segments)
        x = torch.randn(int(rows), WIDTH).bfloat16()
        served(x, torch.empty(int(rows), packed.shape[0], dtype=torch.bfloat16))
    finally:
        JITFunction.run = run
    path = folder / f"{case.replace(':', '-')}.cubin"
    path.write_bytes(found[-1].asm["cubin"])
    path.with_suffix(".ptx").write_text(found[-1].asm["ptx"])
    return str(path)


def main() -> None:
    """Print the paths."""
    folder = Path(sys.argv[1])
    driver.set_active(Hopper())  # type: ignore[attr-defined]
    linear.multiprocessors = lambda device: 132  # type: ignore[assignment]
    linear.warp_groups_agree = lambda device: True  # type: ignore[assignment]
    linear.overlap_options = early  # type: ignore[assignment]
    print(json.dumps({case: compiled(case, folder) for case in sys.argv[2:]}))


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret
    main()
