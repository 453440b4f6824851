"""Runs the gated GEMM on small shapes and holds it against float64, or reads what it compiles to.

TRITON_INTERPRET=1 python gated_worker.py products|giving_up|late|refusals|warming|release ...
python gated_worker.py assembly
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

import compiling
import torch
from enqueuing import gated_matmul, warm_gated
from interpreting import run_named
from triton.runtime import interpreter

from ficco.core.errors import InputError
from ficco.kernels import gated
from ficco.kernels.gated import Gate, Matrices, prepare
from ficco.kernels.variants import Variant, variant_of
from ficco.kernels.window_release import release_table
from ficco.plan.tables import GatedPart, WindowRelease
from ficco.program.tiling import TILES, Tile

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
SMALL = Tile(16, 32, 16, 4, 1, 2, 1, 1.0)  # so that small parts have several groups of tiles
AGES = 10**15  # ns


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Pad = tuple[int, int]  # elements before and behind every row that are not a matrix's own
ALIGNED, ODD_PITCH, ODD_BASE = ((0, 0), (0, 8)), (0, 3), (1, 7)


def matrix(rows: int, cols: int, dtype: torch.dtype, pad: Pad) -> torch.Tensor:
    """Return random numbers, and NaN around them."""
    before, behind = pad
    whole = torch.full((rows, before + cols + behind), torch.nan, dtype=dtype)
    inner = whole[:, before : before + cols]
    return inner.copy_(torch.randn(rows, cols))


def operand(k: int, n: int, dtype: torch.dtype, pad: Pad, layout: str) -> torch.Tensor:
    """Return b [k, n]: columns or depth contiguous, or neither."""
    if layout == "deep":
        return matrix(n, k, dtype, pad).t()
    if layout == "cols":
        return matrix(k, n, dtype, pad)
    return matrix(k, 2 * n, dtype, pad)[:, ::2]


class Case:
    """A product in parts. Rows of the window that no part has come for are NaN, and so is c."""

    def __init__(
        self, parts: list[GatedPart], n: int, k: int, dtype: torch.dtype, pad: Pad = (0, 0),
        layout: str = "deep", bias: bool = False, tile: Tile = SMALL,
    ) -> None:  # fmt: skip
        self.parts, self.n = parts, n
        self.own = matrix(max(p.a_row + p.rows for p in parts), k, dtype, pad)
        self.window = matrix(max(p.a_row + p.rows for p in parts) + 3, k, dtype, pad)
        self.rows_of_window = self.window.clone()
        self.window.fill_(torch.nan)
        self.b = operand(k, n, dtype, pad, layout)
        self.bias = matrix(1, n, dtype, (0, 0)) if bias else None
        self.rows = max(p.c_row + p.rows for p in parts)
        self.whole = torch.full((self.rows + 2, n + 16), torch.nan, dtype=dtype)
        self.table = prepare(parts, n, k, dtype, CPU, tile)
        self.words = words(*[0] * 16)
        self.stop, self.status = words(0), words(0)

    def arrive(self, part: GatedPart) -> None:
        """Let the rows of a part come, and then its word."""
        rows = slice(part.a_row, part.a_row + part.rows)
        self.window[rows] = self.rows_of_window[rows]
        if part.word >= 0:
            self.words[part.word] = 1

    def arguments(self, value: int = 1) -> tuple[gated.Table, Matrices, Gate]:
        c = self.whole[: self.rows, : self.n]
        return (
            self.table, Matrices(self.own, self.window, self.b, self.bias, c),
            Gate(self.words, self.stop, self.status, AGES, value),
        )  # fmt: skip

    def wanted(self) -> torch.Tensor:
        """Return all of c in float64, NaN where no part writes."""
        want = torch.full(self.whole.shape, torch.nan, dtype=torch.float64)
        for part in self.parts:
            a = self.own if part.source == "own" else self.rows_of_window
            rows = a[part.a_row : part.a_row + part.rows].double() @ self.b.double()
            rows = rows if self.bias is None else rows + self.bias.double()
            want[part.c_row : part.c_row + part.rows, : self.n] = rows
        return want

    def hold(self, about: str, want: torch.Tensor | None = None) -> None:
        """Hold c within one rounding of its dtype and a float32 sum, and NaN where that is."""
        want = self.wanted() if want is None else want
        found = self.whole.double()
        assert torch.equal(found.isnan(), want.isnan()), f"{about}: NaN at other places"
        bound = torch.finfo(self.whole.dtype).eps * want.abs() + 1e-5 * self.b.shape[0] ** 0.5
        wrong = (found - want).abs() > bound
        assert not wrong.any(), f"{about}: wrong at {wrong.nonzero()[0].tolist()}"


def shapes() -> Iterator[tuple[str, list[GatedPart], int, int]]:
    """Yield parts, n and k."""
    yield "one own part", [GatedPart("own", 0, 0, 37)], 40, 48
    yield "one part of the window", [GatedPart("window", 0, 0, 5, 0)], 1, 1
    yield "less than a tile", [GatedPart("own", 1, 2, 3), GatedPart("window", 0, 0, 2, 4)], 7, 5
    yield (
        "ragged, several, out of the order of rows",
        [GatedPart("window", 50, 70, 33, 3), GatedPart("own", 0, 33, 20), GatedPart("own", 2, 9, 1),
         GatedPart("window", 0, 103, 17, 1), GatedPart("window", 90, 54, 16, 2)],
        37, 33,
    )  # fmt: skip
    yield (
        "empty parts, and one that waits for nothing",
        [GatedPart("own", 0, 0, 0), GatedPart("window", 4, 12, 9, 7),
         GatedPart("window", 0, 0, 0, 3), GatedPart("window", 40, 30, 18)],
        33, 64,
    )  # fmt: skip
    yield "no depth", [GatedPart("own", 0, 0, 4), GatedPart("window", 0, 4, 3, 0)], 5, 0


def products() -> None:
    paths = set()
    # Cycles of other lengths than that of what they go beside: every pair occurs, not every three.
    biases = cycle((False, True, True, False, True))
    layouts = cycle(("deep", "cols", "neither"))
    pads = (*ALIGNED, ODD_PITCH, ODD_BASE)
    for (dtype, pad), layout in zip(product(DTYPES, pads), layouts, strict=False):
        for name, parts, n, k in shapes():
            bias = next(biases)
            case = Case(parts, n, k, dtype, pad, layout, bias)
            for part in parts:
                case.arrive(part)
            gated_matmul(*case.arguments())
            case.hold(f"{name}, {n=} {k=}, {dtype} {pad=} {layout} {bias=}")
            assert not case.status.item()
            chosen = gated.arguments_of(*case.arguments())
            paths |= {(flag, chosen[flag]) for flag in ("OWN_BULK", "WINDOW_BULK", "B_BULK")}
    assert len(paths) == 6, f"{paths}: bulk loads and others, of every operand"
    for dtype in DTYPES:  # as they are shipped
        parts = [GatedPart("own", 0, 150, 129), GatedPart("window", 0, 0, 150, 0)]
        for tile in TILES[dtype.itemsize]:
            case = Case(parts, 300, 70, dtype, (0, 10), tile=tile)
            case.arrive(parts[1])
            gated_matmul(*case.arguments())
            case.hold(f"{dtype} {tile}")


PARTS = [GatedPart("own", 0, 0, 20), GatedPart("window", 0, 20, 33, 5),
         GatedPart("window", 33, 53, 17, 6), GatedPart("window", 60, 70, 9, 2)]  # fmt: skip


def giving_up() -> None:
    for missing in ((2,), (1, 3), (1, 2, 3)):
        case = Case(PARTS, 50, 40, torch.bfloat16, bias=True)
        case.stop[0] = 1
        want = case.wanted()
        for number, part in enumerate(PARTS):
            if number in missing:
                want[part.c_row : part.c_row + part.rows] = torch.nan
            else:
                case.arrive(part)
        gated_matmul(*case.arguments())
        case.hold(f"without {missing}", want)
        assert case.status.item() == max(missing) + 1
    case.arrive(PARTS[1])
    gated_matmul(*case.arguments())
    assert case.status.item() == 4, "the status was lowered"

    case = Case(PARTS, 50, 40, torch.float32)  # words have come, but not with this call's value
    case.stop[0] = 1
    want = case.wanted()
    want[20:] = torch.nan
    for part in PARTS:
        case.arrive(part)
    gated_matmul(*case.arguments(value=7))
    case.hold("another value", want)
    assert case.status.item() == 4


def late() -> None:
    """Rows come while the kernel runs, each part's before its word; all are NaN before."""
    case = Case(PARTS, 50, 40, torch.float32)
    case.table = case.table._replace(programs=1)  # one waits for all

    def deliver() -> None:
        for part in PARTS[1:]:
            time.sleep(0.2)
            case.arrive(part)

    peer = threading.Thread(target=deliver)
    begin = time.monotonic()
    peer.start()
    gated_matmul(*case.arguments())
    lasted = time.monotonic() - begin
    peer.join()
    case.hold("late words")
    assert lasted >= 0.6 and not case.status.item(), lasted


