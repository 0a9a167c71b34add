"""The loaded C++ library: argument types, code tables, threads."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch

from slimserve.errors import RefusalError
from slimserve.hardware import usable_cores
from slimserve.ops.cpu.build import ensure_library
from slimserve.quant.grids import grid, parity_signs

DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
}
"""Element types as the library numbers them (activations.h)."""

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "slim_set_threads": ([_I], None),
    "slim_threads": ([], _I),
    "slim_isa": ([], ctypes.c_char_p),
    "slim_set_grid": ([_I, _P], None),
    "slim_panel_bytes": ([_I, _L], _L),
    "slim_relayout": ([_I, _P, _L, _P, _L, _L, _L, _P], None),
    "slim_advise": ([_P, _L], None),
    "slim_read": ([_P, _L], ctypes.c_uint32),
    "slim_panel_rows": ([_P, _P, _L, _P, _I], None),
    "slim_file_rows": ([_I, _P, _L, _L, _L, _P, _L, _P, _I], None),
    "slim_linear": ([_P, _I, _P, _I, _L, _P, _I, _L, _I], None),
    "slim_gated_mlp": ([_P, _I, _P, _I, _P, _I, _L, _I, _F, _P, _I, _L, _I], None),
    "slim_experts": ([_P, _I, _P, _L, _P, _I, _L, _L, _P, _P, _I, _F, _I, _P], None),
    "slim_gumbel_candidates": ([_P, _L, _F, _F, ctypes.c_uint64, _L, _I, _P, _L], _L),
    "slim_rms_norm": ([_P, _P, _I, _P, _F, _F, _L, _L, _P, _P], None),
    "slim_silu_mul": ([_P, _I, _L, _L, _I, _F, _P], None),
    "slim_gelu_tanh_mul": ([_P, _I, _L, _L, _P], None),
    "slim_rope": ([_P, _I, _P, _P, _L, _L, _L, _L, _L, _I, _F], None),
    "slim_place_heads": (
        [_P, _L, _L, _L, _L, _P, _P, _F, _P, _P, _L, _I, _F, _P, _P, _I, _L, _P],
        None,
    ),
    "slim_write_pages": ([_P, _I, _L, _L, _L, _L, _L, _P, _I, _L, _P], None),
    "slim_delta_rule": ([_P], None),
    "slim_convolution": ([_P], None),
    "slim_update_pools": ([_P], None),
    "slim_select_pools": ([_P], None),
    "slim_latent_attention": ([_P], None),
    "slim_hyper_pre": ([_P], None),
    "slim_hyper_post": ([_P], None),
    "slim_route": ([_P], None),
    "slim_layer_norm": ([_P], None),
    "slim_gate_multiply": ([_P], None),
    "slim_log_decay": ([_P], None),
    "slim_paged_attention": (
        [_P, _I, _L, _L, _P, _P, _I, _L, _P, _L, _P, _P, _L, _L, _L, _L, _L, _F, _F, _L, _P],
        None,
    ),
}

_GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1")
_kept: list[torch.Tensor] = []  # code tables that the library points to


def available_cores() -> int:
    """Threads to use: the cores this process may use, two hardware threads of one core counted once."""
    usable = usable_cores()
    if not hasattr(os, "sched_getaffinity"):
        return usable
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(usable, len(cores)))


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    for index, name in enumerate(_GRIDS):
        _kept.append(grid(name).to(torch.int8).contiguous())
        library.slim_set_grid(index, _kept[-1].data_ptr())
    _kept.append(parity_signs().to(torch.uint8).contiguous())
    library.slim_set_grid(len(_GRIDS), _kept[-1].data_ptr())
    library.slim_set_threads(available_cores())
    return library


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library, built at first use; RefusalError where this machine cannot build it."""
    path = ensure_library()
    try:
        return _open(path)
    except OSError as error:
        raise RefusalError(
            f"The compiled CPU kernels at {path} cannot be loaded ({error}); remove the folder."
        ) from error


@lru_cache(maxsize=1)
def load_or_warn() -> ctypes.CDLL | None:
    """The library, or None after one printed sentence: the torch references then serve, slowly."""
    try:
        return load()
    except RefusalError as error:
        print(f"slimserve: CPU kernels are not available, slow references serve instead. {error}", file=sys.stderr)
        return None


def set_threads(threads: int) -> None:
    """How many threads share one operation; results do not depend on it."""
    load().slim_set_threads(threads)


def serve_with(threads: int | None) -> None:
    """Give the processor to these kernels: `threads` of them (None: one per core), and one thread to torch.

    torch's own threads spin for milliseconds after each of its operations and would take a core away from every
    product that follows: a decode step of Qwen2.5-Coder 0.5B took 35 ms instead of 25 on two busy cores. Where the
    library is not built, torch gets the threads.
    """
    library = load_or_warn()
    if library is None:
        if threads is not None:
            torch.set_num_threads(threads)
        return
    library.slim_set_threads(threads or available_cores())
    torch.set_num_threads(1)


def num_threads() -> int:
    """Threads that share one CPU operation."""
    library = load_or_warn()
    return torch.get_num_threads() if library is None else int(library.slim_threads())


def read_rate(num_bytes: int = 256 << 20) -> float:
    """Bytes per second at which all threads load memory that no cache holds: the bound of a product of one row."""
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    library = load()
    library.slim_advise(memory.data_ptr(), num_bytes)
    library.slim_read(memory.data_ptr(), num_bytes)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        library.slim_read(memory.data_ptr(), num_bytes)
        times.append(time.perf_counter() - started)
    return num_bytes / sorted(times)[1]


def instruction_set() -> str:
    """Which vector build was compiled: avx512-vnni, avx2-vnni, avx2 or portable."""
    name: bytes = load().slim_isa()
    return name.decode()
