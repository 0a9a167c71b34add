"""`slimserve show --kernels` tells what loading chooses, and the README names options that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nano_models
import pytest

from slimserve.ops.resolver import Op
from slimserve.profiles.kernels import kernel_lines, kernel_uses
from slimserve.profiles.resolve import resolve
from slimserve.weights.loader import load_model

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.parametrize("name", [nano_models.QWEN, nano_models.GLM])
def test_what_is_shown_is_what_loading_chooses(name: str) -> None:
    profile = resolve(name, device="cpu")
    loaded = load_model(nano_models.packaged(name), numerics=profile.planned_config().numerics)
    multiplying = {op.value for op in (Op.LINEAR, Op.EXPERTS, Op.HEAD_LINEAR)}
    products = [use for use in kernel_uses(profile) if use.operation in multiplying]
    assert {use.kernel for use in products} == set(loaded.kernels.values())
    # Every matrix is counted once; embeddings are rows, not products, on a CPU.
    matrices = [weight for weight in profile.description.weights if weight.shape and weight.family != "embedding"]
    assert sum(use.count for use in products) == len(matrices)
    assert sum(use.num_bytes for use in products) == sum(weight.num_bytes for weight in matrices)
    assert all(use.why for use in products)


def test_operations_on_caches_are_those_of_the_model() -> None:
    glm = {use.operation for use in kernel_uses(resolve(nano_models.GLM, device="cpu"))}
    dense = {use.operation for use in kernel_uses(resolve("smollm2-135m", device="cpu"))}
    assert {"latent_attention", "select_pools", "gated_delta_rule"} <= glm and "paged_attention" not in glm
    assert "paged_attention" in dense and "latent_attention" not in dense


def test_a_record_of_sizes_alone_says_so() -> None:
    lines = kernel_lines(resolve("dsv4-1", device="cpu"))
    assert "kernels are known once a file is named" in lines[-1]


def slimserve(*arguments: str) -> str:
    command = [sys.executable, "-m", "slimserve.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_on_the_command_line() -> None:
    shown = slimserve("show", "smollm2-135m", "--kernels", "--device", "cpu")
    assert re.search(r"linear +linear Q4_1 +\S.* tensors, [\d,.]+ MiB", shown)
    body = json.loads(slimserve("show", "smollm2-135m", "--kernels", "--json", "--device", "cpu"))
    assert {"operation", "kernel", "why", "format"} <= set(body["kernels"][0])


def test_options_that_the_readme_names_exist() -> None:
    """Options beside verbs in the README's table are options of those verbs."""
    asked: dict[str, set[str]] = {}
    for line in README.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        for code in re.findall(r"`([^`]+)`", line.split("|")[1]):
            options = set(re.findall(r"--[a-z][a-z-]*", code))
            verb = code.split()[0]
            if options and verb.isalpha():
                asked.setdefault(verb, set()).update(options)
    assert "--kernels" in asked["show"]
    for verb, options in asked.items():
        text = slimserve(*(["bench", "step"] if verb == "bench" else [verb]), "--help")
        missing = {option for option in options if option not in text}
        assert not missing, f"{verb} has no {missing}"