def warming() -> None:
    def variant(*arguments: Any) -> Variant:
        return variant_of(gated.launch_of(*arguments))

    case = Case(PARTS, 48, 40, torch.float16)
    for _ in range(2):
        warm_gated(*case.arguments())
    assert case.whole.isnan().all() and not case.status.item(), "a tile was computed"
    sixteen = {48: Case(PARTS, 48, 48, torch.float16), 64: Case(PARTS, 64, 64, torch.float16)}
    even = variant(*sixteen[48].arguments())
    for other in sixteen.values():
        other.whole = torch.full((other.rows + 2, other.n + 16), torch.nan, dtype=torch.float16)
        assert variant(*other.arguments()) == even, "sizes that 16 divides share a kernel"
        assert other.rows, "there is something to multiply"
    with_bias = Case(PARTS, 48, 48, torch.float16, bias=True)
    assert variant(*with_bias.arguments()) == even, "with a bias or without"
    asked = release_table(WindowRelease((1, 2), 3, (1, 2), [[0, 16, 32]] * 2), CPU)
    table, *rest = with_bias.arguments()
    leaves = gated.launch_of(table._replace(release=asked), *rest)
    leaves.arguments["WORLD"] = 0  # as on GPUs
    assert variant_of(leaves) == even, "whether it gives the window back or not"
    odd = variant(*Case(PARTS, 44, 48, torch.float16).arguments())
    assert odd != even and not odd.aligned and dict(odd.constants)["COL_STEP"] == 1
    assert odd == variant(*Case(PARTS, 52, 40, torch.float16).arguments()), "odd sizes share one"
    assert even != variant(*Case(PARTS, 48, 48, torch.bfloat16).arguments())
    empty = prepare([GatedPart("own", 0, 0, 0)], 5, 5, torch.float32, CPU)
    _, matrices, gate = case.arguments()
    warm_gated(empty, matrices, gate)
    gated_matmul(empty, matrices, gate)
    assert case.whole.isnan().all(), "no tiles, but a launch"


