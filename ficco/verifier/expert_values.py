"""Values of steps of kind "experts", as `values` tracks them.

A step's result depends on a routing table, which the proof does not know. The proof shows that a
step reads the whole table of its rank, the whole weight of its experts, and all tokens of a rank or
all rows of the experts; that the part of each rank is written once; and that everything has
arrived. It takes on trust that a kernel follows the table, and that the tables of all ranks are of
the same expert numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from ficco.operators.symbolic import (
    Content,
    Source,
    Sum,
    combined,
    combined_name,
    returned_name,
    rows_name,
)
from ficco.plan import Experts, Plan, Region
from ficco.verifier.tiles import Box

Parts = list[tuple[Box, Content]]


class Values(NamedTuple):
    """What a step reads.

    Attributes:
        plan: of all ranks.
        rank: of the step.
        contents: of the regions that it reads.
    """

    plan: Plan
    rank: int
    contents: Mapping[Region, Parts]

    def wrong_operands(self, work: Experts) -> str:
        """Return why the table or the weight are not those of the problem, or ""."""
        problem, roles = self.plan.problem, {"routing": work.routing, "experts": work.weight}
        operands = {o.name: o for o in problem.operands(self.rank)}
        for role, region in roles.items():
            if region is None:
                continue
            operand = operands.get(region.buffer)
            if operand is None or operand.role != role or region.rank != self.rank:
                return f"{region} is not the {role} of rank {self.rank}"
            if region.area != operand.rows * operand.cols:
                return f"{region} is not whole"
        if work.weight is not None and work.turned != problem.outputs[0].operand_transposed:
            return f"turned={work.turned} does not fit {work.weight}"
        return ""

    def source_of(self, region: Region) -> Source | None:
        """Return the operand in a region, seen from its first element; None: it is no operand."""
        parts = self.contents[region]
        if len(parts) != 1 or not isinstance(parts[0][1], Source):
            return None
        source = parts[0][1]
        return Source(source.owner, source.down + region.row0, source.right + region.col0)


def gathered(values: Values, work: Experts) -> list[Parts] | str:
    """Return the contents of the targets of mode "gather", or what is wrong."""
    wrong, problem = values.wrong_operands(work), values.plan.problem
    if wrong:
        return wrong
    results: list[Parts] = []
    for source, target in zip(work.sources, work.targets, strict=True):
        s = target.of
        if not 0 <= s < problem.world or source.rows != problem.rows[s]:
            return f"{target} is not the part of the rank whose tokens are in {source}"
        if values.source_of(source) != Source((s, "x"), 0, 0) or source.cols != problem.k:
            return f"{source} does not hold all tokens of rank {s}"
        results.append(_named(rows_name(_name(work), s), values.rank, target, 0))
    return results


def returned(values: Values, work: Experts) -> list[Parts] | str:
    """Return the contents of the targets of mode "return", or what is wrong."""
    wrong, plan, rank = values.wrong_operands(work), values.plan, values.rank
    if wrong:
        return wrong
    (source,) = work.sources
    rows = plan.ranks[rank].buffer("x").rows
    if values.source_of(source) != Source((rank, "x"), 0, 0) or source.rows != rows:
        return f"{source} does not hold all rows of the experts of rank {rank}"
    results: list[Parts] = []
    slot = 0
    for owner, count in enumerate(plan.problem.rows):
        high = count * work.sizes.topk
        if not high:
            continue
        target = work.targets[len(results)] if len(results) < len(work.targets) else None
        if target is None or target.of != rank or target.rows != high:
            return (
                f"its target {target} is not the part of rank {rank} of the slots of rank {owner}"
            )
        results.append(_named(returned_name(_name(work)), rank, target, slot))
        slot += high
    return results if len(results) == len(work.targets) else "it has more targets than owners"


def summed(values: Values, work: Experts) -> list[Parts] | str:
    """Return the contents of the target of mode "sum", or what is wrong."""
    wrong, ((source,), (target,)) = values.wrong_operands(work), (work.sources, work.targets)
    sizes, topk, rank = work.sizes, work.sizes.topk, values.rank
    if source.of not in (-1, rank):
        return f"{source} is not what the experts of rank {rank} return, nor what all return"
    own = sizes.first_slot(rank), sizes.first_slot(rank + 1)
    begin, end = (0, sizes.slots) if work.adds_own else own
    if wrong or source.rows != end - begin or source.rows != target.rows * topk:
        return wrong or f"{source} and {target} do not have slots {begin} to {end} and their tokens"
    results: Parts = []
    for box, content in values.contents[source]:
        if (box.r0 - source.row0) % topk or (box.r1 - source.row0) % topk:
            return f"{source} holds different rows for slots of one token"
        terms = [content] if isinstance(content, Source) else _terms(content)
        sums: list[Content] = []
        for term in terms:
            if term is None or not term.owner[1].startswith(returned_name("")):
                return f"{source} holds other than rows that experts return"
            slot, weight = term.down + source.row0, term.owner[1][len(returned_name("")) :]
            if slot != begin:
                return f"{source} begins at slot {slot}, and not at {begin}"
            down = slot // topk - target.row0
            owner = (term.owner[0], combined_name(weight))
            sums.append(Source(owner, down, term.right + source.col0 - target.col0))
        rows = [target.row0 + (edge - source.row0) // topk for edge in (box.r0, box.r1)]
        right = source.col0 - target.col0
        results.append((Box(rows[0], rows[1], box.c0 - right, box.c1 - right), combined(sums)))
    return [results]


def _name(work: Experts) -> str:
    assert work.weight is not None
    return work.weight.buffer


def _named(name: str, rank: int, target: Region, slot: int) -> Parts:
    """Return a target that holds rows of a name, the first of them row `slot`."""
    content = Source((rank, name), slot - target.row0, -target.col0)
    return [(Box(*target[2:6]), content)]


def _terms(content: Sum) -> Sequence[Source | None]:
    """Return the terms of a sum that are elements of operands; None for any other."""
    return [
        Source(*cast(tuple[tuple[int, str], int, int], key[1:]))
        if key[0] == "one" and intervals == ((0, 1),)
        else None
        for key, intervals in content.terms
    ]
