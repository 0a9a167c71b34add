"""Machine code for Hopper, read on any machine: registers of products under way, and loads that need alignment.

A product of a warp group reads its left operand from registers while the warp goes on. Triton 3.6 keeps none of them
until the product is done: where products of one round of a loop are still under way in the next, decoded weights fell
on operands, now and then, without a test of bits noticing. So the machine code itself is read.

Words that kernels load by their own assembly are read several at a time only where a weight's rows keep them aligned.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = (
    *(f"{name}:32" for name in ("F8_E4M3", "Q8_0", "Q4_0", "NVFP4", "BF16", "Q4_K", "Q2_K")),
    *(f"{name}:64" for name in ("F8_E4M3", "Q8_0", "Q4_0", "Q4_1", "MXFP4", "NVFP4", "BF16")),
    *(f"{name}:64" for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS")),
)
"""Formats and input rows, where segments of K run in parallel."""
WHOLE = ("F8_E4M3:64", "NVFP4:512", "BF16:512", "Q6_K:64")
"""Where a program walks them all."""
ROWS, UNALIGNED_ROWS = 1024, 70
UNALIGNED = ("Q4_K:64", "Q6_K:64", "NVFP4:64")
EVERY = [*(f"{case}:{ROWS}:3" for case in CASES), *(f"{case}:{ROWS}:1" for case in WHOLE)]
WRITES_NOTHING = ("ST", "LDGSTS", "BAR", "BRA", "WARPSYNC", "ISETP", "FSETP", "PLOP3", "CCTL")


def triton_tool(name: str) -> Path | None:
    """A program that comes with Triton."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / name
    return path if path.is_file() else None


def loops_of(code: list[str]) -> list[tuple[int, int]]:
    """First and last line of the loops that hold products, innermost first."""
    labels = {line.split(":")[0].strip(): i for i, line in enumerate(code) if line.lstrip().startswith(".L")}
    found = []
    for i, line in enumerate(code):
        jump = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        begin = labels.get(jump.group(1), i) if jump else i
        if begin < i and any("GMMA" in inner for inner in code[begin:i]):
            found.append((begin, i))
    return sorted(found, key=lambda loop: loop[1] - loop[0])


def written(instruction: str) -> set[int]:
    """Registers that an instruction writes."""
    found = re.match(r"(?:@!?U?P\w+ )?([A-Z0-9_.]+) (?:U?P\w+, )*R(\d+)", instruction)
    if found is None or found.group(1).startswith(WRITES_NOTHING):
        return set()
    first, name = int(found.group(2)), found.group(1)
    pair = ".64" in name or "WIDE" in name or name.endswith(".2") or (name.startswith("CS2R") and ".32" not in name)
    count = 4 if ".128" in name or name.endswith(".4") else 2 if pair else 1
    return set(range(first, first + count))


def overwritten(code: list[str]) -> list[str]:
    """Instructions of two rounds of a loop that write a left operand of a product still under way."""
    under_way: list[set[int]] = []
    group: set[int] = set()
    found = []
    for instruction in code * 2:
        product = re.match(r"(?:@!?U?P\w+ )?[HIQ]GMMA\S* R\d+, R(\d+)", instruction)
        wait = re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", instruction)
        if "GMMA" in instruction:
            group |= set(range(int(product.group(1)), int(product.group(1)) + 4)) if product else set()
            if "gsb0" in instruction:
                under_way, group = [*under_way, group], set()
        elif wait:
            left = int(wait.group(1), 16)
            under_way = under_way[len(under_way) - left :] if left < len(under_way) else under_way
        elif any(written(instruction) & operand for operand in (*under_way, group)):
            found.append(instruction)
    return found


def instructions(listing: str) -> list[str]:
    """Labels and instructions of a listing, without addresses."""
    lines = (re.sub(r"^\s*/\*[0-9a-f]+\*/\s*", "", line).strip() for line in listing.splitlines())
    return [line for line in lines if line.startswith((".L_x", "@")) or re.match(r"[A-Z]", line)]


def test_an_operand_that_is_written_too_early_is_found() -> None:
    waits = "WARPGROUP.DEPBAR.LE gsb0, 0x"
    code = ["LOP3.LUT R56, R8, R9 ;", "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8], R24, gsb0 ;", f"{waits}1 ;"]
    assert overwritten(code) == ["LOP3.LUT R56, R8, R9 ;"]
    assert overwritten([code[0], code[1], f"{waits}0 ;"]) == []
    assert overwritten(["LDS.128 R54, [R1] ;", *code[1:]]) == ["LDS.128 R54, [R1] ;"]
    assert overwritten(["STS.128 [R56], R57 ;", *code[1:]]) == []
    assert overwritten([code[0], f"@P0 {code[1]}", code[2]]) == [code[0]]
    assert written("LDSM.16.M88.4 R4, [R1] ;") == {4, 5, 6, 7} and written("CS2R R24, SRZ ;") == {24, 25}
    assert written("SHFL.BFLY PT, R5, R6, 0x1, 0x1f ;") == written("@!P2 LOP3.LUT P0, R5, R6, R7 ;") == {5}
    assert written("ISETP.GT.AND P0, PT, R95, 0x1, PT ;") == set()
    assert loops_of([".L_x_1:", *code, "@P0 BRA `(.L_x_1) ;"]) == [(0, 4)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Machine code by case: format, input rows, weight rows and segments."""
    if triton_tool("nvdisasm") is None or triton_tool("ptxas") is None:
        pytest.skip("no Triton here that brings an assembler and a disassembler for NVIDIA GPUs")
    folder, tests = tmp_path_factory.mktemp("compiled"), Path(__file__).parent
    cases = [*EVERY, *(f"{case}:{UNALIGNED_ROWS}:1" for case in UNALIGNED)]
    path = os.pathsep.join((str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(tests / "wide_products.py"), str(folder), *cases],
        env={**kept, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {case: Path(file) for case, file in json.loads(done.stdout.splitlines()[-1]).items()}
    assert set(found) == set(cases)
    return found


@pytest.mark.parametrize("case", EVERY)
def test_no_operand_is_written_while_its_product_is_under_way(case: str, compiled: dict[str, Path]) -> None:
    disassembler = triton_tool("nvdisasm")
    assert disassembler is not None
    file = compiled[case]
    code = instructions(subprocess.run([disassembler, "-c", file], capture_output=True, text=True, check=True).stdout)
    loops = loops_of(code)
    assert loops, "no loop with products of warp groups"
    begin, end = loops[0]
    assert overwritten(code[begin:end]) == []


def test_words_are_read_several_at_a_time_only_where_they_are_aligned(compiled: dict[str, Path]) -> None:
    def vectors(case: str) -> list[str]:
        return re.findall(r"ld\.global\.nc\.v\d", compiled[case].with_suffix(".ptx").read_text())

    # Four words to a row and step are aligned for any number of rows; three and five are not.
    assert {case: bool(vectors(f"{case}:{UNALIGNED_ROWS}:1")) for case in UNALIGNED} == {
        "Q4_K:64": False, "Q6_K:64": False, "NVFP4:64": True,
    }  # fmt: skip
    assert vectors(f"Q4_K:64:{ROWS}:3") and vectors(f"NVFP4:64:{ROWS}:3")
