"""Pairs sorted by expert: the small kernel against a plain sort, and what it is compiled to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_device import DEVICE, triton_marks

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import experts as routed

COMPILE = """
import json, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slimserve.ops.triton.linear_rows import group_kernel

launches, cubin = json.loads(sys.argv[1]), sys.argv[2]
stacks = []
for constants, options in launches:
    names = {name: "constexpr" if name in constants else "i32" for name in group_kernel.arg_names}
    names |= {name: "*i32" for name in names if name.endswith("_ptr")} | {"ids_ptr": "*i64"}
    kernel = triton.compile(
        ASTSource(group_kernel, names, constants), target=GPUTarget("cuda", 90, 32), options=options
    )
    with open(cubin, "wb") as file:
        file.write(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stacks += [int(found) for found in re.findall(r"STACK:([0-9]+)", usage)]
print(json.dumps(stacks))
"""
"""Compiles launches of the sorting kernel for sm_90, which needs no device, and prints their bytes of stack."""


def cut_in_tiles(ids: list[int], columns: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Places of ids in sorted order, and (expert, first, count) of each tile."""
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    tiles: list[tuple[int, int, int]] = []
    for place, pair in enumerate(order):
        expert, first, count = tiles[-1] if tiles else (-1, 0, 0)
        if expert == ids[pair] and count < columns:
            tiles[-1] = (expert, first, count + 1)
        else:
            tiles.append((ids[pair], place, 1))
    return order, tiles


@pytest.mark.parametrize("columns", [4, 8, 16, 32])
@pytest.mark.parametrize(
    "pairs", [1, 2, 15, 16, 17, 31, 33, 64, 65, 72, 96, 97, 127, 128, 129, 160, 161, 192, 224, 225, 255, 256]
)
def test_a_grouping_is_a_stable_sort_cut_in_tiles(pairs: int, columns: int) -> None:
    chance = random.Random(1000 * pairs + columns)
    assert pairs <= routed.GROUP_PAIRS
    for num_experts, drawn in ((1, 1), (288, 288), (chance.randint(2, 12), 12), (chance.randint(13, 288), 3)):
        pool = chance.sample(range(num_experts), min(drawn, num_experts))
        ids = chance.choices(pool, k=pairs)
        order, tiles = cut_in_tiles(ids, columns)
        found = routed.group_rows(torch.tensor(ids, device=DEVICE)[:, None], num_experts, columns, 1)
        assert found.row_ids.tolist() == order
        spare = found.tile_count.shape[0] - len(tiles)
        assert spare >= 0 and found.tile_count.tolist() == [count for _, _, count in tiles] + [0] * spare
        assert found.tile_group[: len(tiles)].tolist() == [expert for expert, _, _ in tiles]
        assert found.tile_first[: len(tiles)].tolist() == [first for _, first, _ in tiles]


def test_sorting_needs_no_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver would keep a stack for every thread that a device can hold: half a GiB for the sake of one program."""
    launches: list[tuple[dict[str, Any], dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
            return self

        def __call__(self, *arguments: Any, **named: Any) -> None:
            launches.append(
                (
                    {name: value for name, value in named.items() if name.isupper()},
                    {name: value for name, value in named.items() if not name.isupper()},
                )
            )

    monkeypatch.setattr(routed, "group_kernel", Kernel())
    for pairs in (16, 32, 64, 128, 256):
        routed.group_rows(torch.zeros((pairs, 1), dtype=torch.int64, device=DEVICE), 288, 8, 1)
    assert [constants["PAIRS"] for constants, _ in launches] == [16, 32, 64, 128, 256]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", COMPILE, json.dumps(launches), str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0] * len(launches)
