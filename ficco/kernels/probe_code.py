"""The kernels by which devices are probed: PTX for NVIDIA's, code objects for AMD's.

ficco_hold             occupies thread slots until the host says so, or for a time
ficco_compare_words    counts the words of a range that differ from a value
ficco_one              stores a word; it needs one thread
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.kernels import amd_code

# ficco_hold: thread 0 of a block reports that the block runs, then waits for the host's word or the
# time limit; the other threads wait for thread 0 at the barrier, and keep their slots.
#
# ficco_compare_words: each block reads all words, by loads that caches may serve. `value` is in the
# lower half of its parameter. The counts of threads are added to the word `wrong`.
PTX = """.version 7.0
.target sm_80
.address_size 64

.visible .entry ficco_hold(.param .u64 begun, .param .u64 go, .param .u64 limit_ns)
{
    .reg .pred %p<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<9>;

    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra REST;
    ld.param.u64 %rd1, [begun];
    ld.param.u64 %rd2, [go];
    ld.param.u64 %rd3, [limit_ns];
    mov.u64 %rd4, %globaltimer;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd5, %r2, 4;
    add.u64 %rd6, %rd1, %rd5;
    mov.u32 %r3, 1;
    st.volatile.global.u32 [%rd6], %r3;
POLL:
    ld.volatile.global.u32 %r3, [%rd2];
    setp.ne.u32 %p2, %r3, 0;
    @%p2 bra REST;
    mov.u64 %rd7, %globaltimer;
    sub.u64 %rd8, %rd7, %rd4;
    setp.gt.u64 %p3, %rd8, %rd3;
    @%p3 bra REST;
    nanosleep.u32 1000;
    bra POLL;
REST:
    bar.sync 0;
    ret;
}

.visible .entry ficco_compare_words(.param .u64 data, .param .u64 count, .param .u64 value, .param .u64 wrong)
{
    .reg .pred %p<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [count];
    ld.param.u32 %r1, [value];
    ld.param.u64 %rd3, [wrong];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ntid.x;
    cvt.u64.u32 %rd4, %r2;
    cvt.u64.u32 %rd5, %r3;
    mov.u32 %r4, 0;
NEXT:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra DONE;
    shl.b64 %rd6, %rd4, 2;
    add.u64 %rd7, %rd1, %rd6;
    ld.global.u32 %r5, [%rd7];
    setp.ne.u32 %p2, %r5, %r1;
    @%p2 add.u32 %r4, %r4, 1;
    add.u64 %rd4, %rd4, %rd5;
    bra NEXT;
DONE:
    setp.eq.u32 %p3, %r4, 0;
    @%p3 bra LAST;
    red.relaxed.sys.global.add.u32 [%rd3], %r4;
LAST:
    ret;
}

.visible .entry ficco_one(.param .u64 word)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;

    ld.param.u64 %rd1, [word];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""  # noqa: E501 - an entry's parameters are one line

_HOLD_THREADS = 512  # of a block; a divisor of the thread slots of every multiprocessor
_COMPARE_THREADS = 256


class KernelCode(NamedTuple):
    """A kernel's code.

    Attributes:
        image: a cubin, PTX, or a code object.
        entry: name of the kernel.
        shared_bytes: dynamic shared memory of a launch.
        threads: of a block.
    """

    image: bytes
    entry: str
    shared_bytes: int
    threads: int


class ProbeCode(NamedTuple):
    """The kernels of a device's probes."""

    hold: KernelCode
    compare: KernelCode


def cuda_probe_code() -> ProbeCode:
    """Return the kernels for NVIDIA's devices of compute capability 8.0 or higher."""
    image = PTX.encode()
    return ProbeCode(
        KernelCode(image, "ficco_hold", 0, _HOLD_THREADS),
        KernelCode(image, "ficco_compare_words", 0, _COMPARE_THREADS),
    )


def one_code() -> KernelCode:
    """Return the kernel of one thread for NVIDIA's devices."""
    return KernelCode(PTX.encode(), "ficco_one", 0, 1)


def amd_probe_code(arch: str) -> ProbeCode:
    """Return the kernels for an architecture of AMD, such as "gfx942".

    Raises:
        EngineError: the package has none for it.
    """
    return ProbeCode(
        *[
            KernelCode(
                amd_code.code_of(entry, arch), entry, amd_code.SHARED_BYTES[entry],
                amd_code.THREADS[entry],
            )
            for entry in (amd_code.HOLD_ENTRY, amd_code.COMPARE_ENTRY)
        ]
    )  # fmt: skip
