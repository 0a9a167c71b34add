"""`bench kernels`: every family is timed and checked, floors count what must move, and a wrong output is found out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_device import DEVICE, ON_DEVICE, triton_marks

from slimserve import ops
from slimserve.cli import main as cli_main
from slimserve.measure import kernel_bench, kernels_sequence
from slimserve.measure.kernels import Figure
from slimserve.measure.kernels_sequence import Builder, Case, Heads, Recurrent, Sparse, Step

CPU = torch.device("cpu")
SPARSE = Sparse(3, 32, 4, 16, 3, 4, 0, 0)
RECURRENT = Recurrent(1, 2, False, 0, 16, 16)


def tiny_cases(device: torch.device) -> list[Case]:
    """Every case of the tiny geometry."""
    [geometry] = kernels_sequence.TINY
    return list(kernels_sequence.cases(geometry, kernels_sequence.FAMILIES, (1, 3), (90,), 20, torch.bfloat16, device))


def test_every_family_is_timed_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels.json"
    arguments = ["bench", "kernels", "--tiny", "--device", "cpu", "--formats", "Q4_K,BF16", "--out", str(out)]
    assert cli_main.main(arguments) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    figures = report["figures"]
    assert {figure["family"] for figure in figures} == set(kernel_bench.FAMILIES)
    assert len(figures) == 2 * 2 + len(tiny_cases(CPU)) and report["left_out"] == []
    for figure in figures:
        assert figure["microseconds"] > 0 and figure["spread"] >= 0 and figure["num_bytes"] > 0
        assert figure["share"] > 0 and figure["bound"] in ("bytes", "operations")
        assert figure["reference"].startswith("float64") and figure["agrees"]
        assert figure["error"] <= figure["allowed"] <= 2e-2
    assert report["device_type"] == "cpu" and report["matrix_operations_per_second"] > 0
    printed = capsys.readouterr().out
    assert "on cpu" in printed and "synthetic weights, random inputs" in printed
    assert f"{len(figures)} of {len(figures)} outputs agree" in printed


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("family", [pytest.param(name, marks=triton_marks()) for name in kernels_sequence.FAMILIES])
def test_triton_kernels_agree_with_float64(family: str) -> None:
    if ON_DEVICE:
        shape = kernel_bench.defaults(torch.device("cuda"), named=False, tiny=True)
        shape = replace(shape, families=(family,))
        work = kernel_bench.fixed_work(torch.device("cuda"), (), (), None, tiny=True)
        report = kernel_bench.measure_kernels(work, torch.device("cuda"), shape)
        assert all(figure["agrees"] for figure in report["figures"]) and not report["left_out"]
        return
    for case in tiny_cases(torch.device(DEVICE)):
        if case.family == family:
            error = kernel_bench.check(case, case.make())
            print(f"{case.what}, rows {case.rows}: {error:.1e}")
            assert error <= case.allowed


def spoil(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a family's operation with one that makes a small mistake."""
    attend, attend_latent, select = ops.paged_attention, ops.latent_attention, ops.select_pools
    rule, convolve = ops.gated_delta_rule, ops.causal_conv

    def latent(*given: Any, **options: Any) -> torch.Tensor:
        pools = given[3].clone()
        pools[-1, 0] = -1  # one pool of one token is forgotten
        return attend_latent(*given[:3], pools, *given[4:], **options)

    def selection(*given: Any, **options: Any) -> torch.Tensor:
        chosen = select(*given, **options)
        chosen[-1] = torch.arange(chosen.shape[1])  # the first pools instead of the best
        return chosen

    def delta_rule(*given: Any, **options: Any) -> torch.Tensor:
        state = given[5].clone()
        out = rule(*given, **options)
        given[5].copy_(state)  # the output is right, the state is not kept
        return out

    def convolution(*given: Any) -> torch.Tensor:
        out = convolve(*given)
        given[3][:, 0] = 0.0  # an input that is kept is lost
        return out

    wrong = {
        "attention": ("paged_attention", lambda *given, **options: 1.001 * attend(*given, **options)),
        "latent": ("latent_attention", latent),
        "selection": ("select_pools", selection),
        "delta-rule": ("gated_delta_rule", delta_rule),
        "convolution": ("causal_conv", convolution),
    }
    monkeypatch.setattr(ops, *wrong[family])


