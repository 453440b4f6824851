"""Form: checks of each step alone. Regions are in buffers, sizes and dtypes agree, units fit kinds.

There is no order and there are no values here. Later stages rely on these checks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ficco.core.machine import COLLECTIVES
from ficco.operators.problem import MODES
from ficco.plan import (
    SHARED,
    UNITS,
    Buffer,
    Part,
    Plan,
    Product,
    RankPlan,
    Region,
    Step,
    bags_of,
    operand_buffers,
    regions_of,
)
from ficco.verifier.expert_form import check_experts
from ficco.verifier.tiles import Box, Tiles

# Fields that each kind of step uses; all others are empty.
_FIELDS: dict[str, tuple[str, ...]] = {
    "copy": ("reads", "writes"),
    "local_copy": ("reads", "writes"),
    "raise": ("signals",),
    "wait": ("signals",),
    "clear": ("signals",),
    "gemm": ("products", "parts"),
    "reduce": ("reads", "writes"),
    "collective": ("reads", "writes", "collective"),
    "bag": ("reads", "writes", "parts", "modes"),
    "experts": ("reads", "writes", "modes", "routed"),
}
_EMPTY = {
    kind: [
        field
        for field in (
            "reads",
            "writes",
            "signals",
            "products",
            "parts",
            "collective",
            "modes",
            "routed",
        )
        if field not in used
    ]
    for kind, used in _FIELDS.items()
}


def check_form(plan: Plan) -> list[Violation]:
    """Return the violations of form on all ranks."""
    world = plan.problem.world
    if [entry.rank for entry in plan.ranks] != list(range(world)):
        ranks = [entry.rank for entry in plan.ranks]
        return [
            _bad(0, "-", "ranks", f"the plan has ranks {ranks}, the problem's world is {world}",
                 f"give the plans of ranks 0 to {world - 1}, in order")
        ]  # fmt: skip
    buffers = {
        (entry.rank, buffer.name): buffer for entry in plan.ranks for buffer in entry.buffers
    }
    pushed = {
        region.buffer
        for entry in plan.ranks
        for step in entry.steps
        for region in _written(step)
        if region.rank != entry.rank
    }
    violations: list[Violation] = []
    for entry in plan.ranks:
        violations += _buffers(plan, entry)
        violations += _steps(entry, buffers, pushed)
    found = check_experts(plan)
    return violations + [_bad(rank, step, "form", what, mend) for rank, step, what, mend in found]


def _buffers(plan: Plan, entry: RankPlan) -> Iterator[Violation]:
    rank = entry.rank
    seen: dict[str, Buffer] = {}
    for buffer in entry.buffers:
        if buffer.name in seen:
            yield _bad(rank, buffer.name, "buffers", "declared twice", "give each its own name")
        seen[buffer.name] = buffer
        copies = {"window": (1, 2), "mailbox": (2,)}.get(buffer.role, (1,))
        if buffer.copies not in copies:
            yield _bad(rank, buffer.name, "buffers", f"{buffer.copies} copies",
                       "a window has 1 or 2 copies, a mailbox 2, other buffers 1")  # fmt: skip
    windows = [buffer for buffer in entry.buffers if buffer.role in SHARED]
    first = [buffer for buffer in plan.ranks[0].buffers if buffer.role in SHARED]
    if windows != first:
        yield _bad(rank, "-", "buffers", "its windows differ from those of rank 0",
                   "declare the same windows, in the same order, on every rank")  # fmt: skip
    if len({buffer.role for buffer in windows}) > 1:
        yield _bad(rank, "-", "buffers", "it has windows and mailboxes, whose words differ",
                   "declare only one of the two roles")  # fmt: skip
    for needed in operand_buffers(plan.problem, rank):
        declared = seen.pop(needed.name, None)
        if declared is None or declared != needed:
            what = f"found {declared}" if declared else "it is missing"
            yield _bad(rank, needed.name, "buffers", f"the problem needs {needed}; {what}",
                       "declare the needed buffer")  # fmt: skip
    kept = {
        "float32",
        plan.problem.dtype,
        *[one.dtype for one in plan.problem.operator.attachments],
    }
    for buffer in entry.buffers:
        if buffer.role in (*SHARED, "workspace") and buffer.dtype not in kept:
            yield _bad(rank, buffer.name, "buffers", f"a {buffer.role} of {buffer.dtype} for a "
                       f"problem in {plan.problem.dtype}: it would lose digits",
                       f"make it {plan.problem.dtype} or float32")  # fmt: skip
    for extra in seen.values():
        if extra.role not in (*SHARED, "workspace"):
            yield _bad(rank, extra.name, "buffers", f"a buffer of role {extra.role!r} that the "
                       "problem does not have", "make it a workspace")  # fmt: skip


def _steps(
    entry: RankPlan, buffers: dict[tuple[int, str], Buffer], pushed: set[str]
) -> Iterator[Violation]:
    """Yield the violations of a rank's steps; `pushed`: windows that ranks write at their peers."""
    seen: set[str] = set()
    for step in entry.steps:
        if step.id in seen:
            yield _bad(entry.rank, step.id, "steps", "its id is not unique", "rename one step")
        for other in step.after:
            if other not in seen:
                yield _bad(entry.rank, step.id, "steps",
                           f"after={other!r} names no earlier step of this rank",
                           "name a step before this one")  # fmt: skip
        seen.add(step.id)
        for message, mend in _step(entry.rank, step, buffers, pushed):
            yield _bad(entry.rank, step.id, "form", message, mend)


