"""Packed weights in the panel layout of the C++ kernels (panel.h), made once at load."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from slimserve.errors import RefusalError
from slimserve.ops.cpu.library import DTYPES, load
from slimserve.ops.numerics import Activations, NumericsConfig
from slimserve.quant.tensor import PackedTensor

ROWS = 16
F8, F8_BLOCK, E2M1_G16, INT4 = 100, 101, 102, 103

_SIDE_FORMATS = {"F8_E4M3": F8, "E2M1_G16": E2M1_G16, "INT4": INT4}
_NO_KERNEL = {"Q8_1", "Q8_K", "Q1_0", "Q2_0", "I8", "I16", "I32", "I64", "F64"}


class Part(ctypes.Structure):
    """`struct Part` of panel.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_scale", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("panel_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("out_column", ctypes.c_int64),
        ("format", ctypes.c_int32),
    )


def format_code(packed: PackedTensor) -> int | None:
    """The library's number for a tensor's format, or None."""
    name = packed.format.name
    if name == "F8_E4M3":
        scale = packed.scales.get("weight_scale")
        per_row = scale is None or scale.numel() == 1 or tuple(scale.shape) == (packed.shape[0], 1)
        return F8 if per_row else F8_BLOCK
    if name in _SIDE_FORMATS:
        return _SIDE_FORMATS[name]
    return None if name in _NO_KERNEL else packed.format.type_id


def refuses(format_name: str, columns: int) -> str | None:
    """Why the library cannot multiply a weight of this format and K, or None."""
    if format_name in _NO_KERNEL:
        return f"no {format_name} kernel"
    from slimserve.quant.formats import find_format

    fmt = find_format(format_name)
    code = _SIDE_FORMATS.get(format_name, fmt.type_id if fmt is not None else None)
    if code is None:
        return f"no {format_name} kernel"
    if load().slim_panel_bytes(code, columns) < 0:
        return f"no {format_name} kernel for K = {columns}"
    return None


class _Arena:
    """Weights side by side in large blocks that the system backs with huge pages; a block lives as long as a slice."""

    BLOCK = 64 << 20

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 [rows, row_bytes], aligned to 64 bytes."""
        size = rows * row_bytes
        if size > self.BLOCK // 4:
            return _advised(size).view(rows, row_bytes)
        start = -(-self._used // 64) * 64
        if start + size > self._block.numel():
            self._block, start = _advised(self.BLOCK), 0
        self._used = start + size
        return self._block[start : start + size].view(rows, row_bytes)


def _advised(size: int) -> torch.Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    load().slim_advise(data.data_ptr(), size)
    return data


_arena = _Arena()


class PanelWeight:
    """One [N, K] matrix as the kernels read it: `part` and the tensors that it points to."""

    def __init__(self, packed: PackedTensor) -> None:
        rows, columns = packed.shape
        code = format_code(packed)
        if code is None:
            raise ValueError(f"{packed.name}: the CPU kernels have no format {packed.format.name}")
        library = load()
        panel_bytes = int(library.slim_panel_bytes(code, columns))
        if panel_bytes < 0:
            raise ValueError(f"{packed.name}: {packed.format.name} has no kernel for K = {columns}")
        self.part = Part(rows=rows, columns=columns, format=code)
        data = packed.data.contiguous()
        row_bytes = data.element_size() * data[0].numel()
        self.row_scale, self.block_scale, side = _side_scales(packed, code)
        if panel_bytes == 0:  # rows stay as in the file
            self.data = data
            panel_bytes = row_bytes * ROWS
        else:
            panels = -(-rows // ROWS)
            self.data = _arena.take(panels, panel_bytes)
            library.slim_relayout(
                code,
                data.data_ptr(),
                row_bytes,
                None if side is None else side.data_ptr(),
                0 if side is None else side.element_size() * side.shape[1],
                rows,
                columns,
                self.data.data_ptr(),
            )
        self.part.data = self.data.data_ptr()
        self.part.panel_bytes = panel_bytes
        if self.row_scale is not None:
            self.part.row_scale = self.row_scale.data_ptr()
        if self.block_scale is not None:
            self.part.block_scale = self.block_scale.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = (self.data, self.row_scale, self.block_scale)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def _side_scales(
    packed: PackedTensor, code: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(per row [N], per 128 x 128 block, stored beside the codes) of a safetensors format."""
    rows = packed.shape[0]
    scale, shared = packed.scales.get("weight_scale"), packed.scales.get("global_scale")
    row_scale = block_scale = side = None
    if code == F8 and scale is not None:
        row_scale = scale.float().reshape(-1).expand(rows).contiguous()
    elif code == F8_BLOCK and scale is not None:
        block_scale = scale.float().contiguous()
    elif code == E2M1_G16 and scale is not None:
        side = scale.view(torch.uint8).contiguous()
    elif code == INT4 and scale is not None:
        if scale.shape[1] * 128 != packed.shape[1]:
            group = packed.shape[1] // scale.shape[1]
            raise RefusalError(f"{packed.name}: int4 groups of {group} are not served on a CPU; use groups of 128.")
        side = scale.float().contiguous()
    if shared is not None:
        row_scale = shared.float().reshape(-1).expand(rows).contiguous()
    return row_scale, block_scale, side


