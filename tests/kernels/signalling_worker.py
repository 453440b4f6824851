"""Runs GEMMs with parts that signal or are summed, on small shapes, or reads what they compile to.

TRITON_INTERPRET=1 python signalling_worker.py products|early|sums|late_terms|giving_up|refusals ...
python signalling_worker.py assembly
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import torch
from enqueuing import gated_matmul, warm_gated
from gated_worker import (
    ACQUIRE,
    AGES,
    ALIGNED,
    BULK_LOAD,
    CPU,
    DTYPES,
    MET,
    ODD_BASE,
    ODD_PITCH,
    SMALL,
    compiled,
    matrix,
    merged,
    operand,
    places,
    refused,
    words,
)
from interpreting import run_named

from ficco.kernels.gated import Gate, Matrices, prepare
from ficco.kernels.summing import sum_partials
from ficco.plan.tables import Arrived, GatedPart
from ficco.program import tiling
from ficco.program.tiling import TILES, Tile

Pad = tuple[int, int]
QUICK = Tile(32, 32, 32, 4, 1, 2, 1, 1.0)  # small parts still have several tiles


def own(c_row: int, rows: int, **more: Any) -> GatedPart:
    return GatedPart("own", more.pop("a_row", c_row), c_row, rows, **more)


def away(c_row: int, rows: int, signal: int, **more: Any) -> GatedPart:
    return own(c_row, rows, signal=signal, target="partial", **more)


class Case:
    """A product in parts. What has not come is NaN, and so are both targets."""

    def __init__(
        self, parts: list[GatedPart], n: int, k: int, dtype: torch.dtype, pad: Pad = (0, 0),
        layout: str = "deep", bias: bool = False, tile: Tile = SMALL,
        c_dtype: torch.dtype | None = None, begun: bool = False,
    ) -> None:  # fmt: skip
        height = max(p.a_row + p.rows for p in parts) + 1
        self.parts, self.n = parts, n
        self.own, self.window = matrix(height, k, dtype, pad), matrix(height, k, dtype, pad)
        self.b = operand(k, n, dtype, pad, layout)
        self.bias = matrix(1, n, dtype, (0, 0)) if bias else None
        arrived = [term.row + p.rows for p in parts for term in p.terms if term]
        self.rows_of_recv = matrix(max(arrived, default=0) + 1, n, dtype, pad)
        self.recv = torch.full_like(self.rows_of_recv, torch.nan)
        self.rows = max(p.c_row + p.rows for p in parts)
        self.c = torch.full((self.rows + 2, n + 16), torch.nan, dtype=c_dtype or dtype)
        self.partial = torch.full((self.rows + 2, n + 32), torch.nan, dtype=c_dtype or dtype)
        self.table = prepare(parts, n, k, dtype, CPU, tile, begun)
        self.begun = matrix(self.rows, n, dtype, pad) if begun else None
        self.begin()
        self.words, self.signals = words(*[0] * 16), words(*[0] * 16)
        self.stop, self.status = words(0), words(0)

    def arguments(self) -> tuple[Any, Matrices, Gate]:
        c, partial = (whole[: self.rows, : self.n] for whole in (self.c, self.partial))
        return (
            self.table,
            Matrices(self.own, self.window, self.b, self.bias, c, partial, self.recv),
            Gate(self.words, self.stop, self.status, AGES, signals=self.signals),
        )  # fmt: skip

    def box(self, part: GatedPart) -> tuple[slice, slice]:
        end = self.n if part.cols is None else part.col + part.cols
        return slice(part.c_row, part.c_row + part.rows), slice(part.col, end)

    def target(self, part: GatedPart) -> torch.Tensor:
        return (self.c if part.target == "c" else self.partial)[self.box(part)]

    def begin(self) -> None:
        """Put NaN into both targets, or in the places of parts what is begun of them."""
        self.c.fill_(torch.nan)
        self.partial.fill_(torch.nan)
        for part in self.parts if self.begun is not None else ():
            self.target(part).copy_(self.begun[self.box(part)])

    def land(self, term: Arrived, rows: int) -> None:
        """Let a term come, and then its word."""
        at = slice(term.row, term.row + rows)
        self.recv[at] = self.rows_of_recv[at]
        if term.word >= 0:
            self.words[term.word] = 1

    def arrive(self) -> None:
        """Let all come that is awaited."""
        for part in self.parts:
            for term in part.terms:
                if term:
                    self.land(term, part.rows)
            if part.word >= 0:
                self.words[part.word] = 1

    def wanted(self, part: GatedPart) -> torch.Tensor:
        _, cols = self.box(part)
        a = self.own if part.source == "own" else self.window
        total = a[part.a_row : part.a_row + part.rows].double() @ self.b[:, cols].double()
        if self.begun is not None:
            total = total + self.begun[self.box(part)].double()
        for term in part.terms:
            if term:
                total = total + self.rows_of_recv[term.row : term.row + part.rows, cols].double()
        if self.bias is not None and part.target == "c":
            total = total + self.bias[:, cols].double()
        return total

    def hold(self, about: str, nan_filled: tuple[GatedPart, ...] = ()) -> None:
        """Hold both targets, the words that are raised, and the counters."""
        for name, whole in (("c", self.c), ("partial", self.partial)):
            want = torch.full(whole.shape, torch.nan, dtype=torch.float64)
            for part in self.parts:
                if part.target == name and part not in nan_filled:
                    want[self.box(part)] = self.wanted(part)
            found = whole.double()
            assert torch.equal(found.isnan(), want.isnan()), f"{about}: NaN elsewhere in {name}"
            bound = torch.finfo(whole.dtype).eps * want.abs() + 1e-5 * (self.b.shape[0] + 8) ** 0.5
            wrong = (found - want).abs() > bound
            assert not wrong.any(), f"{about}: {name} is wrong at {wrong.nonzero()[0].tolist()}"
        raised = {p.signal for p in self.parts if p.rows and p.cols != 0} - {-1}
        assert self.signals.nonzero().flatten().tolist() == sorted(raised), f"{about}: the words"
        assert not self.table.signalling.counters.any(), f"{about}: counters are not 0 again"


def terms(*rows: int | None, word: int = 0) -> tuple[Arrived | None, ...]:
    """Return terms at these rows with words from `word` on, and the own one's place."""
    return tuple(None if row is None else Arrived(row, word + i) for i, row in enumerate(rows))