def _step(
    rank: int, step: Step, buffers: dict[tuple[int, str], Buffer], pushed: set[str]
) -> Iterator[tuple[str, str]]:
    if step.unit not in UNITS[step.kind]:
        units = " or ".join(UNITS[step.kind])
        yield f"a {step.kind} on unit {step.unit!r}", f"its unit is {units}"
    for field in _EMPTY[step.kind]:
        if getattr(step, field):
            yield f"a {step.kind} has no {field}", f"leave {field} out"
    least = 0 if step.kind == "collective" else 1  # a block for some rank may have no rows
    regions = _all_regions(step)
    outside = [region for region in regions if not _inside(region, buffers, least)]
    for region in outside:
        yield f"{region} is not inside a buffer", "keep regions within their buffers"
    if outside:
        return
    for region in regions:
        if region.copy and buffers[region.rank, region.buffer].role == "mailbox":
            yield f"{region} is in the copy of the previous call", "use the copy of this call"
        if region.rank != rank and buffers[region.rank, region.buffer].role not in SHARED:
            yield f"{region} is not a window, so rank {rank} cannot access it", "use a window"
    for region in _written(step):
        role = buffers[region.rank, region.buffer].role
        if role in ("input", "weight"):
            yield f"it writes {region}, an operand of the caller", "write elsewhere"
        if region.buffer in pushed and role == "window" and step.kind in ("gemm", "reduce", "bag"):
            # A failed call fills windows with NaN, so that results of missing data are NaN, too. A
            # result that is computed where a peer pushes would not be marked so.
            yield (
                f"it computes {region} in a window that peers push to, where a late push of a "
                "failed call may overwrite it unnoticed",
                "compute it in a workspace, or in a window that no peer pushes to",
            )
    yield from _parts(step)
    yield from _shapes(step, buffers)
    if regions:
        yield from _overlaps(step)


def _parts(step: Step) -> Iterator[tuple[str, str]]:
    if step.parts and (step.products or step.reads or step.writes or step.modes):
        yield "it has parts, and work outside them", "put all work into parts"
    if step.kind != "bag" and any(part.modes for part in step.parts):
        yield f"a part of a {step.kind} has modes", "leave modes out"
    waits = any(part.waits for part in step.parts)
    both = waits and any(part.raises for part in step.parts)
    if both and not step.concurrent:
        yield "it waits and signals, but concurrent is False", "set concurrent to True"
    if step.concurrent and not waits:
        yield "it does not wait, but concurrent is True", "set concurrent to False"


