"""Compiles kernels of ficco.device for GPUs that need not be there, and reads their text.

python compiled_worker.py order|widths|refusals
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
import triton.language as tl
from small_kernels import all_meet, delayed_sum, push_around
from triton.compiler.errors import CompilationError

from ficco import device as fd
from ficco.errors import InputError
from ficco.private.triton_core import compile_ahead

KINDS = {"int32": "i32", "data": "*bf16", "signals": "*i32", "window": "*i64"}


def text_of(kernel: Any, constants: dict[str, int], warps: int = 4, capability: int = 90) -> str:
    """Return the PTX of a kernel whose arguments are aligned, for a capability."""
    names, signature, aligned = kernel.arg_names, {}, {}
    for place, name in enumerate(names):
        if name in constants:
            continue
        kind = KINDS.get(name) or (
            "*bf16" if name in ("source", "out", "x", "y", "box", "w") else "i32"
        )
        signature[name] = kind
        aligned[place,] = [["tt.divisibility", 16]]
    made = compile_ahead(kernel, signature, constants, aligned, capability, {"num_warps": warps})
    return str(made.asm["ptx"])


def places(pattern: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, text)]


def order() -> None:
    """Stores, a barrier of the block, the release; the acquire, a barrier, loads."""
    for capability in (80, 90, 100):
        text = text_of(push_around, {"WORLD": 4}, capability=capability)
        stores = places(r"st\.global", text)
        release, add = places(r"st\.release\.sys\.global", text), places(r"red\.release\.sys", text)
        joins, waits = places(r"barrier\.sync 0;", text), places(r"ld\.acquire\.sys\.global", text)
        ends, loads = places(r"barrier\.red\.or\.pred", text), places(r"ld\.global(?!\.b64)", text)
        assert len(release) == len(add) == 1 and len(waits) == len(ends) == 2
        put = [store for store in stores if store < release[0]]
        assert put and waits[0] < ends[0] < min(put), "elements are stored before the wait ends"
        assert any(max(put) < join < release[0] for join in joins), "a release before the stores"
        read = [load for load in loads if waits[1] < load < add[0]]
        assert read and ends[1] < min(read), "elements are read before their signal"
        assert any(max(read) < join < add[0] for join in joins), "acknowledged before it is read"
        assert not places(r"ld\.global\S*\.nc", text), "loads that pass the acquire"

    text = text_of(all_meet, {"WORLD": 8})
    (release,), (acquire,) = places(r"st\.release\.sys", text), places(r"ld\.acquire\.sys", text)
    (join,), (end,) = places(r"barrier\.sync 0;", text), places(r"barrier\.red\.or\.pred", text)
    own = places(r"st\.relaxed\.gpu", text)
    assert join < own[0] < release < acquire < end

    text = text_of(fences, {})
    (fence,), (join,) = places(r"fence\.acq_rel\.sys", text), places(r"barrier\.sync 0;", text)
    first, second = places(r"st\.global", text)
    assert first < join < fence < second


@triton.jit
def fences(data, window):
    """Store, fence, and store."""
    at = data + tl.arange(0, 1024)
    fd.store(at, tl.full((1024,), 1, data.dtype.element_ty), 1, window)
    fd.fence()
    fd.store(at, tl.full((1024,), 2, data.dtype.element_ty), 1, window)


def widths() -> None:
    """Pointers keep their alignment at other ranks: stores are of 16 bytes."""
    text = text_of(push_around, {"WORLD": 4}, warps=1)
    assert places(r"st\.global\.v4\.b32", text) and places(r"ld\.global\.v4\.b32", text)
    for warps, cols in ((4, 256), (8, 512)):
        text = text_of(delayed_sum, {"WORLD": 4, "ROWS": 4, "COLS": cols}, warps=warps)
        assert len(places(r"ld\.volatile\.global\.v4\.b32", text)) >= 4, "narrow reads of a mailbox"
        puts = len(places(r"st\.global\.v4\.b32", text))
        assert puts == 4 + 4 + 1, f"{puts} wide stores: to 4 ranks, 4 blocks made vacant, and y"
        assert not places(r"ld\.global\S*\.nc", text)


@triton.jit
def wrong_op(signals, window):
    """Use an operation that does not exist."""
    fd.signal(signals, 1, "sub", 0, window)


@triton.jit
def wrong_comparison(signals, window):
    """Use a comparison that does not exist."""
    fd.wait(signals, "==", 1, window)


def refusals() -> None:
    for kernel, constants, words in (
        (wrong_op, {}, "op is 'set' or 'add'"),
        (wrong_comparison, {}, "cmp is 'eq'"),
        (all_meet, {"WORLD": 64}, "a barrier needs a thread per rank"),
        (delayed_sum, {"WORLD": 2, "ROWS": 1, "COLS": 64}, "threads share elements"),
    ):
        try:
            text_of(kernel, constants, warps=1 if kernel is all_meet else 4)
        except CompilationError as error:
            chain: list[str] = []
            cause: BaseException | None = error
            while cause is not None:
                chain.append(str(cause))
                cause = cause.__cause__
            assert any(words in said for said in chain), chain
        else:
            raise AssertionError(f"{kernel} was compiled")
    (window,) = fd.local_windows(1, 4, torch.float32)
    try:
        window.table  # noqa: B018
    except InputError as error:
        assert "TRITON_INTERPRET=1" in str(error)
    else:
        raise AssertionError("compiled kernels get a window on the CPU")


if __name__ == "__main__":
    for subject in sys.argv[1:]:
        globals()[subject]()
        print(f"{subject}: right")
