"""Edits of steps of kind "experts": what each reads, writes and is told changes in one place."""

from __future__ import annotations

import random
from typing import Any

from edits import replaced, steps_of, with_steps

from ficco.plan import EXPERT_MODES, Plan, Region, Step


def bend_experts(plan: Plan, rng: random.Random) -> Plan | None:
    """Change one thing of a step, or cut the step in two."""
    places = [
        (rank, index)
        for rank, entry in enumerate(plan.ranks)
        for index, step in enumerate(entry.steps)
        if step.kind == "experts"
    ]
    if not places:
        return None
    rank, index = rng.choice(places)
    steps = steps_of(plan, rank)
    change = rng.choice((_told, _told, _region, _region, _region, _order, _missing, in_two))
    pieces = change(steps[index], plan, rng)
    if pieces is None:
        return None
    return with_steps(plan, rank, replaced(steps, index, pieces))


def _told(step: Step, plan: Plan, rng: random.Random) -> list[Step] | None:
    """Another mode, other sizes, or weights stored otherwise."""
    sizes = step.routed
    assert sizes is not None
    modes = [mode for mode in EXPERT_MODES if mode != step.modes[0]]
    changed = [step._replace(modes=(mode,)) for mode in modes]
    for other in (
        sizes._replace(experts=sizes.experts + 1), sizes._replace(topk=sizes.topk + 1),
        sizes._replace(rows=sizes.rows[::-1]),
        sizes._replace(rows=(sizes.rows[0] + 1, *sizes.rows[1:])),
    ):  # fmt: skip
        changed.append(step._replace(routed=other))
    if step.modes[0] != "sum":
        changed.append(step._replace(transpose_b=not step.transpose_b))
    return [rng.choice(changed)]


def _region(step: Step, plan: Plan, rng: random.Random) -> list[Step] | None:
    """Another rank, box, buffer, copy or part of a region that it reads or writes."""
    field = rng.choice(("reads", "writes"))
    regions = list(getattr(step, field))
    at, by = rng.randrange(len(regions)), rng.choice((-1, 1))
    region: Region = regions[at]
    names = [buffer.name for buffer in plan.ranks[region.rank].buffers]
    ranks = range(plan.problem.world)
    other: dict[str, Any] = rng.choice((
        {"rank": rng.choice(ranks)}, {"of": rng.choice((-1, *ranks))},
        {"of": rng.choice((-1, *ranks))}, {"buffer": rng.choice(names)}, {"copy": 1},
        {"row0": region.row0 + by}, {"row1": region.row1 + by}, {"col1": region.col1 - 1},
        {"row0": region.row0 + by, "row1": region.row1 + by},
    ))  # fmt: skip
    regions[at] = region._replace(**other)
    return [step._replace(**{field: tuple(regions)})]


def _order(step: Step, plan: Plan, rng: random.Random) -> list[Step] | None:
    """Exchange two of the regions that it reads, or that it writes."""
    field = rng.choice(("reads", "writes"))
    regions = list(getattr(step, field))
    if len(regions) < 2:
        return None
    i, j = rng.sample(range(len(regions)), 2)
    regions[i], regions[j] = regions[j], regions[i]
    return [step._replace(**{field: tuple(regions)})]


def _missing(step: Step, plan: Plan, rng: random.Random) -> list[Step] | None:
    """Leave out what it writes for one rank, with what it reads for that."""
    if len(step.writes) < 2:
        return None
    at = rng.randrange(len(step.writes))
    reads, writes = list(step.reads), list(step.writes)
    del writes[at]
    if step.modes[0] == "gather":
        del reads[2 + at]
    return [step._replace(reads=tuple(reads), writes=tuple(writes))]


def in_two(
    step: Step, plan: Plan, rng: random.Random, lanes: tuple[str, ...] = ("another",)
) -> list[Step] | None:
    """Gather or sum in two steps: some ranks or tokens, then the others, perhaps in other lanes."""
    mode, topk = step.modes[0], step.routed.topk if step.routed else 1
    most = len(step.writes) if mode == "gather" else step.writes[0].rows
    if mode == "return" or most < 2:
        return None
    cut = rng.randrange(1, most)
    halves = []
    for name, part in (("a", slice(0, cut)), ("b", slice(cut, most))):
        if mode == "gather":
            reads, writes = (*step.reads[:2], *step.reads[2:][part]), step.writes[part]
        else:
            (table, source), (target,) = step.reads, step.writes
            low, high = part.start, part.stop
            reads = (table, _cut(source, low * topk, high * topk))
            writes = (_cut(target, low, high),)
        halves.append(step._replace(id=f"{step.id}.{name}", reads=reads, writes=writes))
    return [halves[0], halves[1]._replace(lane=rng.choice((step.lane, *lanes)))]


def _cut(region: Region, low: int, high: int) -> Region:
    return region._replace(row0=region.row0 + low, row1=region.row0 + high)
