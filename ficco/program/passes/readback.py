"""Readback: a program as a plan again, from the fields of its entries alone.

The verifier proves that plan, so it proves what runs, with every fusion in it. Nothing here reads
the plan that the program was compiled from.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.errors import PlanError
from ficco.lowering.one_kernel_steps import steps_of_one_kernel
from ficco.plan import (
    Part,
    Plan,
    Product,
    RankPlan,
    Region,
    Signal,
    Step,
    copy_unit,
    experts_step,
    mode_of,
    modes_in_step,
    signal_at,
)
from ficco.plan.tables import GatedPart
from ficco.program import (
    Bag,
    Copy,
    Exchange,
    Experts,
    Gated,
    Gemm,
    Launch,
    OneKernel,
    Pool,
    Program,
    SignalWrite,
    Sum,
    Wait,
)
from ficco.program.target import MOST_STORED


def read_back_plan(plan: Plan, programs: Sequence[Program]) -> Plan:
    """Return a plan whose ranks are read back from their programs.

    Args:
        plan: gives the problem, the schedule and the digest.
        programs: by rank; targets may differ.
    """
    return plan._replace(ranks=tuple([read_back(program) for program in programs]))


def read_back(program: Program) -> RankPlan:
    """Return the plan of one rank that a program carries out.

    Raises:
        PlanError: an entry cannot run on the program's target; the message names it.
    """
    steps: list[Step] = []
    inline = {launch.lane for launch in program.launches}
    for entry in program.entries:
        if isinstance(entry, Copy):
            steps.append(_copied(entry, program.target.name))
        elif isinstance(entry, Wait):
            wait = Step(entry.id, entry.lane, "wait", "none", signals=entry.signals)
            steps.append(wait._replace(after=entry.after))
        elif isinstance(entry, SignalWrite):
            _check_how(program, entry, entry.lane in inline)
            steps += _written(entry.id, entry.lane, entry.clears, entry.raises, entry.after)
        elif isinstance(entry, Exchange):
            steps.append(_exchanged(program, entry))
        elif isinstance(entry.work, OneKernel):
            work = entry.work
            steps += steps_of_one_kernel(entry.id, entry.lane, work.table, program.buffers)
        elif isinstance(entry.work, Gated):
            steps += _gated(program.rank, entry, entry.work)
        else:
            steps.append(_launched(entry))
    return RankPlan(program.rank, program.buffers, tuple(steps))


def _check_how(program: Program, write: SignalWrite, inline: bool) -> None:
    """Refuse signals that the target does not store in this way."""
    target, signals = program.target, (*write.clears, *write.raises)
    unwritable = [signal for signal in signals if not target.writes_to(signal.rank)]
    fits = {
        "thread": target.threads,
        "stream": not target.threads and not unwritable,
        "copy": not target.threads
        and not any(target.writes_to(signal.rank) for signal in write.clears),
        "kernel": inline and bool(target.store_from) and len(signals) <= MOST_STORED,
    }
    if not fits.get(write.how, False):
        raise PlanError(
            f"rank {program.rank}, entry {write.id!r}: a {write.how} cannot store its "
            f"{len(signals)} signals on target {target.name!r} in lane {write.lane!r}"
        )


def _copied(copy: Copy, target: str) -> Step:
    within = copy.source.rank == copy.target.rank
    kind = "local_copy" if within else "copy"
    unit = "sm" if within else copy_unit(target, same_device=False)
    return Step(copy.id, copy.lane, kind, unit, (copy.source,), (copy.target,), after=copy.after)


def _exchanged(program: Program, exchange: Exchange) -> Step:
    if not program.target.collectives:
        raise PlanError(
            f"rank {program.rank}, entry {exchange.id!r}: target {program.target.name!r} has no "
            "collectives"
        )
    name, lane, after, collective, reads, writes = exchange
    step = Step(name, lane, "collective", "sm", reads, writes, collective=collective)
    return step._replace(after=after)


def _written(
    name: str,
    lane: str,
    clears: tuple[Signal, ...],
    raises: tuple[Signal, ...],
    after: tuple[str, ...],
) -> list[Step]:
    """Return the steps that clear and then raise signals; the last one has the name."""
    steps = []
    if clears:
        cleared = name if not raises else f"{name}.clear"
        steps.append(Step(cleared, lane, "clear", "none", signals=clears, after=after))
    if raises:
        first = () if clears else after
        steps.append(Step(name, lane, "raise", "none", signals=raises, after=first))
    return steps


def _launched(launch: Launch) -> Step:
    """Return the step of a launch that neither waits for signals nor raises any."""
    work, step = launch.work, Step(launch.id, launch.lane, "gemm", "sm", after=launch.after)
    if isinstance(work, Gemm):
        products = tuple([_product(work, number) for number in range(work.number)])
        return step._replace(
            products=products, transpose_a=work.transpose_a, transpose_b=work.transpose_b
        )
    if isinstance(work, Experts):
        return experts_step(launch.id, launch.lane, work)._replace(after=launch.after)
    if isinstance(work, (Bag, Pool)):
        return _pooled(step, work.bags if isinstance(work, Pool) else (work,))
    if isinstance(work, Sum):
        terms = [_below(work.slots, i * work.distance) for i in range(work.number)]
        terms.insert(work.own_at, work.own)
        bias = () if work.bias is None else (work.bias,)
        return step._replace(kind="reduce", reads=(*terms, *bias), writes=(work.target,))
    assert not isinstance(work, (Gated, OneKernel))
    return step._replace(kind="reduce", reads=work.reads, writes=(work.target,))


def _pooled(step: Step, bags: tuple[Bag, ...]) -> Step:
    reads: list[Region] = []
    for bag in bags:
        reads += [bag.table, bag.indices, bag.bags]
        reads += [] if bag.weights is None else [bag.weights]
    modes = modes_in_step([mode_of(bag) for bag in bags])
    writes = tuple([bag.target for bag in bags])
    return step._replace(kind="bag", reads=tuple(reads), writes=writes, modes=modes)


def _product(gemm: Gemm, number: int) -> Product:
    a, c = _below(gemm.a, number * gemm.rows_a), _below(gemm.c, number * gemm.rows_c)
    return Product(a, gemm.b, c, gemm.accumulate, gemm.add)


def _below(region: Region, rows: int) -> Region:
    return region._replace(row0=region.row0 + rows, row1=region.row1 + rows)


# ---- gated GEMMs


def _gated(rank: int, launch: Launch, work: Gated) -> list[Step]:
    """Return a gated GEMM, and the steps by which it releases the window at its end."""
    parts = tuple([_part(rank, work, part) for part in work.parts])
    release = work.release
    name = launch.id if release is None else f"{launch.id}.tiles"
    step = Step(name, launch.lane, "gemm", "sm", parts=parts, transpose_b=work.turned,
                after=launch.after)  # fmt: skip
    # A part that adds terms waits for products of peers' kernels.
    spins = any(part.terms for part in work.parts)
    steps = [step._replace(concurrent=spins and any(part.waits for part in parts))]
    if release is not None:
        cleared = tuple([signal_at(rank, place) for place in release.cleared])
        raised = tuple([signal_at(peer, release.raised) for peer in release.peers])
        steps += _written(launch.id, launch.lane, cleared, raised, ())
    return steps


def _part(rank: int, work: Gated, part: GatedPart) -> Part:
    arrived = [term for term in part.terms if term is not None]
    places = [part.word, *[term.word for term in arrived]]
    waits = tuple([signal_at(rank, place) for place in dict.fromkeys(places) if place >= 0])
    cols = work.n - part.col if part.cols is None else part.cols
    if not part.rows or not cols:
        return Part(waits)
    source = work.own if part.source == "own" else work.window
    target = work.c if part.target == "c" else work.partial
    if source is None or target is None or (arrived and work.recv is None):
        raise PlanError(f"rank {rank}: {part} uses an operand that its gated launch does not have")
    begin, past = part.col, part.col + cols
    rows = (part.c_row, part.c_row + part.rows)
    add = [
        work.recv._replace(row0=term.row, row1=term.row + part.rows, col0=begin, col1=past)
        for term in arrived
        if work.recv is not None
    ]
    if work.bias is not None and part.target == "c":
        add.append(work.bias._replace(col0=begin, col1=past))
    box = (begin, past, 0, work.k) if work.turned else (0, work.k, begin, past)
    product = Product(
        Region(rank, source.buffer, part.a_row, part.a_row + part.rows, 0, work.k),
        Region(rank, work.b.buffer, *box),
        Region(rank, target.buffer, *rows, begin, past),
        work.begun,
        tuple(add),
    )
    raises = (signal_at(rank, part.signal),) if part.signal >= 0 else ()
    return Part(waits, (product,), raises=raises)
