"""Compiles kernels of ficco.device for GPUs that need not be there, and reads their text.

python compiled_worker.py order|widths|examples|following|refusals
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

import torch
import triton
import triton.language as tl
from small_kernels import all_meet, delayed_sum, push_around
from triton.compiler.errors import CompilationError

from ficco import device as fd
from ficco.core.errors import InputError
from ficco.core.private.triton_core import compile_ahead

KINDS = {"data": "*bf16", "signals": "*i32", "window": "*i64"}
KINDS |= dict.fromkeys(("source", "out", "x", "y", "box"), "*bf16")
DTYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


def text_of(kernel: Any, constants: dict[str, int], warps: int = 4, capability: int = 90) -> str:
    """Return the PTX of a kernel whose arguments are aligned, for a capability."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: KINDS.get(name, "i32") for name in names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    made = compile_ahead(kernel, signature, constants, aligned, capability, {"num_warps": warps})
    return str(made.asm["ptx"])


class Launched:
    """Stands in for a kernel: keeps the arguments of a launch, and compiles it as Triton would."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.given = kernel, dict[str, Any]()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **more: Any) -> None:
            self.given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | more

        return launch

    def compiled(self, capability: int) -> Any:
        """Compile the last launch; numbers that are 1 are constants, as in a real launch."""
        signature, constants, aligned = dict[str, str](), dict[str, Any](), dict[Any, Any]()
        for place, param in enumerate(self.kernel.params):
            value = self.given[param.name]
            if param.is_constexpr or (isinstance(value, int) and value == 1):
                constants[param.name], signature[param.name] = value, "constexpr"
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[param.name] = f"*{DTYPES[value.dtype]}" if tensor else "i32"
            if tensor or value % 16 == 0:
                aligned[place,] = [["tt.divisibility", 16]]
        options = {
            name: value
            for name, value in self.given.items()
            if name in ("num_warps", "num_stages", "launch_pdl")
        }
        return compile_ahead(self.kernel, signature, constants, aligned, capability, options)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that passes for one of a GPU."""

    is_cuda = True


def examples() -> None:
    """Launches of the examples, as on a GPU of 132 multiprocessors, compile and leave room."""
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    for capability in (80, 90):
        torch.cuda.get_device_capability = lambda device, found=capability: divmod(found, 10)
        _product(capability)
        _lookup(capability)


def _product(capability: int) -> None:
    import gemv_all_reduce

    kernel = gemv_all_reduce.gemv_all_reduce
    product = Launched(kernel)
    gemv_all_reduce.gemv_all_reduce = product
    for m, n, k, dtype in (
        (1, 4096, 4096, torch.bfloat16), (8, 16384, 8192, torch.bfloat16),
        (5, 16400, 40, torch.float32), (1, 1, 1, torch.float16),
    ):  # fmt: skip
        x, w, y = (torch.empty(*shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
        window = SimpleNamespace(tensor=y, table=torch.zeros(1, dtype=torch.int64), world=2)
        gemv_all_reduce.matmul_all_reduce(x.as_subclass(OnGpu), w, window, y)
        made = product.compiled(capability)
        chained = capability >= 90
        assert made.metadata.launch_pdl == product.given["CHAINED"] == chained, made.metadata
        assert made.metadata.shared <= 140_000, made.metadata
        text = made.asm["ptx"]
        waits = places(r"griddepcontrol\.wait", text)
        assert len(waits) == chained
        assert max(waits, default=0) < min(places(r"ld\.(volatile\.)?global|cp\.async", text))
        assert k % 16 or len(places(r"cp\.async\.cg", text)) >= 4, "w is not pipelined"
    gemv_all_reduce.gemv_all_reduce = kernel


def _lookup(capability: int) -> None:
    import embedding_all_to_all

    kernel = embedding_all_to_all.embedding_all_to_all
    lookup = Launched(kernel)
    embedding_all_to_all.embedding_all_to_all = lookup
    for count, bags, lookups, dim in ((8, 1024, 32, 128), (1, 1, 1, 1)):
        tables = torch.empty(count, 100, dim, dtype=torch.bfloat16)
        indices = torch.zeros(count, 2 * bags, lookups, dtype=torch.int64)
        window = SimpleNamespace(
            tensor=torch.empty(bags, 2, count, dim, dtype=torch.bfloat16), world=2,
            signals=torch.zeros(6, dtype=torch.int32), table=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
        embedding_all_to_all.lookup_and_exchange(tables.as_subclass(OnGpu), indices, window)
        text = lookup.compiled(capability).asm["ptx"]
        assert dim == 1 or len(places(r"ld\.global\.v4", text)) >= 4, "few loads are in flight"
    embedding_all_to_all.embedding_all_to_all = kernel


@triton.jit
def follower(out):
    """Store after the previous launch."""
    fd.after_previous_launch()
    tl.store(out, 1.0)


def following() -> None:
    """The wait for the previous launch is there from capability 9.0 on; it compiles on others."""
    for capability in (80, 89, 90, 100, 120):
        waits = places(r"griddepcontrol\.wait", text_of(follower, {}, capability=capability))
        assert len(waits) == (capability >= 90), f"{capability}: {len(waits)} waits"


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

    text = text_of(delayed_sum, {"WORLD": 2, "ROWS": 4, "COLS": 256})
    call, status = places(r"ld\.volatile\.global\.b32", text)
    same = places(r"barrier\.red\.or\.pred", text)[0]
    assert call < status < same < min(places(r"st\.global", text)), "threads have their own calls"

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