def _shapes(step: Step, buffers: dict[tuple[int, str], Buffer]) -> Iterator[tuple[str, str]]:
    def dtype(region: Region) -> str:
        return buffers[region.rank, region.buffer].dtype

    works: list[Step | Part] = [*step.parts] if step.parts else [step]
    for work in works:
        reads, writes = work.reads, work.writes
        if step.kind in ("copy", "local_copy"):
            if len(reads) != len(writes) or not reads:
                yield f"{len(reads)} regions read, {len(writes)} written", "pair them"
            for source, target in zip(reads, writes, strict=False):
                if (source.rows, source.cols) != (target.rows, target.cols):
                    yield f"{source} and {target} differ in size", "copy between equal boxes"
                if dtype(source) != dtype(target):
                    yield f"{source} and {target} differ in dtype", "convert by a reduce step"
        elif step.kind == "reduce":
            if len(writes) != 1:
                yield f"{len(writes)} regions written", "sum into one region"
            elif any(r.cols != writes[0].cols or r.rows not in (1, writes[0].rows) for r in reads):
                yield f"terms of {writes[0]} differ from it in size", "sum equal boxes"
        elif step.kind == "bag":
            yield from _bags(work)
        elif step.kind == "collective":
            if step.collective not in COLLECTIVES:
                yield f"collective={step.collective!r}", f"it is one of {', '.join(COLLECTIVES)}"
            if len({(region.rank, dtype(region)) for region in (*reads, *writes)}) > 1:
                yield "its regions differ in rank or dtype", "use own regions of one dtype"
        elif step.kind == "gemm" and (reads or writes):
            yield "a gemm reads and writes only by products", "leave reads and writes out"
    for region in _all_regions(step) if step.kind != "experts" else ():
        if region.of >= 0:
            yield f"{region} is a part, and a {step.kind} takes all rows", "leave out of"
    for product in _products(step):
        operand = buffers[product.a.rank, product.a.buffer]
        whole = operand.role == "input" and product.a.cols == operand.cols
        deep = whole and not step.transpose_a
        yield from _product(step, product, deep or dtype(product.c) == "float32")
    if step.kind in ("raise", "wait", "clear") and not step.signals:
        yield f"a {step.kind} without signals", "name its signals, or leave the step out"


def _bags(work: Step | Part) -> Iterator[tuple[str, str]]:
    modes = work.modes or ("sum",) * len(work.writes)
    if len(modes) != len(work.writes) or not set(modes) <= set(MODES):
        yield (
            f"its modes are {list(modes)} for {len(work.writes)} regions written",
            f"give one of {', '.join(MODES)} per region",
        )
        return
    if len(work.reads) != 3 * len(modes) + modes.count("weighted"):
        yield (
            "it does not read three regions per region written, and one more if weighted",
            "give table, indices and offsets, and weights if the mode is weighted",
        )
        return
    for bag in bags_of(work):
        if (bag.bags.cols, bag.table.cols) != (bag.target.rows, bag.target.cols):
            yield f"{bag.target} does not fit its bags and table", "give one row per bag"