@contextmanager
def beginning(programs: int, reverse: bool, look: Callable[[], int] = int) -> Iterator[list[int]]:
    """Run programs in this order inside; yields what there is to see as each begins."""
    builder, seen = interpreter.interpreter_builder, list[int]()
    forwards = builder.set_grid_idx

    def begin(x: int, y: int, z: int) -> None:
        seen.append(look())
        forwards(programs - 1 - x if reverse else x, y, z)

    builder.set_grid_idx = begin
    try:
        yield seen
    finally:
        builder.set_grid_idx = forwards


def refusals() -> None:
    for part in (GatedPart("x", 0, 0, 1), GatedPart("own", 0, 0, 1, 3),
                 GatedPart("window", 0, -1, 1, 3), GatedPart("window", 0, 0, 1, -2)):  # fmt: skip
        refused(lambda part=part: prepare([part], 4, 4, torch.float32, CPU), "GatedPart")
    case = Case(PARTS, 50, 40, torch.float32)
    table, matrices, gate = case.arguments()
    for name, wrong, words_of_it in (
        ("own", None, "own is None"),
        ("own", matrices.own[:19], "own is"),
        ("own", matrices.own[:, :39], "own is"),
        ("own", matrices.own.t().contiguous().t(), "own has a stride of"),
        ("window", None, "window is None"),
        ("window", matrices.window[:68], "window is"),
        ("window", matrices.window.half(), "window holds"),
        ("b", matrices.b[:, :49], "b is"),
        ("b", matrices.b.half(), "b holds"),
        ("bias", torch.zeros(50), "bias is"),
        ("c", matrices.c[:78], "c is"),
        ("c", matrices.c[:, :49], "c is"),
    ):
        changed = matrices._replace(**{name: wrong})
        for call in (gated_matmul, warm_gated):
            refused(lambda c=changed, call=call: call(table, c, gate), words_of_it)