@pytest.mark.parametrize("family", kernels_sequence.FAMILIES)
def test_a_wrong_output_ends_the_command_with_1(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(family, monkeypatch)
    assert cli_main.main(["bench", "kernels", "--tiny", "--device", "cpu", "--families", family]) == 1
    said = capsys.readouterr()
    assert "WRONG" in said.out and "outputs are wrong, the first of " + family in said.err.splitlines()[-1]


def test_a_selection_that_is_no_list_of_pools_is_wrong() -> None:
    case = Builder(CPU, "", torch.bfloat16).selection(SPARSE, Step("", 1, 1, 89))
    before = case.make()
    right = case.call(before)
    assert case.check(before, right, before) == 0.0
    for bad in ([0, 0, 1], [2, 1, 0], [0, 1, 22], [0, 1, -1]):
        assert case.check(before, torch.tensor([bad], dtype=torch.int32), before) == float("inf")


def test_bytes_and_operations_of_cases() -> None:
    build = Builder(CPU, "", torch.float16)
    one = build.attention(Heads(4, 2, 16, 0), Step("", 3, 1, 99))
    assert one.num_bytes == 3 * (2 * 100 * 2 * 16 * 2 + 2 * 4 * 16 * 4)
    assert one.operations == 3 * 4 * 100 * 4 * 16
    windowed = build.attention(Heads(4, 2, 16, 0, 10), Step("", 1, 5, 95))
    assert windowed.num_bytes == 2 * 14 * 2 * 16 * 2 + 5 * 2 * 4 * 16 * 4
    assert windowed.operations == 4 * 50 * 4 * 16
    # 24 rows of the chunk are read and one is kept; no state is written.
    decode = build.delta_rule(RECURRENT, Step("", 2, 1, 64 + 24))
    state, of_row = 4 * 2 * 16 * 16, 4 * (16 + 2 + 2 * 16)
    token = (2 * 16 + 32) * 4 + 4 * (2 + 2) + 4 * 32
    assert decode.num_bytes == 2 * (state + 25 * of_row + token) and decode.operations == 2 * 6 * 2 * 16 * 16
    ending = build.delta_rule(RECURRENT, Step("", 1, 1, 127))
    assert ending.num_bytes == 2 * state + 63 * of_row + token
    # Of 100 tokens the three best pools of four and none of an open pool; 25 keys are scored.
    assert build.latent(SPARSE, Step("", 1, 1, 99)).num_bytes == 12 * 32 * 2 + 2 * 3 * 32 * 4
    assert build.selection(SPARSE, Step("", 1, 1, 99)).num_bytes == 25 * 16 * 2 + 4 * (16 * 4 + 4) + 4 * 3
    assert build.selection(SPARSE, Step("", 1, 1, 11)).operations == 0  # three pools are visible, all are chosen


def test_what_binds_and_its_share() -> None:
    figure = Figure("", "", 1, "served", 10.0, 0.0, 0.0, 0.0, 1e-3, num_bytes=1e4, operations=1e6, allowed=2e-3)
    moved = figure.judged(2e9, 1e12)
    assert (moved.bound, moved.share) == ("bytes", 0.5)
    computed = figure.judged(2e9, 1.25e11)
    assert (computed.bound, computed.share) == ("operations", 0.8)
    assert figure.agrees and not replace(figure, error=float("nan")).agrees


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "CPU_CASE_BYTES", 4096)
    shape = kernel_bench.KernelShape(contexts=(90,), step_rows=(1,), families=("attention",))
    work = kernel_bench.Work("x", geometries=kernels_sequence.TINY)
    report = kernel_bench.measure_kernels(work, CPU, shape)
    assert report["figures"] == [] and "more than the 4.0 KiB" in report["left_out"][0]
    assert any(line.startswith("left out: attention") for line in kernel_bench.kernel_lines(report))
