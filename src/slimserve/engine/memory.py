"""What an engine really takes: bytes by name, measured while it is built, to be laid beside the plan."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from slimserve.engine.forward import GraphRecorder, keep_block
from slimserve.engine.loop import Engine
from slimserve.engine.request import Request, SamplingParams
from slimserve.engine.sample import SamplingRow, TokenCounts, build_batch, sample, score
from slimserve.engine.scheduler import SCORED_STEP
from slimserve.engine.speculate.contract import Holder
from slimserve.engine.speculate.model_drafter import ModelDrafter
from slimserve.hardware import free_device_memory
from slimserve.ops.held import spare_bytes
from slimserve.weights.loader import LoadedModel

_WARM_UP_SECONDS = 600.0


class MemoryProbe:
    """Reads the device's memory at moments: before anything is loaded, after the weights, after those of a drafter's
    own model where there is one, after caches.

    On CUDA, `runtime` is what this process took besides torch's own allocations: the context and loaded kernels. It is
    right while no other process takes or frees memory on the device meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index or 0
        self._free_before = free_device_memory(self._index) if device.type == "cuda" else 0
        self._marks = [self._now()]

    def again(self) -> None:
        """Forget what was built on the weights, and be ready to measure another engine on them."""
        del self._marks[2:]

    def mark(self) -> None:
        """Remember what is allocated now, and give back what loading left in the allocator."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._marks.append(self._now())

    def _now(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return int(torch.cuda.memory_allocated(self._device))
        return _resident_bytes()

    def measure(self, loaded: LoadedModel, engine: Engine, companion: LoadedModel | None = None) -> dict[str, int]:
        """Bytes by the plan's names. Call after `mark` was called after each loading and once after building."""
        assert engine.cache.storage is not None
        cache = engine.cache.storage.num_bytes
        drafter = _drafter_bytes(engine)
        if self._device.type != "cuda":
            # Weights stay in the file's mapping and untouched cache pages take nothing yet: both count in full.
            made = bool(loaded.source.identity)
            weights = {"weights": loaded.resident_bytes if made else sum(f.num_bytes for f in loaded.memory)}
            if companion is not None:
                weights["drafter.weights"] = sum(f.num_bytes for f in companion.memory)
            return {"runtime": self._marks[0], **weights, "cache": cache, **drafter}
        before, with_weights = self._marks[:2]
        if companion is not None:
            drafter["drafter.weights"] = self._marks[2] - with_weights
        forward = engine.runner.forward
        # Graphs come last, so that what they take shows apart from the memory of plain steps.
        recorder, forward.recorder = forward.recorder, None
        working = warm_up(engine, self._device)
        forward.recorder = recorder
        torch.cuda.empty_cache()
        reserved = int(torch.cuda.memory_reserved(self._device))
        free = free_device_memory(self._index)
        runtime = self._free_before - free - reserved
        forward.record_widest()
        torch.cuda.synchronize(self._device)
        # The plain steps before each recording took working memory, which is counted above.
        torch.cuda.empty_cache()
        graphs = free - free_device_memory(self._index)
        # Last, so that what recorded steps leave their results in does not lie in it.
        spare = spare_bytes(working)
        keep_block(self._device, working + spare)
        if isinstance(recorder, GraphRecorder):
            recorder.kept = working + spare
        inputs = forward.buffers.num_bytes
        return {
            "runtime": runtime,
            "weights": with_weights - before,
            "cache": cache,
            "inputs": inputs,
            "working": working,
            **drafter,
            # Everything else that is reserved: rounding of large tensors (torch counts it as theirs), free blocks.
            "allocator": reserved - (with_weights - before) - cache - inputs - sum(drafter.values()) + spare,
            "graphs": graphs,
        }


_PROMPT_SHARES = (1.0, 0.75, 0.6, 0.5, 0.375, 0.25)
"""Lengths of the prompts that are tried, as parts of the longest step: products of middling size store most sums."""


def warm_up(engine: Engine, device: torch.device) -> int:
    """Run prompts of several lengths and the widest draw; returns the peak of working memory in bytes.

    Kernels are compiled here rather than under the first request. Nothing of it stays in the prefix index.
    """
    allocated = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    longest = max(1, min(engine.config.scheduler.token_budget, engine.cache.max_request_tokens - 4))
    drawn = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=0)
    for number, share in enumerate(_PROMPT_SHARES):
        prompt = [(number + i) % engine.model.config.vocab_size for i in range(max(1, int(share * longest)))]
        sampling = drawn if number else SamplingParams(temperature=0.0)
        engine.submit(Request(f"warm-up {number}", prompt, sampling, 3, ignore_eos=True))
        end = time.monotonic() + _WARM_UP_SECONDS
        while engine.has_work and time.monotonic() < end:
            engine.step()
    engine.cache.clear_index()
    draw_widest(engine)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - allocated)


@torch.inference_mode()
def draw_widest(engine: Engine) -> None:
    """The widest plain step and a draw of all its rows in the costliest way: edited logits, top-k and top-p; the same
    beside as many scored prompt rows as a step may have; and the drafter's widest draw."""
    hidden = engine.runner.forward.compute_widest().hidden  # [R, H]
    vocab_size = engine.model.config.vocab_size
    _draw(engine.model.logits(hidden), vocab_size)
    draw_and_score(engine.model.logits(torch.cat((hidden, hidden[:1].expand(SCORED_STEP, -1)))), len(hidden))
    del hidden
    if isinstance(engine.drafter, Holder):
        drafted = engine.drafter.compute_widest(engine.config.speculation.max_draft)
        _draw(drafted, drafted.shape[1])


def draw_and_score(logits: torch.Tensor, num_drawn: int) -> None:
    """What the runner does with a step's logits [L, V]: draws from num_drawn rows, scores the others."""
    chosen = logits[list(range(num_drawn))]
    _draw(chosen, logits.shape[1])
    del chosen
    score(logits[num_drawn:], torch.zeros(len(logits) - num_drawn, dtype=torch.int64), 0)


def _draw(logits: torch.Tensor, vocab_size: int) -> None:
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, frequency_penalty=0.5, seed=0)
    rows = [SamplingRow(params, 0, 1, counts=TokenCounts([0], [0])) for _ in range(len(logits))]
    sample(logits, build_batch(rows, vocab_size))


def _drafter_bytes(engine: Engine) -> dict[str, int]:
    """What a drafter holds besides weights, by the plan's names."""
    drafter = engine.drafter
    held = {"drafter.buffers": drafter.buffer_bytes} if isinstance(drafter, Holder) else {}
    if isinstance(drafter, ModelDrafter) and drafter.cache.storage is not None:
        held["drafter.cache"] = drafter.cache.storage.num_bytes
    return held


def _resident_bytes() -> int:
    """This process's resident memory, 0 where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
