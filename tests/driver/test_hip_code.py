"""A kernel that Triton compiles for an MI300X, loaded and launched on the double.

The double runs a Python function in its place. What is tested is that LLVM's metadata say what the
native module reads, and that a launch passes the parameters.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile

from hip_control import Hip, on_hip_double, refusal, stand_in


def code_object() -> bytes:
    """Compile a kernel for gfx942, without a device."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        import triton
        import triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        @triton.jit
        def scale(rows, count, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
            at = tl.program_id(0) * block + tl.arange(0, block)
            inside = at < count
            tl.store(rows + at, tl.load(rows + at, mask=inside) * factor, mask=inside)

        types = {"rows": "*fp32", "count": "i32", "factor": "fp32", "block": "constexpr"}
        source = ASTSource(scale, signature=types, constexprs={"block": 64})
        compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64))
        return bytes(compiled.asm["hsaco"])


@on_hip_double(needs="triton")
def test_a_kernel_of_triton_gets_its_parameters(hip: Hip) -> None:
    import numpy as np

    from ficco import _native

    gpu = _native.open_hip(0)
    code = code_object()
    kernel = gpu.load_code(code, "scale", 0)
    assert "no kernel other" in refusal(gpu.load_code, code, "other", 0)

    factor = struct.unpack("<i", struct.pack("<f", 1.5))[0]
    # address and constants: kind, bytes, divisor, value; two pointers for memory of Triton's own
    rows = [[1, 8, 16, 0], [0, 4, 1, 1000], [0, 4, 1, factor], [0, 8, 1, 0], [0, 8, 1, 0]]
    table = np.array([[*row, *[0] * 12] for row in rows], np.int64)
    launch = (kernel, (16, 1, 1), 256, 0, False, table)
    call = _native.GpuCall(gpu, launch, 1)
    try:
        _native.GpuCall(gpu, (*launch[:5], table[:4]), 1)
    except ValueError as error:
        assert "of 8 4 4 8 bytes, and the driver says that it takes 8 4 4 8 8" in str(error)
    else:
        raise AssertionError("a launch with too few parameters is taken")

    seen: list[object] = []

    def run(addresses: list[int], shape: tuple[int, ...]) -> None:
        seen.append(ctypes.c_uint64.from_address(addresses[0]).value)
        seen.append(ctypes.c_int32.from_address(addresses[1]).value)
        seen.append(ctypes.c_float.from_address(addresses[2]).value)
        seen.append(shape)

    stand_in(kernel, [8, 4, 4, 8, 8], run)
    memory, stream = hip.memory(1000), hip.stream()
    call.run([memory], [4], stream)
    hip.hipStreamSynchronize(stream)
    assert seen == [memory, 1000, 1.5, (16, 1, 1, 256, 0)]


if __name__ == "__main__":
    globals()[sys.argv[1]](Hip())
