"""Program: what one rank runs on a target. Passes compile it from a plan.

A program is final: nothing downstream merges, splits, reorders or drops an entry. Engines may put
adjacent entries of a lane into one driver call. Entries are in order of submission. The entries of
a lane run one after another; lanes are concurrent. `after` names earlier entries, on any lane, that
end before the entry starts.

    Copy           one copy, by the driver or by a thread
    SignalWrite    stores to signals
    Wait           a wait for signals
    Launch         one call of a library, or one of ficco's own kernels
    Exchange       one collective of a library
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ficco.plan import Bag, Buffer, Experts, Region, Signal, mode_of
from ficco.plan.tables import GatedPart, WholeTable, WindowRelease
from ficco.program.target import Target

__all__ = [
    "Bag",
    "Copy",
    "Entry",
    "Exchange",
    "Experts",
    "Gated",
    "Gemm",
    "Launch",
    "OneKernel",
    "Pool",
    "Program",
    "Reduce",
    "SignalWrite",
    "Sum",
    "Wait",
    "Work",
    "kernel_of",
    "kind_of",
    "operands_of",
]


class Copy(NamedTuple):
    """A copy of one box to a box of equal size."""

    id: str
    lane: str
    after: tuple[str, ...]
    source: Region
    target: Region


class SignalWrite(NamedTuple):
    """Stores 0 to every signal of `clears`, then raises every signal of `raises`.

    `how` is "thread"; "stream": memory operations of the lane's stream; "copy": a 4-byte copy per
    signal, behind the lane's earlier entries; or "kernel": one kernel stores all.
    """

    id: str
    lane: str
    after: tuple[str, ...]
    clears: tuple[Signal, ...]
    raises: tuple[Signal, ...]
    how: str


class Wait(NamedTuple):
    """A wait for all of the signals.

    `how` is "thread"; "stream": memory operations of the lane's stream; or "kernel": one kernel on
    the caller's stream.
    """

    id: str
    lane: str
    after: tuple[str, ...]
    signals: tuple[Signal, ...]
    how: str


class Gemm(NamedTuple):
    """`number` products c = a.b (+ c, if `accumulate`) (+ each of `add`) by one library call.

    a and c of the i-th product are `i * rows_a` and `i * rows_c` rows below those of the first.
    """

    a: Region
    b: Region
    c: Region
    accumulate: bool = False
    add: tuple[Region, ...] = ()
    transpose_a: bool = False
    transpose_b: bool = False
    number: int = 1
    rows_a: int = 0
    rows_c: int = 0


class Sum(NamedTuple):
    """A sum over ranks in one pass: slots of a window, the own part among them, and a bias.

    Attributes:
        slots: the first slot, or the own part if there is no slot.
        number: number of slots.
        distance: rows from one slot to the next.
        own: the own part; it is added before slot number `own_at`.
        bias: one row, or None.
        target: receives the sum.
    """

    slots: Region
    number: int
    distance: int
    own: Region
    own_at: int
    bias: Region | None
    target: Region


class Reduce(NamedTuple):
    """The sum of `reads`, in order; a read of one row is added to every row, none give zeros."""

    reads: tuple[Region, ...]
    target: Region


class Pool(NamedTuple):
    """The same bags of several tables by one launch; the targets are columns of the same rows."""

    bags: tuple[Bag, ...]

    @property
    def target(self) -> Region:
        """The columns from the first target to the last one."""
        lefts = [bag.target.col0 for bag in self.bags]
        rights = [bag.target.col1 for bag in self.bags]
        return self.bags[0].target._replace(col0=min(lefts), col1=max(rights))

    @property
    def sizes(self) -> tuple[list[int], list[str], list[int]]:
        """Per table: its columns, its mode, and its first column in `target`."""
        left = self.target.col0
        return (
            [bag.table.cols for bag in self.bags],
            [mode_of(bag) for bag in self.bags],
            [bag.target.col0 - left for bag in self.bags],
        )


class Gated(NamedTuple):
    """A gated GEMM. Regions are whole buffers; parts name rows and columns in them.

    Attributes:
        parts: in the plan's order, with the places of the signals that they wait for and raise.
        n, k: columns of the product, and depth.
        dtype: of the operands.
        b: the second operand.
        turned: whether b is stored transposed.
        bias: one row, or None.
        c: the target of the result, or of all parts if every part is pushed.
        own: the buffer that own parts read, or None.
        window: the buffer that the other parts read, or None.
        partial: the target of pushed parts if other parts go to c; else None.
        recv: the receive buffer whose rows are added to own parts, or None.
        begun: whether parts accumulate into their targets.
        release: the signals by which the launch releases the window when it ends, or None.
        leaves: multiprocessors that the launch leaves free, see `Target`.
    """

    parts: tuple[GatedPart, ...]
    n: int
    k: int
    dtype: str
    b: Region
    turned: bool
    bias: Region | None
    c: Region
    own: Region | None
    window: Region | None
    partial: Region | None
    recv: Region | None
    begun: bool
    release: WindowRelease | None = None
    leaves: int = 0


class OneKernel(NamedTuple):
    """A whole call as one launch.

    Attributes:
        table: what the kernel does.
        waits: names and signals of the kernel's waits, for messages about missing signals.
        shared: whether another rank is on the same device.
    """

    table: WholeTable
    waits: tuple[tuple[str, tuple[Signal, ...]], ...]
    shared: bool = False


Work = Gemm | Sum | Reduce | Bag | Pool | Experts | Gated | OneKernel


class Launch(NamedTuple):
    """One call of a library (`by` is "library") or one kernel of ficco (`by` is "native")."""

    id: str
    lane: str
    after: tuple[str, ...]
    work: Work
    by: str


class Exchange(NamedTuple):
    """A collective of all ranks, see `ficco.plan.Step.collective`."""

    id: str
    lane: str
    after: tuple[str, ...]
    collective: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


Entry = Copy | SignalWrite | Wait | Launch | Exchange


class Program(NamedTuple):
    """The program of one rank on a target."""

    rank: int
    target: Target
    buffers: tuple[Buffer, ...]
    entries: tuple[Entry, ...]

    @property
    def launches(self) -> list[Launch]:
        """The launches, in order."""
        return [entry for entry in self.entries if isinstance(entry, Launch)]


def kernel_of(work: Work) -> str:
    """Return the name of the kernel of a launch, as text formats have it."""
    return _KERNELS[type(work)]


def kind_of(entry: Entry) -> str:
    """Return the kind of an entry's span in timelines: that of the plan's steps."""
    if isinstance(entry, Launch):
        return _KINDS.get(type(entry.work), "gemm")
    if isinstance(entry, Copy):
        return "local_copy" if entry.source.rank == entry.target.rank else "copy"
    if isinstance(entry, Wait):
        return "wait"
    if isinstance(entry, Exchange):
        return "collective"
    return "raise" if entry.raises else "clear"


def operands_of(work: Work) -> Iterator[Region]:
    """Yield the regions that a work names: whole buffers if gated, none for a whole call."""
    for value in work:
        if isinstance(value, Region):
            yield value
        elif isinstance(value, tuple):
            for item in value:
                if isinstance(item, Region):
                    yield item
                elif isinstance(item, Bag):
                    yield from operands_of(item)


_KINDS: dict[type, str] = {
    Sum: "reduce",
    Reduce: "reduce",
    Bag: "bag",
    Pool: "bag",
    Experts: "experts",
}
_KERNELS: dict[type, str] = {
    Gemm: "gemm",
    Sum: "sum",
    Reduce: "reduce",
    Bag: "bag",
    Pool: "pool",
    Experts: "experts",
    Gated: "gated_gemm",
    OneKernel: "one_kernel",
}