def shapes() -> Iterator[tuple[str, list[GatedPart], int, int]]:
    """Yield parts, n and k."""
    yield "one part", [own(0, 37, signal=3)], 40, 48
    yield (
        "rows for peers, own ones last",
        [away(20, 33, 5), away(53, 17, 0), own(0, 20, a_row=7), away(70, 1, 2)], 37, 33,
    )  # fmt: skip
    yield (
        "slices of columns that the widest stores fit, and an empty one",
        [away(9, 18, 1, cols=16), away(9, 18, 2, col=16, cols=32), away(9, 18, 3, col=48),
         away(0, 9, 7, col=3, cols=0), own(0, 9, cols=48), own(0, 9, col=48)], 96, 40,
    )  # fmt: skip
    yield (
        "slices at odd columns",
        [away(0, 35, 4, col=13, cols=21), own(0, 35, cols=13, signal=1),
         own(0, 35, col=34, signal=0)], 47, 19,
    )  # fmt: skip
    yield (
        "sums, the own product between",
        [own(0, 18, terms=terms(0, 41, None, 20)), own(30, 0, terms=terms(0, 0, None, 0)),
         own(45, 3, terms=terms(70, 80, None, 90, word=4), signal=9)], 45, 37,
    )  # fmt: skip
    yield (
        "sums by columns, the own product last",
        [own(10, 20, cols=17, terms=terms(0, 20, None), signal=2),
         own(10, 20, col=17, terms=terms(0, 20, None, word=4), signal=0)], 40, 16,
    )  # fmt: skip
    yield "a sum without depth", [own(0, 4, terms=terms(None, 0))], 5, 0


