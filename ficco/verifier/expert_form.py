"""Form of steps of kind "experts": their sizes, the parts of ranks, and the places of rows.

A kernel finds a row by the number of its token or slot alone. So it takes on trust where the rows
of each rank lie, and the plan must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from ficco.operators.problem import Problem, offsets
from ficco.plan import EXPERT_MODES, Experts, Plan, Region, Step, experts_of

Found = tuple[str, str]  # what is wrong, and what to do


def check_experts(plan: Plan) -> Iterator[tuple[int, str, str, str]]:
    """Yield rank, step, what is wrong and what to do, for all ranks of a plan."""
    by_parts: dict[tuple[int, str], bool] = {}
    widths = {(entry.rank, b.name): b.cols for entry in plan.ranks for b in entry.buffers}
    for entry in plan.ranks:
        for step in entry.steps:
            if step.kind == "experts":
                for what, mend in _experts(plan.problem, entry.rank, step, widths):
                    yield entry.rank, step.id, what, mend
            written = [*step.writes, *(product.c for product in step.products)]
            for work in step.parts:
                written += [*work.writes, *(product.c for product in work.products)]
            for region in written:
                parts = by_parts.setdefault((region.rank, region.buffer), region.of >= 0)
                if parts != (region.of >= 0):
                    what = f"it writes {region}; other steps write this buffer"
                    what += " by parts of ranks" if parts else " as a whole"
                    yield entry.rank, step.id, what, "write all of a buffer in one of these ways"


def _experts(
    problem: Problem, rank: int, step: Step, widths: dict[tuple[int, str], int]
) -> Iterator[Found]:
    """Yield what is wrong with the regions of a step."""
    if step.routed is None or len(step.modes) != 1 or step.modes[0] not in EXPERT_MODES:
        yield "it has no sizes or no mode", f"give routed, and one of {', '.join(EXPERT_MODES)}"
        return
    if not problem.flow.routes or step.routed != problem.routed:
        yield f"its sizes are {step.routed}", "give the experts, topk and rows of the problem"
        return
    before = 1 if step.modes[0] == "sum" else 2
    sources = len(step.reads) - before
    fits = sources == (len(step.writes) if step.modes[0] == "gather" else 1)
    if not fits or not step.writes or (before == 1 and len(step.writes) > 1):
        yield (
            f"it reads {len(step.reads)} regions and writes {len(step.writes)}",
            "give the routing table, the weight (not for sums), the sources and the targets",
        )
        return
    work = experts_of(step)
    yield from _parts_of_ranks(work)
    yield from _widths(work)
    if work.mode == "gather":
        yield from _gathered(work, rank, widths)
    if work.mode == "return":
        yield from _returned(work, rank, widths)


def _widths(work: Experts) -> Iterator[Found]:
    width = work.sources[0].cols
    if work.weight is not None:
        high, wide = work.weight.rows, work.weight.cols
        inner, width = (wide, high) if work.turned else (high, wide)
        count = work.sizes.experts
        inner, width = (inner, width // count) if work.turned else (inner // count, width)
        if any(source.cols != inner for source in work.sources):
            yield (
                f"{work.weight} has {inner} rows per expert, unlike the columns of its sources",
                "make the sizes agree",
            )
    for target in work.targets:
        if target.cols != width:
            yield f"{target} has not the {width} columns of the result", "make the sizes agree"


def _parts_of_ranks(work: Experts) -> Iterator[Found]:
    """Yield what is wrong with `Region.of`, and with the places of what a gather writes."""
    whole = [work.routing, *([work.weight] if work.weight else ())]
    whole += work.targets if work.mode == "sum" else work.sources
    for region in whole:
        if region.of >= 0:
            yield f"{region} is the part of a rank", "leave out of, where all rows are used"
    if work.mode == "gather" and len({target._replace(of=-1) for target in work.targets}) > 1:
        places = " and ".join(map(str, work.targets))
        yield f"{places} are different boxes", "write the parts of all ranks to one box"


def _gathered(work: Experts, rank: int, widths: dict[tuple[int, str], int]) -> Iterator[Found]:
    """Yield what is wrong with the tokens that a step reads: row first[s] + t is token t of s."""
    first, full = offsets(work.sizes.rows), [s for s, count in enumerate(work.sizes.rows) if count]
    places = [(source, first[target.of]) for source, target in zip(work.sources, work.targets,
              strict=True) if source.buffer != "x" and 0 <= target.of < len(first)]  # fmt: skip
    yield from _at(places, widths)
    ranks = sorted([target.of for target in work.targets])
    if ranks not in (full, [rank], [s for s in full if s != rank]):
        yield (
            f"it multiplies the tokens of ranks {ranks}",
            "multiply those of all ranks, of its own, or of all others",
        )


def _returned(work: Experts, rank: int, widths: dict[tuple[int, str], int]) -> Iterator[Found]:
    """Yield what is wrong with the places of slots: all in one buffer, or each at its owner."""
    full = [owner for owner, count in enumerate(work.sizes.rows) if count]
    pairs = list(zip(work.targets, full, strict=False))
    if all(target.rank == rank for target in work.targets):
        yield from _at([(target, work.sizes.first_slot(owner)) for target, owner in pairs], widths)
        return
    for target, owner in pairs:
        if target.rank != owner:
            yield f"{target} is not at the owner of its slots", f"store them at rank {owner}"
    yield from _at([(target, 0) for target, _ in pairs], widths)


def _at(places: list[tuple[Region, int]], widths: dict[tuple[int, str], int]) -> Iterator[Found]:
    """Yield which regions do not begin at their row, or are not as wide as their one buffer."""
    for region, row in places:
        wide = region.cols == widths[region.rank, region.buffer]
        if region.row0 != row or not wide or region.buffer != places[0][0].buffer:
            yield (
                f"{region} is not where kernels look for these rows",
                f"begin at row {row} of a buffer of {region.cols} columns, the same for all",
            )
