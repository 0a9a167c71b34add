"""What this machine is: processor, memory that may really be used, accelerators, measured bandwidth."""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from slimserve.errors import UsageError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_UNLIMITED = 1 << 60


class DeviceKind(Enum):
    """Kinds of device that a record may name; this build computes on CPU and CUDA."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    METAL = "metal"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator; bytes are total and free now. `capability` is e.g. "sm_90"."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    capability: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine. memory_free counts what can be allocated without swapping, within the container's limit.

    `pretended` machines come from flags and are not this one.
    """

    cpu_model: str
    num_cores: int
    cpu_flags: frozenset[str]
    memory_total: int
    memory_free: int
    accelerators: tuple[Accelerator, ...] = ()
    pretended: bool = False

    def of_kind(self, kind: DeviceKind) -> tuple[Accelerator, ...]:
        """Accelerators of one kind."""
        return tuple(device for device in self.accelerators if device.kind is kind)

    def describe(self) -> str:
        """One line."""
        words = f"{self.num_cores} cores, {format_bytes(self.memory_total)} memory"
        groups: dict[tuple[str, int], int] = {}
        for device in self.accelerators:
            key = (device.name, device.total_bytes)
            groups[key] = groups.get(key, 0) + 1
        for (name, size), count in groups.items():
            words += f", {count} x {name} {format_bytes(size)}"
        return words if groups else words + ", no accelerator"


def parse_bytes(text: str) -> int:
    """Bytes of "24GiB", "24 GB", "24g" (binary) or a plain number; UsageError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size; write it like 24GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """A size for people, in binary units with three digits."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def detect() -> Hardware:
    """This machine now."""
    total, free = _memory()
    model, flags = _processor()
    return Hardware(model, usable_cores(), flags, total, free, _accelerators())


def pretend(
    base: Hardware, *, gpu_memory: int | None = None, num_gpus: int = 1, name: str = "GPU", memory: int | None = None
) -> Hardware:
    """A machine like `base` but with other accelerators or memory, all of it free."""
    accelerators = base.accelerators
    if gpu_memory is not None:
        if gpu_memory < 1 << 28 or not 1 <= num_gpus <= 64:
            raise UsageError(f"{num_gpus} GPUs of {format_bytes(gpu_memory)} is no machine to plan for")
        accelerators = tuple(Accelerator(i, DeviceKind.CUDA, name, gpu_memory, gpu_memory) for i in range(num_gpus))
    total = memory if memory is not None else base.memory_total
    free = memory if memory is not None else base.memory_free
    return Hardware(base.cpu_model, base.num_cores, base.cpu_flags, total, free, accelerators, pretended=True)


def usable_cores() -> int:
    """Cores this process may use: affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            cores = min(cores, max(1, -(-int(words[0]) // int(words[1]))))
    return max(cores, 1)


def _memory() -> tuple[int, int]:
    """(total, free) bytes: the machine's, cut to what the container's limits leave."""
    fields = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in _read(Path("/proc/meminfo")).splitlines()
        if len(line.split()) >= 2 and line.split()[1].isdigit()
    }
    if not fields:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    total = fields.get("MemTotal", 0)
    free = fields.get("MemAvailable", fields.get("MemFree", 0))
    for folder in _cgroups():
        limit = _number(folder / "memory.max", _UNLIMITED)
        if limit < _UNLIMITED:
            used = _number(folder / "memory.current", 0) - _reclaimable(folder)
            total, free = min(total, limit), min(free, max(limit - max(used, 0), 0))
    old = Path("/sys/fs/cgroup/memory")
    limit = _number(old / "memory.limit_in_bytes", _UNLIMITED)
    if limit < min(_UNLIMITED, total):
        total, free = limit, min(free, max(limit - _number(old / "memory.usage_in_bytes", 0), 0))
    return total, free


def _cgroups() -> list[Path]:
    """The process's cgroup v2 folder and its parents; a container sees its own as the root."""
    root = Path("/sys/fs/cgroup")
    own = root
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = root / line[3:].strip().lstrip("/")
    folders = [own, *own.parents]
    return [folder for folder in folders if folder == root or root in folder.parents]


def _reclaimable(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "inactive_file":
            return int(words[1])
    return 0


def _number(path: Path, default: int) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else default


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _processor() -> tuple[str, frozenset[str]]:
    model, flags = "", frozenset[str]()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not model:
            model = value.strip()
        elif key.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
        if model and flags:
            break
    return model or "unknown processor", flags


def _accelerators() -> tuple[Accelerator, ...]:
    if not torch.cuda.is_available():
        return ()
    kind = DeviceKind.ROCM if torch.version.hip else DeviceKind.CUDA
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        total = int(properties.total_memory)
        free = min(free_device_memory(index), total)
        capability = f"sm_{properties.major}{properties.minor}"
        found.append(Accelerator(index, kind, properties.name, total, free, capability))
    return tuple(found)


def free_device_memory(index: int = 0) -> int:
    """Free bytes of a CUDA device, asked of the driver's management library where it is there.

    Asking torch would open a context on the device, which takes some 600 MiB for as long as this process lives.
    """
    free = _nvml_free(index)
    return int(torch.cuda.mem_get_info(index)[0]) if free is None else free


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _nvml_free(index: int) -> int | None:
    """Free bytes by NVML, None where the library or the device is not to be had through it."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None or torch.version.hip:
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        name = f"GPU-{uuid}".encode()
        found = library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0
        read = found and library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return int(memory.free) if read else None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Copy bandwidth in bytes per second, read and written bytes both counted; median and extremes of the repeats."""

    median: float
    lowest: float
    highest: float


def copy_bandwidth(device: str = "cpu", *, num_bytes: int | None = None, repeats: int = 7) -> Bandwidth:
    """Measure a plain copy of `num_bytes` (default 1 GiB on an accelerator, 256 MiB on the CPU)."""
    target = torch.device(device)
    size = num_bytes or ((1 << 30) if target.type == "cuda" else (1 << 28))
    source = torch.ones(size, dtype=torch.uint8, device=target)
    copy = torch.empty_like(source)
    rates = []
    for repeat in range(repeats + 2):
        if target.type == "cuda":
            torch.cuda.synchronize(target)
        start = time.perf_counter()
        copy.copy_(source)
        if target.type == "cuda":
            torch.cuda.synchronize(target)
        if repeat >= 2:
            rates.append(2 * size / (time.perf_counter() - start))
    return Bandwidth(statistics.median(rates), min(rates), max(rates))
