"""Values: tracks the symbolic contents of every buffer, and compares outputs with the problem.

This stage runs when all conflicting accesses are ordered, so one order of events represents all.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

from ficco.operators.problem import Problem
from ficco.operators.symbolic import Content, Owner, Source, bags_name, combined, dot, row_of, shift
from ficco.plan import Bag, Part, Product, Region, Step, bags_of, experts_of, mode_of
from ficco.verifier.expert_values import Values, gathered, returned, summed
from ficco.verifier.form import Violation
from ficco.verifier.order import Event, Order
from ficco.verifier.tiles import Box, Tiles

_SUMS = ("reduce_scatter", "all_reduce")  # collectives that add up


def check_values(order: Order) -> list[Violation]:
    """Return reads of unwritten elements, and outputs that differ from the problem's."""
    memory = _Memory(order)
    for event in order.events:
        if event.step is not None and event.step.kind == "collective":
            violations = memory.collective(event)
        elif event.work is not None:
            violations = list(memory.run(event, event.step, event.work))
        else:
            continue
        if violations:  # consequences of an unknown value would only repeat it
            return violations
    return [
        violation
        for entry in order.plan.ranks
        for violation in memory.outputs(order.plan.problem, entry.rank)
    ]


class _Memory:
    """The symbolic contents of all buffers."""

    def __init__(self, order: Order) -> None:
        self.order = order
        # By rank, buffer and copy, and the rank of `Region.of`.
        self.fields: dict[tuple[int, str, int, int], Tiles[Content]] = {}
        self.parts: dict[tuple[int, str, int], set[int]] = {}  # ranks whose parts were written
        self.writers: dict[tuple[int, str], str] = {}
        self.gathered: dict[int, list[list[list[tuple[Box, Content]]]]] = {}
        self.collectives = [
            [step for step in entry.steps if step.kind == "collective"]
            for entry in order.plan.ranks
        ]
        self.numbers = {
            (rank, step.id): number
            for rank, steps in enumerate(self.collectives)
            for number, step in enumerate(steps)
        }
        for entry in order.plan.ranks:
            for buffer in entry.buffers:
                field: Tiles[Content] = Tiles()
                if buffer.role in ("input", "weight") and buffer.rows and buffer.cols:
                    whole = Box(0, buffer.rows, 0, buffer.cols)
                    field.write(whole, Source((entry.rank, buffer.name), 0, 0))
                self.fields[entry.rank, buffer.name, 0, -1] = field

    def run(self, event: Event, step: Step | None, work: Step | Part) -> Iterator[Violation]:
        """Apply the work of one event."""
        assert step is not None
        if step.kind in ("copy", "local_copy"):
            for source, target in zip(work.reads, work.writes, strict=True):
                parts, hole = self._read(source)
                if hole:
                    yield _unwritten(event, hole)
                    return
                self._put(event, target, source, parts)
        elif step.kind == "reduce":
            yield from self._reduce(event, work)
        elif step.kind == "bag" and work.reads:
            yield from self._bag(event, work)
        elif step.kind == "experts":
            yield from self._experts(event, step)
        for product in work.products:
            yield from self._multiply(event, step, product)

    def outputs(self, problem: Problem, rank: int) -> Iterator[Violation]:
        """Compare a rank's outputs with those that the problem defines."""
        for name, row0, row1, col0, col1, product in problem.operator.meaning(problem, rank):
            want, whole = _with_terms(problem, product), Box(row0, row1, col0, col1)
            parts, _ = self._read(Region(rank, name, row0, row1, col0, col1))
            step = self.writers.get((rank, name), "-")
            for box, content in parts:
                if content != want:
                    difference = _difference(want, content)
                    yield Violation(rank, step, "value", f"{name}{box}: {difference}",
                                    "correct the regions or the step that writes it")  # fmt: skip
            if sum(box.area for box, _ in parts) < whole.area:
                yield Violation(rank, step, "value", f"{name}{whole} is not completely written",
                                "write every element of the output")  # fmt: skip

    def _field(self, region: Region) -> Tiles[Content]:
        place = (region.rank, region.buffer, region.copy, region.of)
        if region.of >= 0:
            self.parts.setdefault(place[:3], set()).add(region.of)
        field = self.fields.get(place)
        if field is None:
            field = self.fields[place] = Tiles()
        return field

    def _read(self, region: Region) -> tuple[list[tuple[Box, Content]], Region | None]:
        """Return the contents of a region, and the region itself if a part of it is unknown.

        The rows of all ranks (`Region.of`) are the sum of those of each: elsewhere each is 0.
        """
        box, written = Box(*region[2:6]), self.parts.get((region.rank, region.buffer, region.copy))
        if region.of < 0 and written:
            each = [self._field(region._replace(of=of)).read(box) for of in sorted(written)]
            whole = all(sum([b.area for b, _ in parts]) == box.area for parts in each)
            return _sums(each, box), None if whole else region
        parts = self._field(region).read(box)
        known = sum(box.area for box, _ in parts)
        return parts, region if known < region.area else None

    def _put(
        self, event: Event, target: Region, source: Region, parts: list[tuple[Box, Content]]
    ) -> None:
        """Write contents read from `source` to `target`."""
        down, right = source.row0 - target.row0, source.col0 - target.col0
        field = self._field(target)
        for box, content in parts:
            moved = Box(box.r0 - down, box.r1 - down, box.c0 - right, box.c1 - right)
            field.write(moved, shift(content, down, right))
        self.writers[target.rank, target.buffer] = event.name

    def _added(
        self, parts: list[tuple[Box, Content]], region: Region, target: Region
    ) -> list[tuple[Box, Content]]:
        """Return a term in coordinates of the target; a single row (a bias) is in every row."""
        if region.rows == 1 and (target.rows > 1 or all(self._is_row(c) for _, c in parts)):
            return _spread(parts, region, target)
        return _moved(parts, region, target)

    def _is_row(self, content: Content) -> bool:
        """Return whether a content is that of a weight with a single row, like a bias."""
        if not isinstance(content, Source):
            return False
        rank, name = content.owner
        buffers = self.order.plan.ranks[rank].buffers
        return any(b.name == name and b.rows == 1 and b.role == "weight" for b in buffers)

    def _reduce(self, event: Event, work: Step | Part) -> Iterator[Violation]:
        target = work.writes[0]
        terms = []
        for source in work.reads:
            parts, hole = self._read(source)
            if hole:
                yield _unwritten(event, hole)
                return
            terms.append(self._added(parts, source, target))
        self._store(event, target, _sums(terms, Box(*target[2:6])))

    def _store(self, event: Event, target: Region, parts: list[tuple[Box, Content]]) -> None:
        for box, content in parts:
            self._field(target).write(box, content)
        self.writers[target.rank, target.buffer] = event.name

    def _bag(self, event: Event, work: Step | Part) -> Iterator[Violation]:
        for bag in bags_of(work):
            problem = self._not_a_bag(bag)
            if problem:
                yield Violation(event.rank, event.name, "value", problem,
                                "use a whole table with its own indices, offsets and weights",
                                )  # fmt: skip
                return
            target, owner = bag.target, (event.rank, bags_name(bag.table.buffer, mode_of(bag)))
            content = Source(owner, bag.bags.col0 - target.row0, -target.col0)
            self._store(event, target, [(Box(*target[2:6]), content)])

    def _experts(self, event: Event, step: Step) -> Iterator[Violation]:
        """Apply rows times the weights of their experts, or sums of the rows of tokens."""
        work = experts_of(step)
        contents = {}
        for region in (work.routing, *([work.weight] if work.weight else ()), *work.sources):
            contents[region], hole = self._read(region)
            if hole:
                yield _unwritten(event, hole)
                return
        apply = {"gather": gathered, "return": returned, "sum": summed}[work.mode]
        found = apply(Values(self.order.plan, event.rank, contents), work)
        if isinstance(found, str):
            yield Violation(event.rank, event.name, "value", found,
                            "use whole operands of this rank, and the places of the routing table",
                            )  # fmt: skip
            return
        for target, parts in zip(work.targets, found, strict=True):
            self._store(event, target, parts)

    def _not_a_bag(self, bag: Bag) -> str:
        """Return why regions are not a table with its indices, offsets and weights, or ""."""
        table = bag.table.buffer
        operands = self.order.plan.problem.operands(bag.table.rank)
        found = {operand.name: (operand.role, operand.follows) for operand in operands}
        whole_ones = {"table": bag.table, "indices": bag.indices}
        if bag.weights is not None:
            whole_ones["factors"] = bag.weights
        for role, region in {**whole_ones, "offsets": bag.bags}.items():
            if found.get(region.buffer) != (role, "" if role == "table" else table):
                return f"{region} does not belong to {bag.table}"
        for region in whole_ones.values():
            whole = self.order.plan.ranks[region.rank].buffer(region.buffer)
            if region.area != whole.rows * whole.cols:
                return f"{region} is not whole"
        return ""

    def _multiply(self, event: Event, step: Step, product: Product) -> Iterator[Violation]:
        c = product.c
        box = Box(*c[2:6])
        halves = []
        for region in (product.a, product.b):
            parts, hole = self._read(region)
            if hole:
                yield _unwritten(event, hole)
                return
            if not all(isinstance(content, Source) for _, content in parts):
                yield Violation(event.rank, event.name, "value",
                                f"it multiplies {region}, which holds sums, not an operand",
                                "multiply only operands")  # fmt: skip
                return
            halves.append(parts)
        terms = [_dots(step, product, *halves)]
        for region in (c,) if product.accumulate else ():
            parts, hole = self._read(region)
            if hole:
                yield _unwritten(event, hole)
                return
            terms.append(parts)
        for region in product.add:
            parts, hole = self._read(region)
            if hole:
                yield _unwritten(event, hole)
                return
            terms.append(self._added(parts, region, c))
        self._store(event, c, _sums(terms, box))

    def collective(self, event: Event) -> list[Violation]:
        """Take a snapshot of a rank's reads on entry; write its peers' data on exit."""
        step = event.step
        assert step is not None
        world = self.order.plan.problem.world
        number = self.numbers[event.rank, step.id]
        snapshots = self.gathered.setdefault(number, [[] for _ in range(world)])
        peers = [steps[number] for steps in self.collectives]
        if event.work is None:
            for region in step.reads:
                parts, hole = self._read(region)
                if hole:
                    return [_unwritten(event, hole)]
                snapshots[event.rank].append(parts)
            return []
        sums = step.collective in _SUMS
        pairs = (_added_up if sums else _exchanged)(event.rank, step, peers)
        if pairs is None:
            return [
                Violation(event.rank, step.id, "collective", "the reads of its peers do not fit "
                          "its writes", "make the regions agree on all ranks")
            ]  # fmt: skip
        if sums and pairs:
            target = pairs[0][2]
            terms = [
                _moved(snapshots[giver][index], peers[giver].reads[index], target)
                for giver, index, _ in pairs
            ]
            self._store(event, target, _sums(terms, Box(*target[2:6])))
            return []
        for giver, index, target in pairs:
            self._put(event, target, peers[giver].reads[index], snapshots[giver][index])
        return []