def products() -> None:
    biases, begins = cycle((False, True, True)), cycle((False, False, True, True, False))
    layouts = cycle(("deep", "cols", "neither", "deep"))
    for dtype, pad in zip(DTYPES, (ODD_PITCH, ALIGNED[1], ODD_BASE), strict=True):
        for (name, parts, n, k), layout in zip(shapes(), layouts, strict=False):
            bias, begun = next(biases), next(begins)
            c_dtype = torch.float32 if bias else None
            case = Case(parts, n, k, dtype, pad, layout, bias, QUICK, c_dtype, begun)
            case.arrive()
            for launch in ("first", "second")[: 2 if dtype is torch.float16 else 1]:  # a replay
                gated_matmul(*case.arguments())
                case.hold(f"{name}, {n=} {k=}, {dtype} {pad=} {layout} {bias=} {begun=}, {launch}")
                assert not case.status.item()
                case.signals.zero_()
                case.begin()
    for parts, dtype in product(
        ([away(0, 129, 0, cols=150), own(150, 70)], [own(150, 70, terms=terms(0, None))]),
        DTYPES[1:],
    ):
        for tile in TILES[dtype.itemsize][:3]:  # as they are shipped
            case = Case(parts, 300, 70, dtype, (0, 10), tile=tile, begun=tile == TILES[2][0])
            case.arrive()
            gated_matmul(*case.arguments())
            case.hold(f"{dtype} {tile}")


def early() -> None:
    """A stream's part is played by a thread: at a word it copies the part's rows at once."""
    parts = [away(64 * i, 64, i) for i in range(1, 5)] + [own(0, 64, signal=0)]
    sys.setswitchinterval(1e-4)
    case = Case(parts, 60, 30, torch.bfloat16)
    taken: dict[int, torch.Tensor] = {}
    unfinished = 0

    def push() -> None:
        nonlocal unfinished
        for part in parts:
            while not case.signals[part.signal].item():
                time.sleep(1e-5)
            taken[part.signal] = case.target(part).clone()
            unfinished += bool(case.c[:64, :60].isnan().any())

    pusher = threading.Thread(target=push)
    pusher.start()
    gated_matmul(*case.arguments())
    pusher.join()
    case.hold("early")
    for part in parts:
        assert torch.equal(taken[part.signal], case.target(part)), f"{part}: pushed too early"
    assert unfinished >= 2, f"words of {unfinished} parts came before the end"


def sums() -> None:
    """The bits are those of the product in float32, and then `sum_partials`."""
    for dtype, own_at, bias in zip(DTYPES, (0, 2, 3), (True, False, True), strict=True):
        rows = [0, 40, 80]
        places_of = (*rows[:own_at], None, *rows[own_at:])
        case = Case([own(0, 33, terms=terms(*places_of))], 70, 45, dtype, bias=bias)
        case.arrive()
        gated_matmul(*case.arguments())
        case.hold(f"{dtype}, own at {own_at}")
        table, matrices, gate = case.arguments()
        product_of = torch.empty(33, 70)
        plain = prepare([own(0, 33)], 70, 45, dtype, CPU, SMALL)
        gated_matmul(plain, matrices._replace(bias=None, c=product_of), gate)
        want = torch.empty(33, 70, dtype=dtype)
        sum_partials(case.recv, 40, 3, product_of, own_at, case.bias, want)
        assert torch.equal(matrices.c, want), f"{dtype}: other bits than sum_partials"
        assert table.signalling.term_count == 3


PARTS = [own(0, 13, terms=terms(0, None, 30)), own(13, 17, terms=terms(13, None, 43, word=4))]


