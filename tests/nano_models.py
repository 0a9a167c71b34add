"""The two trained nano checkpoints: where they lie, and needle prompts in the style that they were trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slimserve.weights.loader import LoadedModel, load_model
from slimserve.weights.source import Container, open_source
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

ROOT = Path(__file__).resolve().parents[1]
WHOLE = ROOT.parent / "shared" / "nano"
"""Checkpoints as trained, in bfloat16; not part of the repository."""
PACKAGED = ROOT / "src" / "slimserve" / "profiles" / "data"
"""What ships: nano-qwen3_5 without its vision placeholder, nano-glm5-next as a quantized GGUF file."""

QWEN, GLM = "nano-qwen3_5", "nano-glm5-next"
NAMES = ("Mira", "Kate", "Leo", "Daisy", "Julia", "Tom", "Anna", "Ben")


def whole(name: str) -> Path:
    """A checkpoint in bfloat16: as trained, or (Qwen) the package's copy of the same weights; skips without."""
    for folder in (WHOLE / name, PACKAGED / name):
        if (folder / "config.json").exists():
            return folder
    pytest.skip(f"{name} in bfloat16 is not here (looked in {WHOLE} and the package's data)")


def packaged(name: str) -> Path:
    """What the package ships: a GGUF file or a folder; skips without."""
    path = PACKAGED / name / (f"{name}.gguf" if name == GLM else "")
    if not path.exists():
        pytest.skip(f"the package's data holds no {name}")
    return path


def any_form(name: str) -> Path:
    """The checkpoint in whatever form is here: for tests that compare the engine with itself."""
    if (WHOLE / name / "config.json").exists():
        return WHOLE / name
    return packaged(name)


def on_devices(names: Iterable[str]) -> list[Any]:
    """Parameters (name, device) for a fixture: each checkpoint on the CPU and, marked gpu, on a CUDA device."""
    pairs = [(name, device) for device in ("cpu", "cuda") for name in names]
    return [
        pytest.param(pair, id="-".join(pair), marks=[pytest.mark.gpu] if pair[1] == "cuda" else []) for pair in pairs
    ]  # `mark.gpu` makes files with these parameters part of `make gpu-test`


def load_on(name: str, device: str) -> LoadedModel:
    """A checkpoint on a device in whatever form is here; skips without the device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return load_model(any_form(name), device=device)


def reference(name: str) -> list[dict[str, Any]]:
    """The recorded prompts: prompt_ids, greedy_ids and top5_logprobs of transformers in float32; skips without."""
    for folder in (WHOLE, PACKAGED):
        path = folder / name / "reference.json"
        if path.exists():
            prompts: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["prompts"]
            return prompts
    pytest.skip(f"{name}/reference.json is not here")


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file."""
    source = open_source(path)
    if source.container is Container.GGUF:
        return tokenizer_from_gguf(source.metadata)
    return tokenizer_from_folder(source.folder)


@cache
def documentation() -> str:
    """English text of the kind that half of the training text was: the help topics that come with Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


@dataclass(frozen=True)
class Needle:
    """A prompt of exactly so many tokens in which one sentence holds the answer."""

    prompt: list[int]
    code: str
    depth: float


def needle(tokenizer: Tokenizer, filler: list[int], length: int, seed: int) -> Needle:
    """A chat prompt whose filler hides "The secret code of NAME is CODE."; place, name and code by `seed`."""
    rng = random.Random(1000 * seed + length)
    name, code = rng.choice(NAMES), str(rng.randrange(10_000, 100_000))
    head = tokenizer.encode("[gMASK]<sop><|user|>\n", parse_special=True)
    planted = tokenizer.encode(f" The secret code of {name} is {code}.")
    question = f"\n\nWhat is the secret code of {name}?<|assistant|>\n<think></think>"
    tail = tokenizer.encode(question, parse_special=True)
    room = length - len(head) - len(planted) - len(tail)
    start, cut = rng.randrange(len(filler) - room), rng.randrange(room + 1)
    text = filler[start : start + room]
    return Needle([*head, *text[:cut], *planted, *text[cut:], *tail], code, cut / room)


def is_reference(loaded: LoadedModel) -> bool:
    """Whether the C++ kernels are missing here, so that long prompts would take minutes."""
    return any("reference" in kernel for kernel in loaded.kernels.values())
