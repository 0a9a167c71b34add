"""A GPU that is not there: the engine's own code on fake CUDA tensors, and torch's caching allocator on what it asks.

Kernels are not run; everything around them is, so every tensor that the code would allocate is seen, with its size
and its life. `plan.allocator` deals them out as torch's CUDA caching allocator does, so that allocated and reserved
bytes are what a device would report.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._C import _DisableTorchDispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimserve.plan.allocator import Allocator

MIB = 1 << 20


class Watch(TorchDispatchMode):
    """Sees every storage that appears on devices of a kind ("cuda": the fake one), and when it goes."""

    def __init__(self, allocator: Allocator, kind: str = "cuda") -> None:
        super().__init__()
        self.allocator = allocator
        self._kind = kind
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._kind:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return
        block = self.allocator.allocate(storage.nbytes())

        def gone(_: Any) -> None:
            self._seen.pop(key, None)
            if block is not None:
                self.allocator.release(block)

        self._seen[key] = weakref.ref(storage, gone)


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index] by plain operations: the built-in form wants a device of that kind."""
    steps = list(index) if isinstance(index, tuple) else [index]
    if any(step is Ellipsis for step in steps):
        at = next(i for i, step in enumerate(steps) if step is Ellipsis)
        taken = sum(1 for step in steps if step is not None) - 1
        steps[at : at + 1] = [slice(None)] * (tensor.dim() - taken)
    if any(isinstance(step, list) for step in steps):
        steps = [torch.tensor(step) if isinstance(step, list) else step for step in steps]
    indexed: list[Any] = []
    dim = 0
    for step in steps:
        if step is None:
            tensor = torch.ops.aten.unsqueeze(tensor, dim)
            indexed.append(None)
            dim += 1
        elif isinstance(step, torch.Tensor):
            indexed.append(step)
            dim += 1
        elif isinstance(step, slice):
            start, stop, stride = step.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice(tensor, dim, start, max(start, stop), stride)
            indexed.append(None)
            dim += 1
        else:
            tensor = torch.ops.aten.select(tensor, dim, int(step))
    if any(entry is not None for entry in indexed):
        return torch.ops.aten.index(tensor, indexed)
    return tensor


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    return torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    steps = index if isinstance(index, tuple) else (index,)
    if any(isinstance(step, torch.Tensor) for step in steps):
        return  # writes in place: nothing is allocated that stays
    target = _item(tensor, index)
    torch.ops.aten.copy_(target, value) if isinstance(value, torch.Tensor) else target.fill_(value)


@contextmanager
def fake_cuda(allocator: Allocator) -> Iterator[None]:
    """Inside, "cuda:0" is an H200 on which nothing is computed."""
    from triton.runtime import interpreter, jit

    from slimserve.engine import inputs
    from slimserve.ops.triton import experts, heads, launch, linear
    from slimserve.quant import synthetic
    from slimserve.quant.synthetic import RandomBits
    from slimserve.quant.tensor import PackedTensor
    from slimserve.weights import loader

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="fake", total_memory=141 << 30)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with unset_fake_temporarily(), _DisableTorchDispatch():
            return torch.zeros(shape, dtype=dtype)

    def buffer(self: Any, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host, self._device = host, device
        self.array = zeros(tuple(host.shape), host.dtype, device.device).numpy()

    def grouped(fmt: Any, shape: tuple[int, ...], _: float, bits: RandomBits, name: str) -> PackedTensor:
        """NVFP4 whose one scale is empty: the real one asks for values."""
        data = torch.empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=bits.device)
        bits.fill_bytes(data)
        codes = torch.empty((*shape[:-1], shape[-1] // 16), dtype=torch.uint8, device=bits.device)
        scale = (bits.fill_bytes(codes) % 24 + 0x30).view(torch.float8_e4m3fn)
        every = torch.empty(1, device=bits.device)
        return PackedTensor(fmt, shape, data, name, {"weight_scale": scale, "global_scale": every})

    def no_launch(*_: Any, **__: Any) -> Any:
        return lambda *args, **kwargs: None

    launch.multiprocessors.cache_clear()
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "mem_get_info", lambda device=None: (141 << 30, 141 << 30)),
            (torch.cuda, "empty_cache", allocator.empty_cache),
            (linear, "warp_groups_agree", lambda device: True),
            (experts, "warp_groups_agree", lambda device: True),
            (heads, "warp_groups_agree", lambda device: True),
            (inputs, "_zeros", zeros),
            (inputs._Buffer, "__init__", buffer),
            (synthetic, "_unit_spread", lambda name: 1.0),
            (synthetic, "_random_grouped", grouped),
            (loader, "_check_finite", lambda tensor: None),
            (FakeTensor, "contiguous", _contiguous),
            (FakeTensor, "copy_", lambda self, source, non_blocking=False: self),
            (FakeTensor, "__getitem__", _item),
            (FakeTensor, "__setitem__", _set_item),
            (jit.JITFunction, "__getitem__", no_launch),
            (interpreter.InterpretedFunction, "__getitem__", no_launch),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Watch(allocator))
        stack.enter_context(torch.no_grad())
        yield
    launch.multiprocessors.cache_clear()
