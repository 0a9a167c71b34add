"""The Triton paged attention against float64 and against itself for every cut of a prompt."""

from __future__ import annotations

import pytest
import torch
from test_ops_reference import Pages
from triton_device import DEVICE, ON_DEVICE, triton_marks

pytestmark = triton_marks()
if not any(mark.name == "skip" for mark in pytestmark):
    from slimserve.ops.triton import attention

ROWS = [(0, 1), (0, 70), (63, 1), (64, 3), (600, 2)]


def on_device(pages: Pages) -> Pages:
    for name in ("k", "v", "table", "offsets", "starts"):
        setattr(pages, name, getattr(pages, name).to(DEVICE))
    return pages


@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_matches_float64(dtype: torch.dtype, softcap: float | None, window: int | None) -> None:
    torch.manual_seed(1)
    pages = Pages(ROWS, dtype, kv_heads=2, dim=24)
    q = torch.randn(int(pages.offsets[-1]), 6, 24)
    q = q if dtype == torch.float32 else q.bfloat16()
    expected = pages.expected(q, 0.2, window, softcap)
    got = on_device(pages).call(attention.paged_attention, q.to(DEVICE), scale=0.2, window=window, softcap=softcap)
    assert got.dtype == q.dtype
    error = (got.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


CUTS = (1, 5, 16, 64, 200) if ON_DEVICE else (3, 130)
SHAPES = [(8, 2, 128), (14, 2, 64), (24, 4, 256), (4, 1, 256)] if ON_DEVICE else [(3, 1, 16)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn] if ON_DEVICE else [torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_a_token_does_not_depend_on_the_cut_or_on_other_rows(
    q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    length = 2100 if ON_DEVICE else 260
    monkeypatch.setattr(attention, "SEGMENT_PAGES", attention.SEGMENT_PAGES if ON_DEVICE else 2)
    pages = on_device(Pages([(0, length)], dtype, kv_heads=kv_heads, dim=dim))
    q = torch.randn(length, q_heads, dim, device=DEVICE).bfloat16()
    options = {"scale": dim**-0.5, "window": window, "softcap": None}
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 0)  # segments in registers
    together = pages.call(attention.paged_attention, q, **options)
    assert torch.isfinite(together.float()).all()
    for processors in (0, 1 << 20):  # in registers; spread over programs and merged by a second kernel
        monkeypatch.setattr(attention, "multiprocessors", lambda device, n=processors: n)
        for cut in CUTS:
            starts = list(range(0, length, cut))[-3:]
            for start in starts:
                count = min(cut, length - start)
                pages.rows, pages.starts = [(start, count)], torch.tensor([start], dtype=torch.int32, device=DEVICE)
                pages.offsets = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
                part = pages.call(attention.paged_attention, q[start : start + count], **options)
                assert torch.equal(part, together[start : start + count]), (processors, cut, start)


def test_rows_side_by_side_equal_rows_alone() -> None:
    torch.manual_seed(3)
    pages = on_device(Pages(ROWS, torch.bfloat16, kv_heads=2, dim=32))
    q = torch.randn(int(pages.offsets[-1]), 4, 32, device=DEVICE).bfloat16()
    options = {"scale": 0.2, "window": None, "softcap": None}
    together = pages.call(attention.paged_attention, q, **options)
    offsets, starts, table, rows = pages.offsets, pages.starts, pages.table, pages.rows
    for r in range(len(ROWS)):
        begin, end = int(offsets[r]), int(offsets[r + 1])
        pages.rows, pages.starts, pages.table = [rows[r]], starts[r : r + 1], table[r : r + 1]
        pages.offsets = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
        assert torch.equal(pages.call(attention.paged_attention, q[begin:end], **options), together[begin:end])
