"""Plan: the buffers, lanes and steps of every rank.

A plan is the contract between lowering, verifier, simulator and engines. This file holds its types
and the places of signals in a window; `plan_json` reads and writes plans. Nothing here makes or
verifies plans. The types are named tuples, because a plan of 8 ranks has thousands of them and is
made per shape.

How a plan runs: each rank forks all its lanes at the start of the call and joins them at the end. A
lane runs its steps one after another, in list order; lanes are concurrent. Signals (`raise`,
`wait`, `clear`) and `after` order steps of different lanes. Every window exists `copies` times. A
call uses one copy; the copy in a region or signal is an offset from the copy of this call.

A call may use any copy of a window, because peers signal when their windows are free. A mailbox is
a window without this signal: calls alternate between its two copies by a counter on each rank, and
every rank waits until all ranks have entered. A rank that has ended a call thus knows that all
ranks have ended the previous call. A plan has windows or mailboxes, each with separate signals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import MAX_WORLD
from ficco.operators.registry import ROLES as OPERANDS
from ficco.operators.routing import Routed
from ficco.plan.schedule import MAX_CHUNKS, Schedule

VERSION = 4

ROLES = ("input", "weight", "output", "window", "mailbox", "workspace")
SHARED = ("window", "mailbox")  # roles of buffers that peers write to
EXPERT_MODES = ("gather", "return", "sum")  # of steps of kind "experts"

# The units that each kind of step may occupy. A plan is the same for all targets, so a step states
# the largest need of any target: a local copy is a kernel on CUDA, see `copy_unit`.
UNITS: dict[str, tuple[str, ...]] = {
    "copy": ("dma", "sm"),
    "local_copy": ("sm",),
    "raise": ("none",),
    "wait": ("none",),
    "clear": ("none",),
    "gemm": ("sm",),
    "reduce": ("sm",),
    "collective": ("sm", "dma"),
    "bag": ("sm",),
    "experts": ("sm",),
}
KINDS = tuple(UNITS)

# Signals of a window copy, on the rank that holds (waits for and clears) them:
#   data[writer][chunk]  the writer's chunk has arrived        raised by the writer
#   entered[writer]      the writer has started this call       raised by the writer
#   free[reader]         the reader is done with its own window raised by the reader
#   ready[peer][chunk]   a part of a gated step is done         raised by the holder itself
# Their places do not depend on sizes, grain or operator.
SIGNALS: dict[str, int] = {  # name: signals per peer
    "data": MAX_CHUNKS,
    "entered": 1,
    "free": 1,
    "ready": MAX_CHUNKS,
}
_BASES = {
    "data": 0,
    "entered": MAX_WORLD * MAX_CHUNKS,
    "free": MAX_WORLD * (MAX_CHUNKS + 1),
    "ready": MAX_WORLD * (MAX_CHUNKS + 2),
}
SIGNALS_PER_COPY = MAX_WORLD * (2 * MAX_CHUNKS + 2)


class Region(NamedTuple):
    """A 2-D box of a buffer: rows [row0, row1), columns [col0, col1).

    `of`: a rank s: of these rows only those that the routing gives to s; -1: all of them. Rows of
    different ranks are different, and those of all ranks are all rows. So all ranks may write
    their rows of one box at the same time. See `experts_of`.
    """

    rank: int
    buffer: str
    row0: int
    row1: int
    col0: int
    col1: int
    copy: int = 0
    of: int = -1

    @property
    def rows(self) -> int:
        """Height of the box."""
        return self.row1 - self.row0

    @property
    def cols(self) -> int:
        """Width of the box."""
        return self.col1 - self.col0

    @property
    def area(self) -> int:
        """Elements in the box."""
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def __str__(self) -> str:
        box = f"{self.buffer}@{self.rank}[{self.row0}:{self.row1}, {self.col0}:{self.col1}]"
        copy = f" copy +{self.copy}" if self.copy else ""
        return box + copy + (f" of rank {self.of}" if self.of >= 0 else "")


class Signal(NamedTuple):
    """A signal in the window of `rank`. `entered` carries the plan's digest, others 1."""

    rank: int
    name: str
    peer: int
    chunk: int = 0
    copy: int = 0

    def __str__(self) -> str:
        chunk = f"[{self.chunk}]" if SIGNALS.get(self.name, 1) > 1 else ""
        return f"{self.name}[{self.peer}]{chunk}@{self.rank}" + (
            f" copy +{self.copy}" if self.copy else ""
        )