class CpuLinear:
    """One prepared part (see `ops.weights.PreparedLinear`)."""

    def __init__(self, packed: PackedTensor, device: torch.device, numerics: NumericsConfig) -> None:
        del device
        self.weight = PanelWeight(packed)
        self.num_bytes = self.weight.num_bytes
        self.float_activations = int(numerics.cpu_activations is Activations.FLOAT)
        self._address = ctypes.addressof(self.weight.part)
        self._call = load().slim_linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See PreparedLinear."""
        rows = x.shape[0]
        self._call(
            self._address,
            1,
            x.data_ptr(),
            DTYPES[x.dtype],
            rows,
            out.data_ptr(),
            DTYPES[out.dtype],
            out.stride(0) if rows > 1 else 0,
            self.float_activations,
        )

    @classmethod
    def fuse(cls, parts: Sequence[CpuLinear], bias: torch.Tensor | None) -> FusedLinear:
        """All parts of one weight in one call: activations are prepared once, the bias is added in the kernel."""
        return FusedLinear(parts, bias)


class FusedLinear:
    """Several prepared parts that multiply the same rows."""

    MAX_PARTS = 16

    def __init__(self, parts: Sequence[CpuLinear], bias: torch.Tensor | None) -> None:
        if len(parts) > self.MAX_PARTS:
            raise ValueError(f"{len(parts)} parts in one weight; at most {self.MAX_PARTS}")
        self._parts = tuple(parts)
        self._bias = None if bias is None else bias.float().contiguous()
        self._array = (Part * len(parts))()
        column = 0
        for index, prepared in enumerate(parts):
            self._array[index] = prepared.weight.part
            part = self._array[index]
            part.out_column = column
            if self._bias is not None:
                part.bias = self._bias.data_ptr() + 4 * column
            column += part.rows
        self._out_features = column
        self._address = ctypes.addressof(self._array)
        self._count = len(parts)
        self._float = parts[0].float_activations
        self._call = load().slim_linear
        self._call_gated = load().slim_gated_mlp

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] (contiguous) times all parts, plus bias, into contiguous out [T, N]."""
        self._call(
            self._address,
            self._count,
            x.data_ptr(),
            DTYPES[x.dtype],
            x.shape[0],
            out.data_ptr(),
            DTYPES[out.dtype],
            self._out_features,
            self._float,
        )

    def gated(self, x: torch.Tensor, down: FusedLinear, kind: int, limit: float) -> torch.Tensor:
        """down(act(gate) * up) of contiguous x [T, K] in one call: see `slim_gated_mlp`."""
        out = x.new_empty(x.shape[0], down._out_features)
        code = DTYPES[x.dtype]
        self._call_gated(
            self._address,
            self._count,
            down._address,
            down._count,
            x.data_ptr(),
            code,
            x.shape[0],
            kind,
            limit,
            out.data_ptr(),
            code,
            down._out_features,
            self._float,
        )
        return out


def _expert_panels(packed: PackedTensor) -> list[PanelWeight]:
    """One panel weight per expert of packed [E, N, K]."""
    shared = {name: scale for name, scale in packed.scales.items() if scale.numel() == 1}
    weights = []
    for expert in range(packed.shape[0]):
        own = {name: scale[expert] for name, scale in packed.scales.items() if name not in shared}
        one = PackedTensor(packed.format, packed.shape[1:], packed.data[expert], packed.name, {**shared, **own})
        weights.append(PanelWeight(one))
    return weights


class CpuExperts:
    """All experts of a layer (see `ops.weights.PreparedExperts`)."""

    def __init__(
        self, gate_up: tuple[PackedTensor, ...], down: PackedTensor, device: torch.device, numerics: NumericsConfig
    ) -> None:
        del device
        self.num_experts, self.out_features, self.intermediate = down.shape
        columns = [_expert_panels(part) for part in gate_up]
        self._weights = [weight for experts in zip(*columns, strict=True) for weight in experts]
        self._down = _expert_panels(down)
        self._per_expert = len(gate_up)
        self._gate_up_array = (Part * len(self._weights))()
        for index, weight in enumerate(self._weights):
            self._gate_up_array[index] = weight.part
            if index % self._per_expert:
                self._gate_up_array[index].out_column = self.intermediate
        self._down_array = (Part * self.num_experts)(*(weight.part for weight in self._down))
        self.num_bytes = sum(weight.num_bytes for weight in (*self._weights, *self._down))
        self._float = int(numerics.cpu_activations is Activations.FLOAT)
        self._call = load().slim_experts

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, limit: float | None
    ) -> torch.Tensor:
        """See PreparedExperts."""
        rows, slots = expert_ids.shape
        ids = expert_ids.to(torch.int64).contiguous()
        out = torch.empty((rows, self.out_features), dtype=x.dtype)
        self._call(
            ctypes.addressof(self._gate_up_array),
            self._per_expert,
            ctypes.addressof(self._down_array),
            self.num_experts,
            x.data_ptr(),
            DTYPES[x.dtype],
            rows,
            slots,
            ids.data_ptr(),
            weights.data_ptr(),
            int(limit is not None),
            limit or 0.0,
            self._float,
            out.data_ptr(),
        )
        return out