def refused(call: Any, words_of_it: str) -> None:
    try:
        call()
    except InputError as error:
        assert words_of_it in str(error), error
    else:
        raise AssertionError(f"{words_of_it!r}: not refused")


def release() -> None:
    """The last program clears words and raises one at peers, in its copy; `warm` does not."""
    homes = [[words(*[7] * 200) for _ in range(4)] for _ in range(2)]  # by copy and rank
    cleared = tuple(range(3, 103))  # more than a program looks at in one go
    asked = WindowRelease(cleared, 150, (0, 1, 3), [[w.data_ptr() for w in copy] for copy in homes])
    parts = [GatedPart("own", 0, 0, 37), GatedPart("window", 0, 37, 40, 2)]
    case = Case(parts, 100, 48, torch.float32, ALIGNED[0])
    case.table = prepare(
        parts, 100, 48, torch.float32, CPU, SMALL, release=release_table(asked, CPU)
    )
    assert case.table.programs > 1 and case.table.release is not None
    case.arrive(parts[1])
    warm_gated(case.table, *case.arguments()[1:])
    assert all((home == 7).all() for copy in homes for home in copy), "what warms leaves nothing"
    for turn, (copy, reverse) in enumerate(((0, False), (1, True), (1, False), (0, True))):
        for home in (home for each in homes for home in each):
            home.fill_(7)
        case.words = homes[copy][2]  # the rank's own
        case.words[2] = 1
        table, matrices, gate = case.arguments()
        peer, own = homes[copy][0], homes[copy][2]
        with beginning(table.programs, reverse, lambda p=peer, o=own: int(p[150] + o[3])) as seen:
            gated_matmul(table, matrices, gate._replace(copy=copy))
        assert seen == [14] * table.programs, "given back before the last one had begun"
        case.hold(f"call {turn}")
        want = words(*[7] * 200)
        want[2], want[3:103] = 1, 0
        assert torch.equal(homes[copy][2], want)
        want.fill_(7)[150] = 1
        assert all(torch.equal(homes[copy][peer], want) for peer in (0, 1, 3))
        assert all((home == 7).all() for home in homes[1 - copy])
        assert case.table.release.ended.item() == 0
    for wrong in ([], [GatedPart("own", 0, 0, 4, signal=1)]):
        try:
            prepare(wrong, 100, 48, torch.float32, CPU, release=release_table(asked, CPU))
        except InputError as error:
            assert "can release it" in str(error)
        else:
            raise AssertionError(f"{wrong}: not refused")


# ---- what is compiled, without a GPU


def compiled(case: Case, capability: int, form: str = "ptx") -> str:
    """Return what a GPU would run for these arguments, in PTX or another form."""
    return str(compiling.compiled(gated.launch_of(*case.arguments()), capability).asm[form])