class Product(NamedTuple):
    """c = a.b (+ c, if `accumulate`) (+ every region of `add`, in order).

    A region of `add` with one row is added to every row of c (a bias). Sums are float32; c is
    rounded once.
    """

    a: Region
    b: Region
    c: Region
    accumulate: bool = False
    add: tuple[Region, ...] = ()


class Bag(NamedTuple):
    """The pooled rows of a table, one row for each bag whose offsets are `bags`.

    A row is the sum of the table's rows that a bag looks up; with `weights`, each times its weight;
    with `mean`, the sum divided by the bag's number of lookups, or 0 for an empty bag.
    """

    table: Region
    indices: Region
    bags: Region
    target: Region
    weights: Region | None = None
    mean: bool = False


class Experts(NamedTuple):
    """The work of a step of kind "experts": rows by a routing table, see `operators.routing`.

    Attributes:
        mode: "gather": rows of `sources` (tokens of ranks) times the weights of their experts, in
            the order of the list; `targets[i]` is the part of one box whose tokens are in
            `sources[i]`. "return": rows in the order of the list (the one source) times the weights
            of their experts; `targets` are boxes with a row per slot, of the owners of tokens.
            "sum": per token the sum of the rows of its slots (the one source), in order, in
            float32.
        sizes: of the routing table.
        routing: the table.
        weight: the weights of this rank's experts, one below the other; None: mode "sum".
        sources, targets: see `mode`.
        turned: the weight of each expert is stored transposed.
    """

    mode: str
    sizes: Routed
    routing: Region
    weight: Region | None
    sources: tuple[Region, ...]
    targets: tuple[Region, ...]
    turned: bool = False

    @property
    def adds_own(self) -> bool:
        """Whether it adds up, for the tokens of all ranks, rows of this rank's experts alone."""
        return self.mode == "sum" and self.sources[0].of >= 0


class Part(NamedTuple):
    """A part of a gated step: waits for its signals, does its work, raises its signals.

    Parts of one step may run at the same time; only signals order them. `modes` is as of `Step`.
    """

    waits: tuple[Signal, ...] = ()
    products: tuple[Product, ...] = ()
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    raises: tuple[Signal, ...] = ()
    modes: tuple[str, ...] = ()


class Step(NamedTuple):
    """An entry of a plan.

    Attributes:
        id: unique on its rank.
        lane: the ordered queue that runs it.
        kind: one of KINDS.
        unit: "sm", "dma" or "none".
        reads, writes: copy, local_copy: reads[i] goes to writes[i]. reduce: the sum of reads, in
            order, in float32, goes to the one region of writes; a read of one row is added to every
            row, and no reads give zeros. collective: reads is sent by this rank, writes is
            received; see `collective`. bag: reads repeats (table, indices, offsets of its
            bags), and weights if the mode is "weighted"; writes[i] gets the i-th bags. See
            `bags_of`. experts: reads are the routing table, the weight (not in mode "sum"), and the
            sources; writes are the targets. See `experts_of`.
        signals: raise: raises them, in any order; wait: waits for all; clear: sets them to 0.
        products: gemm: its products, in order.
        transpose_a, transpose_b: gemm, experts: the operand is stored transposed.
        after: ids of earlier steps of this rank, on any lane, that end before this one starts.
        parts: a gated gemm or bag: its parts; products, reads and writes are then empty.
        collective: the name of the collective. "all_gather": all ranks' reads, one below the
            other, go to the one region of writes. "all_to_all": the read for each rank goes to the
            write from this rank there. "reduce_scatter": the reads of all ranks for this rank are
            added up in the one region of writes; none: this rank gets no rows. "all_reduce": the
            one read of all ranks is added up in the one region of writes, which may be the read
            itself.
        concurrent: a gated step waits for results of peers' kernels (as every step that both waits
            and raises): its plan needs lanes that run at the same time, and devices without kernels
            of other groups.
        modes: bag: how each of `writes` is pooled, one of `problem.MODES`; () if all are sums.
            experts: one of EXPERT_MODES.
        routed: experts: the sizes of the routing table.
    """

    id: str
    lane: str
    kind: str
    unit: str
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    signals: tuple[Signal, ...] = ()
    products: tuple[Product, ...] = ()
    transpose_a: bool = False
    transpose_b: bool = False
    after: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    collective: str = ""
    concurrent: bool = False
    modes: tuple[str, ...] = ()
    routed: Routed | None = None