def _with_terms(problem: Problem, content: Content) -> Content:
    """Return a content plus the terms of all rows of inputs that it multiplies."""
    if isinstance(content, Source) or not problem.operator.attachments:
        return content
    contents: list[Content] = [content]
    for key, _ in content.terms:
        if key[0] == "dot":
            _, (rank, x), _, down, _, _, right, _ = cast(Any, key)
            contents += [Source((rank, a.name), down, right) for a in problem.attached(rank, x)]
    return combined(contents)


def _added_up(rank: int, step: Step, peers: list[Step]) -> list[tuple[int, int, Region]] | None:
    """Return (giver, index of its read, target) of every term, or None if sizes do not fit."""
    number = rank if step.collective == "reduce_scatter" else 0
    count = len(peers) if step.collective == "reduce_scatter" else 1
    if len(step.writes) > 1 or any(len(peer.reads) != count for peer in peers):
        return None
    terms = [peer.reads[number] for peer in peers]
    if not step.writes:
        return None if any(term.area for term in terms) else []
    target = step.writes[0]
    fits = all((term.rows, term.cols) == (target.rows, target.cols) for term in terms)
    return [(giver, number, target) for giver in range(len(peers))] if fits else None


def _exchanged(rank: int, step: Step, peers: list[Step]) -> list[tuple[int, int, Region]] | None:
    """Return (giver, index of its read, target here), or None if sizes do not fit."""
    if step.collective == "all_gather":
        if len(step.writes) != 1:
            return None
        target, row, pairs = step.writes[0], step.writes[0].row0, []
        for s, peer in enumerate(peers):
            for i, source in enumerate(peer.reads):
                pairs.append((s, i, target._replace(row0=row, row1=row + source.rows)))
                row += source.rows
        fits = row == target.row1 and all(
            source.cols == target.cols for peer in peers for source in peer.reads
        )
        return pairs if fits else None
    if len(step.writes) != len(peers) or any(len(peer.reads) != len(peers) for peer in peers):
        return None
    pairs = [(s, rank, step.writes[s]) for s in range(len(peers))]
    fits = all(
        (peers[s].reads[i].rows, peers[s].reads[i].cols) == (target.rows, target.cols)
        for s, i, target in pairs
    )
    return pairs if fits else None