def _product(step: Step, product: Product, adds: bool) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a product.

    A product may accumulate into c (`adds`) if c is float32 or the product has the whole depth of
    an operand. Then a sum over several pairs is rounded only once per pair.
    """
    a, b, c = product.a, product.b, product.c
    m, k = (a.cols, a.rows) if step.transpose_a else (a.rows, a.cols)
    k2, n = (b.cols, b.rows) if step.transpose_b else (b.rows, b.cols)
    if (m, n) != (c.rows, c.cols) or k != k2:
        yield (
            f"{a} . {b} is [{m}, {k}] . [{k2}, {n}], which does not give {c}",
            "make the sizes agree",
        )
    for region in product.add:
        if region.cols != n or region.rows not in (1, m):
            yield f"{region} cannot be added to {c}", "add equal boxes, or a single row"
    if product.accumulate and not adds:
        yield (
            f"it adds a part of k to {c}, so sums would be rounded more than once",
            "accumulate in a float32 workspace and round once by a reduce step",
        )


def _overlaps(step: Step) -> Iterator[tuple[str, str]]:
    """Yield the overlaps of a step's writes with its reads and writes: its pieces have no order.

    A sum, also one over ranks, may replace one of its terms element by element, and products may
    accumulate into one region.
    """
    mend = "access each piece of memory in only one way"
    works: list[Step | Part] = [step, *step.parts]
    for work in works:
        inputs = [region for p in work.products for region in (p.a, p.b)]
        terms = [region for p in work.products for region in p.add]
        replaces = step.kind == "reduce" or step.collective == "all_reduce"
        (terms if replaces else inputs).extend(work.reads)
        outputs = _Outputs()
        for target in filter(_has_area, work.writes):
            for other in outputs.under(target):
                yield f"it writes {target} and {other}", mend
            outputs.add(target)
        for product in work.products:
            outputs.add(product.c)
        for source in filter(_has_area, inputs):
            for target in outputs.under(source):
                yield f"it writes {target} and reads {source}", mend
        for term in filter(_has_area, terms):
            for target in outputs.under(term):
                if term != target:
                    yield f"it writes {target} and adds {term}, which overlaps but differs", mend


def _has_area(region: Region) -> bool:
    return region.area > 0


class _Outputs:
    """An index of the regions that a step writes."""

    def __init__(self) -> None:
        self.tiles: dict[Region, Tiles[tuple[Region, ...]]] = defaultdict(Tiles)

    def under(self, region: Region) -> list[Region]:
        """Return the written regions that overlap with a region, without duplicates."""
        kept = [
            tiles
            for place, tiles in self.tiles.items()
            if place._replace(of=-1) == _place(region, -1)
            and (region.of < 0 or place.of in (-1, region.of))
        ]
        parts = [part for tiles in kept for part in tiles.read(Box(*region[2:6]))]
        return list(dict.fromkeys([target for _, targets in parts for target in targets]))

    def add(self, region: Region) -> None:
        tiles, box = self.tiles[_place(region, region.of)], Box(*region[2:6])
        under = tiles.read(box)
        if sum(part.area for part, _ in under) < box.area:
            tiles.write(box, (region,))
        for part, targets in under:
            if region not in targets:
                tiles.write(part, (*targets, region))


def _place(region: Region, of: int) -> Region:
    """Return the part of a buffer that a region is in, without its box."""
    return Region(region.rank, region.buffer, 0, 0, 0, 0, region.copy, of)


def _all_regions(step: Step) -> list[Region]:
    works: list[Step | Part] = [step, *step.parts]
    return [region for work in works for region in regions_of(work)]


def _written(step: Step) -> Iterable[Region]:
    yield from step.writes
    for part in step.parts:
        yield from part.writes
    for product in _products(step):
        yield product.c


def _products(step: Step) -> list[Product]:
    return [*step.products, *(product for part in step.parts for product in part.products)]


def _inside(region: Region, buffers: dict[tuple[int, str], Buffer], least: int) -> bool:
    """Return whether a region is in a buffer, and has at least this many rows and columns."""
    buffer = buffers.get((region.rank, region.buffer))
    return (
        buffer is not None
        and 0 <= region.row0 <= region.row1 - least <= buffer.rows - least
        and 0 <= region.col0 <= region.col1 - least <= buffer.cols - least
        and 0 <= region.copy < buffer.copies
    )


def _bad(rank: int, step: str, rule: str, message: str, mend: str) -> Violation:
    return Violation(rank, step, rule, message, mend)


class Violation(NamedTuple):
    """What is wrong with a plan, at one place; `print` shows it as one line.

    Attributes:
        rank: the rank whose plan is wrong there.
        step: the id of the step.
        rule: the rule that is violated, such as "race" or "handover".
        message: what is wrong.
        mend: how to correct it.

    Example:
        >>> problem = ficco.Problem.chunked("matmul_all_reduce", world=2, m=8, n=4, k=4)
        >>> plan = ficco.lower(problem, "serial")
        >>> violation = ficco.verify(plan._replace(ranks=plan.ranks[:1])).violations[0]
        >>> print(violation.rule, violation.message, violation.mend, sep="; ")
        ranks; the plan has ranks [0], the problem's world is 2; give the plans of ranks 0 to 1...
    """

    rank: int
    step: str
    rule: str
    message: str
    mend: str

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step!r}: {self.rule}: {self.message}; {self.mend}"