def copy_unit(target: str, same_device: bool) -> str:
    """Return the unit that a copy by the driver occupies on a target.

    On CUDA, a copy within one device (`cuMemcpyAsync` or `cuMemcpy2DAsync`, of any size) is a
    kernel: it does not start while other kernels hold all thread slots. A copy to another device
    runs on a copy engine and does start then, whatever its size and shape. Both were measured on
    H100 GPUs with CUDA 13.0. HIP was not measured; its value is the safe one.
    The host engine has no multiprocessors: a thread of the lane copies while others compute.

    Args:
        target: "cuda", "hip" or "host".
        same_device: whether source and destination are on the same device.

    Returns:
        "sm" if the copy needs a multiprocessor to start, else "dma".

    Raises:
        KeyError: an unknown target.
    """
    within = {"cuda": "sm", "hip": "sm", "host": "dma"}[target]
    return within if same_device else "dma"


def regions_of(work: Step | Part) -> list[Region]:
    """Return every region of a step or a part; the parts of a step are not included."""
    regions = [*work.reads, *work.writes]
    for product in work.products:
        regions += [product.a, product.b, product.c, *product.add]
    return regions


def mode_of(bag: Bag) -> str:
    """Return the mode of a bag, one of `problem.MODES`."""
    if bag.weights is not None:
        return "weighted"
    return "mean" if bag.mean else "sum"


def modes_in_step(modes: Iterable[str]) -> tuple[str, ...]:
    """Return the modes of bags as `Step.modes` has them: () if all are sums."""
    modes = tuple(modes)
    return modes if set(modes) - {"sum"} else ()


def bags_of(work: Step | Part) -> list[Bag]:
    """Return the bags of a step or a part; its reads, writes and modes must fit each other."""
    reads = iter(work.reads)
    modes = work.modes or ("sum",) * len(work.writes)
    return [
        Bag(next(reads), next(reads), next(reads), target,
            next(reads) if mode == "weighted" else None, mode == "mean")
        for target, mode in zip(work.writes, modes, strict=True)
    ]  # fmt: skip


def experts_of(step: Step) -> Experts:
    """Return the work of a step of kind "experts"; its fields must fit each other."""
    (mode,), sizes = step.modes, step.routed
    assert sizes is not None
    routing, *rest = step.reads
    weight = None if mode == "sum" else rest.pop(0)
    return Experts(mode, sizes, routing, weight, tuple(rest), step.writes, step.transpose_b)


def experts_step(name: str, lane: str, work: Experts) -> Step:
    """Return the step of a work; the inverse of `experts_of`."""
    weight = () if work.weight is None else (work.weight,)
    reads = (work.routing, *weight, *work.sources)
    return Step(
        name, lane, "experts", "sm", reads, work.targets, transpose_b=work.turned,
        modes=(work.mode,), routed=work.sizes,
    )  # fmt: skip


class Buffer(NamedTuple):
    """A 2-D array of a rank. Windows and mailboxes are equal on all ranks and visible to peers."""

    name: str
    role: str
    rows: int
    cols: int
    dtype: str
    copies: int = 1


def operand_buffers(problem: Problem, rank: int) -> list[Buffer]:
    """Return the buffers of the inputs, weights and outputs of a rank, which its plan declares."""
    return [
        Buffer(name, OPERANDS[role].buffer, rows, cols, dtype)
        for name, role, rows, cols, dtype, _ in problem.operands(rank)
    ]


