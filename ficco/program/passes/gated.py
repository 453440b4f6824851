"""A gated step as launches: one launch per output, over the parts of its rows.

    gathering    own rows | rows of a peer's chunk, after its signal | ...   into the output
    scattering   rows for a peer, which raise a signal | ... | own rows      into two buffers
    summing      own rows plus the rows peers have pushed, after signals     into the output;
                 parts may raise a signal, too

Scattering and summing parts may accumulate into their target.

Parts are in the plan's order. The kernel itself waits for and raises the parts' signals, so the
engine enqueues nothing between them.
"""

from __future__ import annotations

from ficco.core.errors import EngineError, ScheduleError
from ficco.plan import Part, Product, RankPlan, Region, Step, signal_place
from ficco.plan.tables import Arrived, GatedPart, WindowRelease
from ficco.program import Gated

_OWN, _WINDOW, _RESULT, _PARTIAL, _RECV = "own", "window", "c", "partial", "recv"
_Work = list[tuple[Part, Product]]


def only_waits(plan: RankPlan, step: Step) -> bool:
    """Return whether the parts of a gated step wait for their rows and do no more."""
    windows = {buffer.name for buffer in plan.buffers if buffer.role == "window"}
    return step.kind == "gemm" and not any(
        part.raises
        or any(product.accumulate or _split(product.add, windows)[0] for product in part.products)
        for part in step.parts
    )


def launches_of(plan: RankPlan, step: Step, leaves: int = 0) -> list[Gated]:
    """Return a gated step as launches.

    Args:
        plan: of a rank.
        step: of the plan.
        leaves: multiprocessors that launches leave free if they wait.

    Raises:
        ScheduleError: no kernel supports the parts in one launch.
    """
    if step.kind != "gemm" or step.transpose_a:
        raise _refusal(step, "its kernel supports only GEMMs along rows")
    pushes = any(part.raises for part in step.parts)
    works_by_target: dict[tuple[str, str], _Work] = {}
    for part in step.parts:
        for product in part.products:
            key = (product.b.buffer, "" if pushes else product.c.buffer)
            works_by_target.setdefault(key, []).append((part, product))
    launches = [_launch(plan, step, works) for works in works_by_target.values()]
    return [work._replace(leaves=leaves) if _waits(work) else work for work in launches]


def _waits(work: Gated) -> bool:
    """Return whether a part waits for a signal."""
    return any(part.word >= 0 or part.terms for part in work.parts)


def _launch(plan: RankPlan, step: Step, works: _Work) -> Gated:
    first = works[0][1]
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    results = [product for part, product in works if not part.raises]
    result = (results or [first])[0]
    windows = {name for name, role in roles.items() if role == "window"}
    _, bias = _split(result.add, windows)
    used: dict[str, Region] = {}  # one region of every matrix, by its role in the launch
    parts = []
    for part, product in works:
        terms, added = _split(product.add, windows)
        _check(plan.rank, step, part, product, terms, added)
        source = _WINDOW if roles[product.a.buffer] == "window" else _OWN
        if terms and source == _WINDOW:
            raise _refusal(step, "rows that peers have pushed get no terms that they have pushed")
        target = _RESULT if product.c.buffer == result.c.buffer else _PARTIAL
        if product.accumulate != first.accumulate:
            raise _refusal(step, "either all parts accumulate into their targets, or none")
        begin, past = _columns(product, step.transpose_b)
        expected = [row._replace(col0=begin, col1=past) for row in bias if target == _RESULT]
        if list(added) != expected:
            raise _refusal(step, "all rows of a result get the same bias, and pushed rows get none")
        for term in terms:
            if used.setdefault(_RECV, term).buffer != term.buffer or term.col0 != product.c.col0:
                raise _refusal(step, f"the term that it adds to {product.c} is in {term}")
        for role, region in ((source, product.a), (target, product.c), ("b", product.b)):
            if used.setdefault(role, region).buffer != region.buffer:
                raise _refusal(step, f"it uses both {region.buffer!r} and {used[role].buffer!r}")
        if product.a.cols != plan.buffer(product.a.buffer).cols:
            raise _refusal(step, f"it multiplies {product.a}, which is only a part of the depth")
        if begin != product.c.col0:
            raise EngineError(f"step {step.id!r}: {product.c} does not begin at column {begin}")
        parts.append(
            GatedPart(
                source,
                product.a.row0,
                product.c.row0,
                product.a.rows,
                signal_place(part.waits[0]) if part.waits and not terms else -1,
                signal_place(part.raises[0]) if part.raises else -1,
                target,
                begin,
                past - begin,
                _summed(terms, part) if terms else (),
            )
        )
    summed = [bool(part.terms) for part in parts]
    if any(summed) and not all(summed):
        raise _refusal(step, "parts that are summed need a separate launch")
    if _WINDOW in used and (_PARTIAL in used or any(part.signal >= 0 for part in parts)):
        raise _refusal(step, "parts that wait for their rows must be results and raise no signal")
    whole = {role: _whole(plan, region) for role, region in used.items()}
    b = whole["b"]
    return Gated(
        parts=tuple(parts),
        n=b.rows if step.transpose_b else b.cols,
        k=first.a.cols,
        dtype=plan.buffer(first.a.buffer).dtype,
        b=b,
        turned=step.transpose_b,
        bias=_whole(plan, bias[0]) if bias else None,
        c=whole[_RESULT],
        own=whole.get(_OWN),
        window=whole.get(_WINDOW),
        partial=whole.get(_PARTIAL),
        recv=whole.get(_RECV),
        begun=first.accumulate,
    )


