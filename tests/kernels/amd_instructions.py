"""The instructions of a gated GEMM for AMD's devices, and what they must be."""

from __future__ import annotations

import re

from ficco.kernels.gated_amd import tile_of
from ficco.kernels.variants import Variant

LDS_BYTES = 64 << 10  # of a compute unit of gfx942; gfx950 has more
REGISTERS, SIMDS = 512, 4  # of a thread if its SIMD has one wavefront; of a compute unit
DTYPES = {"*bf16": "bf16", "*fp16": "f16", "*fp32": "f32"}

LOAD = r"(?:global|flat|buffer|scratch)_load_\w+ "
POLLED = r"global_load_dword .* sc0 sc1"  # past all caches
INVALIDATE, MET = "buffer_inv sc0 sc1", "s_barrier"
CLOCK, ARRIVED = "s_memrealtime ", "s_waitcnt lgkmcnt(0)"


def lines_of(text: str) -> list[str]:
    """Return the instructions and directives without comments."""
    lines = [line.split(";")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line]


def check(text: str, variant: Variant, shared: int) -> None:
    """Raise AssertionError unless a kernel acquires before it reads rows, and fits."""
    lines = lines_of(text)
    check_order(lines)
    check_clock(lines)
    check_fits(text, variant, shared)
    kinds = set(re.findall(r"v_mfma_f32_16x16x\d+_(\w+)", text))
    assert kinds == {DTYPES[variant.types[0]]}, f"matrix instructions of {kinds}"


def check_order(lines: list[str]) -> None:
    """The word is read past all caches; they drop what they hold; all meet; then rows are read."""
    acquired = [i for i, line in enumerate(lines) if line == INVALIDATE]
    assert len(acquired) == 1, "one acquire at system scope"
    loads = [i for i, line in enumerate(lines) if re.match(LOAD, line)]
    before = [bool(re.match(POLLED, lines[i])) for i in loads if i < acquired[0]]
    # A tile's part and its word; then the stop word, the word, the status (of a maximum, then by
    # itself), and the word again.
    assert before == [False, False, True, True, False, True, True], "rows are read too early"
    last = max(i for i in loads if i < acquired[0])
    assert "s_waitcnt vmcnt(0)" in lines[last : acquired[0]], "the acquire waits for its word"
    first = min(i for i in loads if i > acquired[0])
    assert MET in lines[acquired[0] : first], "all wavefronts wait for the one that acquires"
    products = [i for i, line in enumerate(lines) if line.startswith("v_mfma")]
    assert products, "no matrix instruction"
    assert first < min(products)
    assert not any(line.startswith("buffer_wbl2") for line in lines), "it releases nothing"


def check_clock(lines: list[str]) -> None:
    """Its number is used when it has arrived."""
    reads = [i for i, line in enumerate(lines) if line.startswith(CLOCK)]
    assert len(reads) == 2, "at the begin of a wait, and at each poll"
    assert all(lines[i + 1] == ARRIVED for i in reads), "the clock's number has not arrived"


def check_fits(text: str, variant: Variant, shared: int) -> None:
    """Nothing is spilled, and a compute unit runs the programs that a launch has for it."""

    def number(name: str) -> int:
        (found,) = re.findall(rf"\.{name}:? +(\d+)", text)
        return int(found)

    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert number(name) == 0, name
    assert number("group_segment_fixed_size") == 0, "all local memory is that of the launch"
    assert number("amdhsa_tg_split") == 0, "wavefronts of a program share a cache"
    item = 4 if variant.types[0] == "*fp32" else 2
    tile = tile_of(item, dict(variant.constants)["B_TURNED"], variant.aligned)
    assert (tile.warps, tile.stages) == (variant.warps, variant.stages)
    assert shared * tile.per_sm <= LDS_BYTES, "more local memory than there is"
    used = number("vgpr_count") * tile.warps * tile.per_sm
    assert used <= REGISTERS * SIMDS, "more registers than there are"