def late_terms() -> None:
    """Peers' sums come one by one, NaN before."""
    case = Case(PARTS, 50, 40, torch.float32)
    case.table = case.table._replace(programs=1)  # one waits for all

    def deliver() -> None:
        for part in PARTS:
            for term in part.terms:
                if term:
                    time.sleep(0.1)
                    case.land(term, part.rows)

    peer = threading.Thread(target=deliver)
    begin = time.monotonic()
    peer.start()
    gated_matmul(*case.arguments())
    lasted = time.monotonic() - begin
    peer.join()
    case.hold("late terms")
    assert lasted >= 0.4 and not case.status.item(), lasted


def giving_up() -> None:
    for missing in (0, 2, 4, 6):
        case = Case(PARTS, 50, 40, torch.bfloat16, bias=True)
        case.stop[0] = 1
        case.arrive()
        case.words[missing] = 0
        number = 0 if missing < 4 else 1
        gated_matmul(*case.arguments())
        case.hold(f"without word {missing}", (PARTS[number],))
        assert case.status.item() == number + 1

    case = Case(PARTS, 50, 40, torch.float16)
    warm_gated(*case.arguments())
    assert case.c.isnan().all() and case.partial.isnan().all(), "a tile was computed"
    case = Case([away(30, 20, 1), own(0, 13, signal=2)], 50, 40, torch.float16)
    warm_gated(*case.arguments())
    assert case.c.isnan().all() and case.partial.isnan().all(), "a tile was computed"
    assert not case.signals.any() and not case.table.signalling.counters.any()


def shared() -> None:
    """Tiles that several programs make, of parts that raise words, or are added to others."""
    tiling._SHARE_DEPTH = 0
    found, layouts = set[int](), cycle(("deep", "cols", "neither"))
    for rows, dtype, begun in product((16, 17, 40), DTYPES, (False, True)):
        parts = [away(0, 20, 1), own(20, rows, signal=2), own(20 + rows, 30)]
        case = Case(parts, 14 + rows, 270, dtype, layout=next(layouts), bias=not begun, begun=begun)
        found.add(case.table.shared.tiles)
        for _ in range(2):
            case.begin()
            case.signals.zero_()
            gated_matmul(*case.arguments())
            case.hold(f"{rows=} {dtype} {begun=} {case.table.shared}")
        assert not case.table.shared.counts.any()
    assert {1, 2} <= found, found


def refusals() -> None:
    for part in (
        own(0, 1, target="d"), own(0, 1, signal=-2), own(0, 1, col=-1), own(0, 1, col=2, cols=3),
        own(0, 1, terms=(Arrived(0), Arrived(1))), own(0, 1, terms=(None, Arrived(-1))),
        own(0, 1, target="partial", terms=(None, Arrived(0))), own(0, 1, terms=(None, None)),
        GatedPart("window", 0, 0, 1, 3, terms=(None, Arrived(0))),
    ):  # fmt: skip
        refused(lambda part=part: prepare([part], 4, 4, torch.float32, CPU), "GatedPart")
    summed, window = own(0, 1, terms=terms(None, 0)), GatedPart("window", 0, 1, 1, 1)
    for pair, said in (
        ([summed, own(1, 1, terms=terms(0, None))], "in the same place"),
        ([summed, window], "one table per kind"),
        ([summed, own(1, 1)], "one table per kind"),
        ([own(0, 1, signal=1), window], "one table per kind"),
        ([own(0, 1, signal=2), summed._replace(signal=1)], "one table per kind"),
    ):
        refused(lambda pair=pair: prepare(pair, 4, 4, torch.float32, CPU), said)
    pushing = Case([away(0, 50, 1), own(50, 9)], 50, 40, torch.float32)
    summing = Case(PARTS, 50, 40, torch.float32)
    for case, name, wrong, said in (
        (pushing, "partial", None, "partial is None"),
        (pushing, "partial", torch.zeros(49, 50), "partial is"),
        (pushing, "partial", torch.zeros(59, 50, dtype=torch.float16), "use one dtype"),
        (summing, "recv", None, "recv is None"),
        (summing, "recv", torch.zeros(60, 49), "recv is"),
        (summing, "recv", torch.zeros(50, 60).t(), "recv has a stride of"),
    ):
        table, matrices, gate = case.arguments()
        changed = matrices._replace(**{name: wrong})
        for call in (gated_matmul, warm_gated):
            refused(lambda t=table, c=changed, g=gate, call=call: call(t, c, g), said)