class RankPlan(NamedTuple):
    """The plan of one rank. Steps are in order of submission."""

    rank: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def buffer(self, name: str) -> Buffer:
        """Return a buffer by name (KeyError if there is none)."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)


class Plan(NamedTuple):
    """All ranks' plans of one call. The runtime of a rank holds only its entry of `ranks`.

    Attributes:
        problem: the operator with its sizes.
        schedule: the resolved schedule, with concrete values on all axes.
        digest: see `digest_of`; ranks compare it, so that two different calls are found.
        ranks: the plan of rank 0, 1, ...: its buffers (sizes in elements) and its steps, in order
            of submission.

    Example:
        >>> from ficco.lowering import lower
        >>> problem = ficco.Problem.chunked("all_gather_matmul", world=2, m=8, n=4, k=4)
        >>> machine = ficco.Machine.named("host")
        >>> plan = lower(problem, ficco.Schedule.named("hetero_fused_1d").resolve(2, machine))
        >>> [buffer.name for buffer in plan.ranks[0].buffers if buffer.role == "window"]
        ['gathered']
        >>> print(plan.ranks[0].steps[0].kind)
        wait
    """

    problem: Problem
    schedule: Schedule
    digest: int
    ranks: tuple[RankPlan, ...]


def digest_of(problem: Problem, schedule: Schedule, version: int = VERSION, **retired: str) -> int:
    """Return a 32-bit non-zero number that is equal for ranks that run the same call.

    It covers the version, the agreed values of the problem, and the schedule without its name, so
    that a rank computes it without lowering the other ranks.

    Args:
        problem: the problem.
        schedule: the resolved schedule.
        version: the version of the plan.
        retired: values of axes that only schedules of an earlier version have.
    """
    axes = {axis: value for axis, value in schedule.to_json().items() if axis != "name"}
    axes |= retired
    text = json.dumps([version, problem.agreed(), axes], sort_keys=True)
    number = int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little")
    return number or 1


def signal_place(signal: Signal) -> int:
    """Return the index of a signal within its window copy's signals."""
    return _BASES[signal.name] + signal.peer * SIGNALS[signal.name] + signal.chunk


def signal_at(rank: int, place: int) -> Signal:
    """Return the signal at an index of `signal_place`, in the window of `rank`."""
    name = max((n for n, base in _BASES.items() if base <= place), key=_BASES.__getitem__)
    peer, chunk = divmod(place - _BASES[name], SIGNALS[name])
    return Signal(rank, name, peer, chunk)


def has_mailbox(buffers: tuple[Buffer, ...]) -> bool:
    """Return whether peers write to mailboxes, not to windows."""
    return any(buffer.role == "mailbox" for buffer in buffers)


WINDOW_ALIGN = 256  # bytes; the window buffers of a plan are stored one after another


def window_places(buffers: tuple[Buffer, ...]) -> tuple[dict[str, int], int]:
    """Return the byte offset of each window buffer within a window copy, and the total bytes.

    In a plan with mailboxes, the same for mailboxes.
    """
    places: dict[str, int] = {}
    end = 0
    for buffer in buffers:
        if buffer.role in SHARED:
            places[buffer.name] = end
            size = buffer.rows * buffer.cols * ELEMENT_BYTES[buffer.dtype]
            end += -(-size // WINDOW_ALIGN) * WINDOW_ALIGN
    return places, end


class WindowBytes(NamedTuple):
    """Bytes that calls need in one copy of each rank's window, and of its mailbox."""

    window: int = 0
    mailbox: int = 0

    def has(self, other: WindowBytes) -> bool:
        """Return whether these bytes suffice for calls that need `other`."""
        return self.window >= other.window and self.mailbox >= other.mailbox

    def grown(self, need: WindowBytes) -> WindowBytes:
        """Return bytes that suffice for `need`, with a reserve to avoid growth at every call."""
        return WindowBytes(
            *[
                have if have >= wanted else max(wanted, have * 3 // 2)
                for have, wanted in zip(self, need, strict=True)
            ]
        )

    def joined(self, other: WindowBytes) -> WindowBytes:
        """Return bytes that suffice for both."""
        return WindowBytes(max(self.window, other.window), max(self.mailbox, other.mailbox))


def window_bytes_of(plan: RankPlan) -> WindowBytes:
    """Return the bytes that a rank's plan needs; they are equal on all ranks."""
    _, size = window_places(plan.buffers)
    return WindowBytes(0, size) if has_mailbox(plan.buffers) else WindowBytes(size, 0)
