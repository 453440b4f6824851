"""Signals from inside a kernel to a stream of this GPU that rows of a product are stored.

Many programs compute a part of the product. Each counts its tiles when they are stored; the program
that completes the count raises a word, which a copy engine's stream waits for. Tiles must be stored
by ordinary stores: bulk (TMA) stores are not ordered before the word.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_tiles"]

# $0 = unused, $1 = the count, $2 = number to add, $3 = total, $4 = the word. The order is: stores
# of all threads, barrier, one thread's count at device scope (which covers the other programs'
# counts), the word at system scope. The count is 0 again when the word is visible, so that a graph
# can replay the launch. There is no branch visible to the compiler, so that it may merge loops.
_ASM = tl.constexpr("""{
    .reg .pred other;
    .reg .b32 thread, seen;
    mov.u32 $0, 0;
    setp.eq.u32 other, $2, 0;
    @other bra counted;
    bar.sync 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 other, thread, 0;
    @other bra counted;
    atom.add.acq_rel.gpu.global.u32 seen, [$1], $2;
    add.u32 seen, seen, $2;
    setp.ne.u32 other, seen, $3;
    @other bra counted;
    st.relaxed.gpu.global.u32 [$1], 0;
    st.release.sys.global.u32 [$4], 1;
counted:
}""")


@triton.jit
def count_tiles(
    count,
    stored,
    tiles,
    word,
    ON_GPU: tl.constexpr,  # noqa: N803
):
    """Count tiles of a part that this program has stored; with the last one raise the word.

    Args:
        count: pointer to int32, 0 before the first tile.
        stored: int32, number of stored tiles; 0: do nothing.
        tiles: int32, number of tiles of the part.
        word: pointer to int32.
        ON_GPU: False in the interpreter, which has no inline assembly.
    """
    if ON_GPU:
        asm: tl.constexpr = _ASM
        tl.inline_asm_elementwise(
            asm, "=&r,l,r,r,l,~{memory}", [count, stored, tiles, word],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif stored > 0:
        seen = tl.atomic_add(count, stored, sem="acq_rel", scope="gpu")
        if seen + stored == tiles:
            tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
            tl.atomic_xchg(word, 1, sem="release", scope="sys")
