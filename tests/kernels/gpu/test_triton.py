"""Whether the tests beside this one run at all, and how."""

import pytest


def test_kernels_are_interpreted_where_there_is_no_gpu(device: str) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel is tested")
    from pageferry.kernels.gpu import silu_mul

    assert isinstance(silu_mul._silu_mul_kernel, triton.JITFunction) == (device == "cuda")
