"""Families of operations in a step: which kernels belong to one, and which terms of the floor."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from slimserve.engine import runner
from slimserve.models.contract import CacheKind
from slimserve.ops.cpu import library
from slimserve.plan.description import Description
from slimserve.plan.floor import StepFloor

OTHER = "other"
"""Kernels of torch itself: copies, sorts, sums."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family: C++ entry points, device kernels that their module does not tell, floor terms, kinds of caches."""

    name: str
    cpu: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    caches: tuple[CacheKind, ...] = ()


PRODUCTS, HEAD, EXPERTS, SAMPLING = "matrix products", "output head", "experts", "sampling"

# attention: the sampler's own merge, one launch a step, has the same name on a device and is counted there.
FAMILIES = (
    Family(
        PRODUCTS, ("linear", "gated_mlp"), ("linear_kernel", "split_rows_kernel"), ("linear", "bias", "router")
    ),
    Family(HEAD, (), (), ("head",)),
    Family(EXPERTS, ("experts",), ("group_kernel", "combine_kernel"), ("expert",)),
    Family("embedding", ("file_rows", "panel_rows"), ("embedding_kernel",), ("embedding",)),
    Family(
        "attention",
        ("paged_attention",),
        ("_merge_kernel",),
        (),
        (CacheKind.ATTENTION, CacheKind.WINDOW),
    ),
    Family(
        "latent attention",
        ("latent_attention", "update_pools", "select_pools"),
        (),
        (),
        (CacheKind.LATENT, CacheKind.INDEXER),
    ),
    Family(
        "recurrent state",
        ("delta_rule", "convolution", "log_decay"),
        ("_decay_kernel",),
        ("conv",),
        (CacheKind.RECURRENT,),
    ),
    Family(
        "norms and gates",
        ("rms_norm", "silu_mul", "gelu_tanh_mul", "rope", "place_heads", "write_pages", "hyper_pre", "hyper_post",
         "route", "layer_norm", "gate_multiply"),
        ("_hyper_pre_kernel", "_hyper_post_kernel", "_route_kernel", "_layer_norm_kernel"),
        ("norm", "small"),
    ),
    Family(SAMPLING, (), (), ("logits",)),
)  # fmt: skip

_BY_CPU = {name: family.name for family in FAMILIES for name in family.cpu}
_BY_CUDA = {name: family.name for family in FAMILIES for name in family.cuda}
_BY_MODULE = {
    "attention": "attention",
    "delta_rule": "recurrent state",
    "gates": "norms and gates",
    "latent": "latent attention",
    "linear": PRODUCTS,
    "linear_attention": "recurrent state",
    "linear_kernel": PRODUCTS,
    "linear_rows": PRODUCTS,
    "open_rows": "recurrent state",
    "rows": "norms and gates",
    "sampling": SAMPLING,
    "sparse": "latent attention",
}
"""Families of device kernels that FAMILIES does not name, by the module of slimserve.ops.triton that holds them; a
kernel of another module counts as OTHER."""
UNTIMED = (
    *("set_threads", "threads", "isa", "set_grid", "panel_bytes", "relayout", "advise", "read"),
    "gumbel_candidates",
)
"""Entry points of the C++ library that no step calls, and the one that the sampler calls: it is timed as a whole."""

_COLUMNS = 7
"""Which argument of slim_linear is the number of outputs."""


def family_of_kernel(name: str) -> str:
    """The family of a device kernel by its name; kernels of torch are OTHER."""
    return _BY_CUDA.get(name) or _families_by_module().get(name, OTHER)


@functools.cache
def _families_by_module() -> dict[str, str]:
    found: dict[str, str] = {}
    for module, family in _BY_MODULE.items():
        name = f"slimserve.ops.triton.{module}"
        if importlib.util.find_spec("triton") is not None and importlib.util.find_spec(name) is not None:
            found |= dict.fromkeys(vars(importlib.import_module(name)), family)
    return found


def floor_of_families(floor: StepFloor, description: Description, kv_dtype: torch.dtype) -> dict[str, float]:
    """Bytes of a floor by family."""
    kinds = {spec.name: spec.kind for spec in description.caches(kv_dtype)}
    found: dict[str, float] = {}
    for term in floor.terms:
        head, _, name = term.name.partition(".")
        for family in FAMILIES:
            if (kinds.get(name) in family.caches) if head == "cache" else ((name or head) in family.weights):
                found[family.name] = found.get(family.name, 0.0) + term.num_bytes
                break
        else:
            found[OTHER] = found.get(OTHER, 0.0) + term.num_bytes
    return found


def merged(values: Mapping[str, float]) -> dict[str, float]:
    """The same with head and experts counted as matrix products: one device kernel computes all three."""
    found: dict[str, float] = {}
    for name, value in values.items():
        key = PRODUCTS if name in (HEAD, EXPERTS) else name
        found[key] = found.get(key, 0.0) + value
    return found


@dataclass(slots=True)
class KernelClock:
    """Seconds and calls of the C++ kernels and of the sampler by family, while `running`."""

    vocab_size: int
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()
        self.calls.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Every entry point is timed; weights that are prepared inside stay so."""
        loaded = library.load()
        names = [name for name in library.SIGNATURES if name.removeprefix("slim_") not in UNTIMED]
        plain = {name: getattr(loaded, name) for name in names}
        for name, function in plain.items():
            setattr(loaded, name, self._timed(name.removeprefix("slim_"), function))
        draw = runner.sample
        runner.sample = self._timed(SAMPLING, draw)
        try:
            yield
        finally:
            runner.sample = draw
            for name, function in plain.items():
                setattr(loaded, name, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        family, is_linear = _BY_CPU.get(name, name if name == SAMPLING else OTHER), name == "linear"

        @functools.wraps(function, assigned=(), updated=())
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            taken = time.perf_counter() - started
            own = HEAD if is_linear and arguments[_COLUMNS] == self.vocab_size else family
            self.seconds[own] = self.seconds.get(own, 0.0) + taken
            self.calls[own] = self.calls.get(own, 0) + 1
            return result

        return call


def order(names: Sequence[str]) -> list[str]:
    """Family names in the order of FAMILIES, OTHER last."""
    known = [family.name for family in FAMILIES]
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))
