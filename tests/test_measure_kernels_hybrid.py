"""The measurement of hybrid kernels runs every case: on tiny shapes under the interpreter, or on the device."""

from __future__ import annotations

import pytest
from triton_device import triton_marks

from slimserve.measure import kernels_hybrid

pytestmark = triton_marks()


def test_every_case_runs(capsys: pytest.CaptureFixture[str]) -> None:
    kernels_hybrid.main(["--tiny"])
    printed = capsys.readouterr().out
    assert printed.count("ran") == 2 * len(kernels_hybrid.TINY_RECURRENT) * len(kernels_hybrid.TINY_STEPS)
    assert "(2, 3)  (2, 3, 32)" in printed