def _moved(
    parts: list[tuple[Box, Content]], source: Region, target: Region
) -> list[tuple[Box, Content]]:
    down, right = source.row0 - target.row0, source.col0 - target.col0
    return [
        (Box(b.r0 - down, b.r1 - down, b.c0 - right, b.c1 - right), shift(content, down, right))
        for b, content in parts
    ]


def _spread(
    parts: list[tuple[Box, Content]], row: Region, target: Region
) -> list[tuple[Box, Content]]:
    """Return a single row spread over every row of the target. It must be an operand."""
    spread: list[tuple[Box, Content]] = []
    for box, content in _moved(parts, row, target):
        known = Source((-1, "a row that is not a bias"), 0, 0)
        if isinstance(content, Source) and content.down + target.row0 == 0:
            known = content
        spread.append((Box(target.row0, target.row1, box.c0, box.c1), row_of(known)))
    return spread


def _dots(
    step: Step,
    product: Product,
    a_parts: list[tuple[Box, Content]],
    b_parts: list[tuple[Box, Content]],
) -> list[tuple[Box, Content]]:
    """Return the products of all pieces of a with all pieces of b, where they meet in c."""
    a, b, c = product.a, product.b, product.c
    left = [_oriented(box, content, a, step.transpose_a) for box, content in a_parts]
    right = [_oriented(box, content, b, not step.transpose_b) for box, content in b_parts]
    dots: list[tuple[Box, Content]] = []
    for a_outer, a_inner, a_owner, a_outer_shift, a_inner_shift in left:
        for b_outer, b_inner, b_owner, b_outer_shift, b_inner_shift in right:
            begin, end = max(a_inner[0], b_inner[0]), min(a_inner[1], b_inner[1])
            if begin >= end:
                continue
            box = Box(c.row0 + a_outer[0], c.row0 + a_outer[1],
                      c.col0 + b_outer[0], c.col0 + b_outer[1])  # fmt: skip
            content = dot(
                a_owner, step.transpose_a, a_outer_shift - c.row0,
                b_owner, step.transpose_b, b_outer_shift - c.col0,
                b_inner_shift - a_inner_shift, (begin + a_inner_shift, end + a_inner_shift),
            )  # fmt: skip
            dots.append((box, content))
    return dots


