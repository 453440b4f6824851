"""The kernels for AMD's devices: what is in the package, and their instructions."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from ficco.cli.packing import amd, building
from ficco.core.errors import EngineError
from ficco.kernels.amd_code import (
    ARCHITECTURES,
    AWAIT_ENTRY,
    COMPARE_ENTRY,
    HOLD_ENTRY,
    SHARED_BYTES,
    THREADS,
    code_of,
)

Compiled = tuple[str, str, Any]  # entry, architecture, kernel


@pytest.fixture(scope="module")
def kernels() -> list[Compiled]:
    triton = pytest.importorskip("triton")
    if triton.__version__ != building.TRITON:
        pytest.skip(f"the package's code is compiled by Triton {building.TRITON}")
    every = itertools.product(THREADS, ARCHITECTURES)
    return [(entry, arch, amd.compiled(entry, arch)) for entry, arch in every]


def lines_of(kernel: Any) -> list[str]:
    """Return the instructions and notes of a kernel's assembly."""
    lines = [line.split(";")[0].strip() for line in kernel.asm["amdgcn"].splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line]


def test_the_package_has_what_the_sources_give(kernels: list[Compiled]) -> None:
    for entry, arch, kernel in kernels:
        assert code_of(entry, arch) == kernel.asm["hsaco"], "run python -m ficco.cli.packing --amd"
        assert kernel.metadata.name == entry
        assert kernel.metadata.shared == SHARED_BYTES[entry]
        assert kernel.metadata.num_warps * kernel.metadata.warp_size == THREADS[entry]


def test_none_spills_and_each_waits_for_the_clock_that_it_reads(kernels: list[Compiled]) -> None:
    """The clock comes by the scalar path, whose counter is lgkmcnt; Triton's own waits for another.

    Nothing else keeps the next instruction from reading the register before the clock is there.
    """
    for entry, arch, kernel in kernels:
        lines = lines_of(kernel)
        assert ".vgpr_spill_count: 0" in lines
        clocks = [i for i, line in enumerate(lines) if line.startswith("s_memrealtime")]
        assert len(clocks) == (0 if entry == COMPARE_ENTRY else 2), "at the begin and in the loop"
        for clock in clocks:
            assert lines[clock + 1] == "s_waitcnt lgkmcnt(0)", f"{entry} for {arch}"


def test_waits_acquire_at_system_scope_and_keep_their_values(kernels: list[Compiled]) -> None:
    """In the loop each word is read past the caches, which then drop what they hold."""
    for entry, _, kernel in kernels:
        if entry != AWAIT_ENTRY:
            continue
        lines = lines_of(kernel)
        read = r"(global|flat)_load_dword .* sc0 sc1"
        reads = [i for i, line in enumerate(lines) if re.match(read, line)]
        assert len(reads) == 2, "of the words, and of the stop word"
        after = lines[reads[0] : reads[0] + 12]
        assert "buffer_inv sc0 sc1" in after, "the acquire"
        wait = next(i for i, line in enumerate(after) if line.startswith("s_waitcnt vmcnt(0)"))
        assert wait < after.index("buffer_inv sc0 sc1"), "after the read has ended"
        assert "buffer_wbl2 sc0 sc1" in lines, "the release of the lane's word"


def test_holding_kernels_keep_all_threads_and_comparisons_use_caches(
    kernels: list[Compiled],
) -> None:
    for entry, _, kernel in kernels:
        lines = lines_of(kernel)
        if entry == HOLD_ENTRY:
            assert "s_barrier" in lines, "all threads wait for the one that polls"
            registers = next(line for line in lines if line.startswith(".vgpr_count:"))
            assert int(registers.split()[1]) <= 64, "two blocks would not fit in a compute unit"
        if entry == COMPARE_ENTRY:
            loads = [line for line in lines if re.match(r"(global|buffer)_load_dword", line)]
            assert loads and not any("sc0" in line or "nt" in line.split() for line in loads)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(EngineError, match=r"no code for gfx90a.*gfx942 and gfx950"):
        code_of(AWAIT_ENTRY, "gfx90a")