def merged(text: str) -> list[bool]:
    """Whether tiles are stored in the very loops that multiply, so that loads run on meanwhile."""
    lines = text.splitlines()
    depth = [len(line) - len(line.lstrip()) for line in lines]
    dots = [i for i, line in enumerate(lines) if "ttng.warp_group_dot " in line]
    found = []
    for dot in dots:
        loop = max(i for i in range(dot) if "scf.for " in lines[i] and depth[i] < depth[dot])
        end = next(i for i in range(dot, len(lines)) if depth[i] <= depth[loop])
        found.append(any("tt.store" in line for line in lines[dot:end]))
    return found


BULK_LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cluster|cta)\.global"  # cta: Triton 3.8
ACQUIRE = r"ld\.acquire\.sys\.global"
MET = r"barrier\.red\.or\.pred"
FENCE = r"fence\.proxy\.async\.global"


def places(pattern: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, text)]


def assembly() -> None:
    tile = TILES[2][0]
    for layout, bias in (("deep", False), ("cols", True)):
        case = Case(PARTS, 512, 512, torch.bfloat16, layout=layout, bias=bias, tile=tile)
        text = compiled(case, 90)
        loads, acquired = places(BULK_LOAD, text), places(ACQUIRE, text)
        met, fenced = places(MET, text), places(FENCE, text)
        behind = [load for load in loads if load > acquired[0]]
        own = len(loads) - len(behind)
        assert len(behind) > own > 0, "own tiles before the wait, others behind it"
        for load in behind:
            last = [max(at for at in each if at < load) for each in (acquired, met, fenced)]
            assert last == sorted(last), "bulk loads of a part before its fence"
        loops = merged(compiled(case, 90, "ttgir"))
        assert loops == [True, True, False, False], "a loop within a loop"
        bulk = places(r"cp\.async\.bulk", text)
        assert len(bulk) == len(loads), "bulk stores are not ordered before what follows"
        assert bias or places(r"st\.global\.v4", text)  # the bias is no row whose elements adjoin
        assert places(r"wgmma\.mma_async", text)
        assert places(r"red\.relaxed\.sys\.global\.max", text), "the status"

    case = Case(PARTS, 512, 512, torch.bfloat16, tile=tile)
    asked = release_table(WindowRelease((1, 2), 3, (1, 2), [[0, 16, 32]] * 2), CPU)
    case.table = case.table._replace(release=asked)
    text = compiled(case, 90)
    ended, raised = places(r"atom\.(\w+\.)*acq_rel", text), places(r"st\.release\.sys", text)
    assert max(places(BULK_LOAD, text)) < ended[-1] < max(places(r"st\.global", text)) < raised[-1]
    loops = merged(compiled(case, 90, "ttgir"))
    assert loops == [True, True, False, False], "a loop within a loop"

    case = Case(PARTS, 512, 512, torch.bfloat16, tile=tile)
    case.own = matrix(80, 512, torch.bfloat16, ODD_PITCH)
    case.b = operand(512, 512, torch.bfloat16, ODD_PITCH, "deep")
    text = compiled(case, 90)
    fences, loads = places(FENCE, text), places(BULK_LOAD, text)
    assert fences and fences[0] < min(loads), "only the window is loaded in bulk"

    for capability, dtype in zip((80, 90, 80), DTYPES, strict=True):  # as before Hopper
        case = Case(PARTS, 130, 70, dtype, ODD_BASE, tile=TILES[dtype.itemsize][-1])
        text = compiled(case, capability)
        assert not places(r"cp\.async\.bulk", text) and not places(FENCE, text)
        acquired, copies = places(ACQUIRE, text), places(r"ld\.global|cp\.async\.c", text)
        assert max(copies) > max(acquired)


SUBJECTS = {
    "products": products, "giving_up": giving_up, "late": late, "warming": warming,
    "refusals": refusals, "release": release, "assembly": assembly,
}  # fmt: skip

if __name__ == "__main__":
    run_named(SUBJECTS)