def _oriented(
    box: Box, content: Content, region: Region, inner_is_rows: bool
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, str], int, int]:
    """Return outer and inner ranges relative to the region, owner, outer and inner shifts."""
    assert isinstance(content, Source)
    rows = (box.r0 - region.row0, box.r1 - region.row0)
    cols = (box.c0 - region.col0, box.c1 - region.col0)
    down, right = region.row0 + content.down, region.col0 + content.right
    if inner_is_rows:
        return cols, rows, content.owner, right, down
    return rows, cols, content.owner, down, right


def _sums(terms: list[list[tuple[Box, Content]]], target: Box) -> list[tuple[Box, Content]]:
    """Cut the target at the boundaries of all terms, and return the sum in every cell.

    Several boxes of one product may cover one place: its slices of k.
    """
    boxes = [(box, content) for parts in terms for box, content in parts]
    cells = []
    for r0, r1, across in _slices(boxes, 0, target.r0, target.r1):
        for c0, c1, here in _slices(across, 2, target.c0, target.c1):
            cells.append((Box(r0, r1, c0, c1), combined([content for _, content in here])))
    return cells


def _slices(
    boxes: list[tuple[Box, Content]], axis: int, begin: int, end: int
) -> Iterator[tuple[int, int, list[tuple[Box, Content]]]]:
    """Cut an interval of rows (axis 0) or columns (2) where boxes begin or end.

    Yields every piece with the boxes that cover it. The cost depends on the number of boxes.
    """
    edges = sorted({begin, end, *(edge for box, _ in boxes for edge in box[axis : axis + 2])})
    starting = sorted(boxes, key=lambda entry: entry[0][axis], reverse=True)
    over: list[tuple[Box, Content]] = []
    for low, high in pairwise(edges):
        over = [entry for entry in over if entry[0][axis + 1] > low]
        while starting and starting[-1][0][axis] <= low:
            over.append(starting.pop())
        yield low, high, over


