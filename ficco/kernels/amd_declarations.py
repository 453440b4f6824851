"""The parameters of kernels for AMD's devices; see `declarations`. No Triton."""

from __future__ import annotations

from ficco.kernels.declarations import Kernel, Parameter


def _known(kind: str, names: str) -> list[Parameter]:
    """Return parameters of one kind, which a kernel may be compiled for multiples of 16 of."""
    return [Parameter(name, kind, False) for name in names.split()]


def _unknown(kind: str, names: str) -> list[Parameter]:
    return [Parameter(name, kind, True) for name in names.split()]


GATED = Kernel(
    "ficco_gated_gemm",
    "ficco.kernels.gated_gemm_amd_kernel",
    (
        *_known("*", "own window b bias c"),
        *_known("*i32", "places"),
        *_unknown("*i32", "words stop status missed"),
        *_unknown("i32", "value own_tiles tiles"),
        *_known("i32", "k"),
        *_known("i64", "own_stride window_stride b_deep_stride b_col_stride"),
        *_unknown("i32", "has_bias"),
        *_known("i64", "c_stride"),
        *_unknown("i64", "limit"),
        *_known("=", "ROWS COLS DEEP B_TURNED COL_STEP ON_GPU"),
    ),
)

AMD_KERNELS = {kernel.name: kernel for kernel in (GATED,)}