# ---- what is compiled, without a GPU

STORE = r"st\.global\.v4"
COUNT = r"atom\.add\.acq_rel\.gpu\.global"
RELEASE = r"st\.release\.sys\.global"


def wide(c_row: int, **more: Any) -> GatedPart:
    return own(c_row, 256, **more)


def assembly() -> None:
    tile = TILES[2][0]
    signals = [wide(0, target="partial", signal=1), wide(256, signal=2)]
    slices = [wide(0, signal=1, cols=256), wide(0, signal=2, col=256, cols=256)]
    for parts, begun in ((signals, False), (slices, False), (signals, True)):
        case = Case(parts, 512, 512, torch.bfloat16, tile=tile, begun=begun)
        text = compiled(case, 90)
        stores, counts, releases = (places(what, text) for what in (STORE, COUNT, RELEASE))
        # All stands there twice: once for a product without depth.
        # And where tiles are shared: of slices, and of the part.
        assert len(counts) == len(releases) == 4, "one count in each loop"
        begin = 0
        for counted, released in zip(counts, releases, strict=True):
            mine = [store for store in stores if begin < store < counted]
            met = [at for at in places(r"bar\.sync", text) if at < counted][-1]
            assert mine and max(mine) < met < counted < released, "a word before its rows"
            begin = released
        assert max(stores) < max(releases), "rows that no word tells of"
        bulk = places(r"cp\.async\.bulk", text)
        assert len(bulk) == len(places(BULK_LOAD, text)), "bulk stores are not ordered"
        assert merged(compiled(case, 90, "ttgir")) == [True, False], "a loop within a loop"

    for begun in (False, True):
        sums = [wide(0, terms=terms(0, None, 256, 512), signal=9)]
        case = Case(sums, 512, 512, torch.bfloat16, tile=tile, begun=begun)
        text = compiled(case, 90)
        acquired, met = places(ACQUIRE, text), places(MET, text)
        assert len(acquired) == len(met) == 2 * 3, "a wait for each term"
        for i in (0, 3):  # of the product without depth, and of the other
            stored = next(at for at in places(STORE, text) if at > met[i + 2])
            arrived = [at for at in places(r"ld\.global\.v4", text) if acquired[i] < at < stored]
            assert arrived and max(met[i : i + 3]) < min(arrived), (
                "terms are read before their word"
            )
        assert not places(r"ld\.global\S*\.nc", text), "terms are read past the acquire"
        counted, released = places(COUNT, text), places(RELEASE, text)
        assert len(counted) == 2 and max(places(STORE, text)) < counted[-1] < released[-1]
        assert merged(compiled(case, 90, "ttgir")) == [True], "a loop within a loop"

    case = Case(slices, 512, 70, torch.float32, ODD_BASE, tile=TILES[4][-1])
    text = compiled(case, 80)  # as before Hopper
    counted, released = places(COUNT, text), places(RELEASE, text)
    assert max(places(r"st\.global", text)) < counted[-1] < released[-1]


SUBJECTS = {
    "products": products, "early": early, "sums": sums, "late_terms": late_terms,
    "giving_up": giving_up, "refusals": refusals, "assembly": assembly, "shared": shared,
}  # fmt: skip

if __name__ == "__main__":
    run_named(SUBJECTS)