def _unwritten(event: Event, region: Region) -> Violation:
    return Violation(
        event.rank, event.name, "value", f"it reads {region}, part of which this call never wrote",
        "write the data there first, and wait for it",
    )  # fmt: skip


def _difference(want: Content, found: Content) -> str:
    """Describe how a content differs from the required one."""
    if isinstance(found, Source) and isinstance(want, Source) and found.owner != want.owner:
        return (
            f"it holds {found.owner[1]} of rank {found.owner[0]}, not {want.owner[1]} of rank "
            f"{want.owner[0]}"
        )
    if isinstance(found, Source):
        return f"it holds rows of {found.owner[1]} of rank {found.owner[0]}, not a sum of products"
    if isinstance(want, Source):
        return f"it is not a plain copy of {want.owner[1]} of rank {want.owner[0]}"
    wanted, got = dict(want.terms), dict(found.terms)
    for key, intervals in got.items():
        if any(a[1] > b[0] for a, b in pairwise(intervals)):
            return f"terms of {_term(key)} are counted twice"
        if key not in wanted:
            return f"it adds {_term(key)}, which is not needed or in the wrong place"
        if intervals != wanted[key]:
            return f"of {_term(key)} it sums over {list(intervals)}, not {list(wanted[key])}"
    missing = next(key for key in wanted if key not in got)
    return f"{_term(missing)} is missing"


def _term(key: tuple[object, ...]) -> str:
    def owner(index: int) -> str:
        rank, name = cast(Owner, key[index])
        return f"{name} of rank {rank}"

    if key[0] == "dot":
        return f"{owner(1)} times {owner(4)}"
    return owner(1)