def _split(
    add: tuple[Region, ...], windows: set[str]
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Return the terms that peers have pushed, and the other terms."""
    return (
        tuple([term for term in add if term.buffer in windows]),
        tuple([term for term in add if term.buffer not in windows]),
    )


def _summed(terms: tuple[Region, ...], part: Part) -> tuple[Arrived | None, ...]:
    """Return a sum's terms in the kernel's form, the own product first.

    The kernel waits for all signals of a part before it reads any term, so the pairing of terms
    and signals does not matter.
    """
    signals = [signal_place(signal) for signal in part.waits]
    signals += [-1] * (len(terms) - len(signals))
    return (
        None,
        *[Arrived(term.row0, signal) for term, signal in zip(terms, signals, strict=True)],
    )


def _check(
    rank: int,
    step: Step,
    part: Part,
    product: Product,
    terms: tuple[Region, ...],
    added: tuple[Region, ...],
) -> None:
    """Raise an error if a part waits for, adds or raises more than a launch can."""
    if len(part.waits) > max(len(terms), 1) or len(part.raises) > 1:
        raise _refusal(
            step, "a part waits for at most one signal, or one per term, and raises at most one"
        )
    regions = (product.a, product.b, product.c, *product.add)
    signals = (*part.waits, *part.raises)
    if any(signal.name == "entered" for signal in signals):  # its value is a digest, not 1
        raise _refusal(step, "a part waits for `entered`, which needs a wait step of its own")
    if any(signal.copy for signal in signals) or any(region.copy for region in regions):
        raise _refusal(step, "a launch uses only the call's own copy of the window")
    if any(region.rank != rank for region in regions):
        raise EngineError(
            f"step {step.id!r} computes on buffers of other ranks; engines compute in their own "
            "rank's buffers, so push the result by a copy step"
        )
    if len(added) > 1 or any(r.rows != 1 for r in added):
        raise _refusal(step, "a part is one product, pushed rows of peers, and at most one bias")


def _columns(product: Product, turned: bool) -> tuple[int, int]:
    b = product.b
    return (b.row0, b.row1) if turned else (b.col0, b.col1)


def _whole(plan: RankPlan, region: Region) -> Region:
    buffer = plan.buffer(region.buffer)
    return region._replace(row0=0, row1=buffer.rows, col0=0, col1=buffer.cols)


def _refusal(step: Step, why: str) -> ScheduleError:
    return ScheduleError(
        f"step {step.id!r}: compute='gated' as one launch: {why}; the nearest that works is "
        "compute='per_chunk'"
    )


Ends = tuple[Step, Step]  # the `clear` and the `raise`


def ends_of(plan: RankPlan) -> dict[str, Ends]:
    """Return the `clear` and `raise` steps that release the window behind a gated step.

    The two steps directly follow the gated step in its lane and have no `after`, and the parts of
    the gated step wait for the rows that they multiply.
    """
    if not any(step.parts for step in plan.steps):
        return {}
    roles = {buffer.name: buffer.role for buffer in plan.buffers}
    lanes: dict[str, list[Step]] = {}
    for step in plan.steps:
        lanes.setdefault(step.lane, []).append(step)
    ends = {}
    for steps in lanes.values():
        for step, clear, leave in zip(steps, steps[1:], steps[2:], strict=False):
            reads = [p.a.buffer for part in step.parts if part.waits for p in part.products]
            if (
                any(roles[name] == "window" for name in reads)
                and (clear.kind, leave.kind) == ("clear", "raise")
                and not (clear.after or leave.after)
            ):
                ends[step.id] = clear, leave
    return ends


def with_release(launch: Gated, ends: Ends) -> Gated | None:
    """Return a launch that also releases the window when it ends; None if it cannot."""
    if not any(part.source == "window" and part.rows and part.cols for part in launch.parts):
        return None  # the kernel has no program that waits for the window
    clear, leave = ends
    cleared = tuple([signal_place(signal) for signal in clear.signals])
    peers = tuple([signal.rank for signal in leave.signals])
    (raised,) = {signal_place(signal) for signal in leave.signals}
    return launch._replace(release=WindowRelease(cleared, raised, peers))
