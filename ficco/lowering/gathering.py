"""Gathering: blocks of x travel, and what has arrived is multiplied with the own weight.

Every rank pushes its blocks, chunk by chunk, straight from x into the peers' windows, and
multiplies what has arrived. The window `gathered` is the whole input of a rank's GEMM, so a chunk
lands where a GEMM over any neighbourhood of it can read it. With two chunks a shard, three ranks,
on rank 0:

    push      [free] enter  x0.0->1 x0.0->2 x0.1->1 x0.1->2
    compute   x0 . w  [x2.0 x1.0] step 0 . w  [x2.1 x1.1] step 1 . w  [entered] clear, free
              (hetero_fused_1d; [..] waits. uniform_*: x0 goes into the window first, by local_copy)
    keep      x0  [x2.0] x2.0  [x1.0] x1.0 ...
              (only where the gathered x is an output, too: copies out of the window)

Beside products along rows, one along the contraction is a single GEMM over the whole window, behind
all others: cut, it would add up in float32, piece by piece. Alone it is cut as the schedule says.
"""

from __future__ import annotations

from typing import NamedTuple

from ficco.errors import ScheduleError
from ficco.lowering.blocks import Blocks
from ficco.lowering.cutting import arrivals, check_implemented, chunk_bounds, departures
from ficco.lowering.handshake import await_entered, closed, enter_all, push_lanes
from ficco.plan import Buffer, Part, Product, RankPlan, Region, Step, Word
from ficco.problem import Output, Problem
from ficco.schedule import Schedule

__all__ = ["lower_gathering"]

WINDOW = "gathered"
COMPUTE = "compute"
KEEP = "keep"


class _Piece(NamedTuple):
    """A box of the gathered input: where it lies, and its global row and column range."""

    buffer: str
    shift: int  # global row minus row in the buffer
    row0: int
    row1: int
    col0: int
    col1: int


class _Group(NamedTuple):
    """What one GEMM step (or one part of a gated step) multiplies, and what it waits for."""

    name: str
    waits: tuple[Word, ...]
    pieces: tuple[_Piece, ...]


def lower_gathering(problem: Problem, schedule: Schedule, blocks: Blocks) -> RankPlan:
    """Return the plan of one rank. Raises as `ficco.lowering.lower_rank`."""
    _check(problem, schedule)
    rank = blocks.rank
    products = _Products(problem, blocks)
    if problem.world == 1:
        whole = _Piece("x", 0, 0, problem.m, 0, problem.k)
        steps = products.gemms([_Group("whole", (), (whole,))], products.all, gated=False)
        steps += [step for i in products.kept for step in _own_kept(i, blocks, problem.k)]
        return RankPlan(rank, products.buffers(window=False), tuple(steps))

    cut = _Cut(problem, schedule, blocks)
    peers = [(rank + turn) % problem.world for turn in range(1, problem.world)]
    steps = _pushes(cut, schedule, peers)
    gated = schedule.compute == "gated"
    if blocks.own.rows and (_staged(schedule) or products.late):
        steps.append(_stage(cut, _staged(schedule)))
    if gated:  # a kernel that spins must not start before its peers have
        steps.append(await_entered(rank, peers, COMPUTE))
    steps += products.gemms(_groups(cut, schedule), products.first, gated)
    steps += _late(cut, products, _staged(schedule))
    for i in products.kept:
        steps += [*_own_kept(i, blocks, problem.k), *_arrivals_kept(i, cut)]
    steps = closed(rank, peers, cut.data_words(), steps, COMPUTE, KEEP)
    steps += products.roundings()
    return RankPlan(rank, products.buffers(window=True), tuple(steps))


def _check(problem: Problem, schedule: Schedule) -> None:
    """Refuse what nothing implements, naming the nearest that works."""
    check_implemented(problem.op, schedule)
    if schedule.pace == "in_step" and schedule.route != "rotation":
        raise ScheduleError(
            "pace='in_step' with route='all_peers': all links are busy at once, so there are no "
            "turns; the nearest that works is pace='free', or route='rotation'"
        )
    if schedule.compute == "gated":
        if schedule.cut == "columns":
            raise ScheduleError(
                "compute='gated' with cut='columns': parts of one launch run at the same time and "
                "cannot add to the same tiles; the nearest that works is cut='rows', or "
                "compute='per_step'"
            )
        if all(output.axis == "contraction" for output in problem.products):
            raise ScheduleError(
                "compute='gated' with outputs along the contraction alone: parts of one launch run "
                "at the same time and cannot add to the same tiles; the nearest that works is "
                "compute='per_chunk'"
            )


def _staged(schedule: Schedule) -> bool:
    """Whether GEMMs read the own shard through the window, beside the peers' rows."""
    return schedule.start == "together" and schedule.compute in ("whole", "per_step")


class _Cut:
    """Where every chunk of every block lies, seen from one rank."""

    def __init__(self, problem: Problem, schedule: Schedule, blocks: Blocks) -> None:
        self.rank, self.world, self.k = blocks.rank, problem.world, problem.k
        self.blocks = blocks
        self.by_rows = schedule.cut == "rows"
        self.chunks, self.taper = schedule.chunks, schedule.taper
        self.arrivals = [
            at
            for at in arrivals(schedule, self.world, self.rank)
            if not self.empty(blocks.incoming[at[0]].rows, at[1])
        ]

    def box(self, rows: int, chunk: int) -> tuple[int, int, int, int]:
        """Return row0, row1, col0, col1 of a chunk within a block of so many rows."""
        bounds = chunk_bounds(rows if self.by_rows else self.k, self.chunks, self.taper)
        begin, end = bounds[chunk], bounds[chunk + 1]
        return (begin, end, 0, self.k) if self.by_rows else (0, rows, begin, end)

    def empty(self, rows: int, chunk: int) -> bool:
        row0, row1, col0, col1 = self.box(rows, chunk)
        return row0 == row1 or col0 == col1

    def piece(self, shard: int, chunk: int, direct: bool = False) -> _Piece:
        """Return a chunk as GEMMs see it: in the window, or `direct`ly where x lies."""
        first, rows = self.blocks.incoming[shard]
        row0, row1, col0, col1 = self.box(rows, chunk)
        buffer, shift = ("x", self.own_shift()) if direct else (WINDOW, 0)
        return _Piece(buffer, shift, first + row0, first + row1, col0, col1)

    def own_shift(self) -> int:
        own = self.blocks.own
        return own.landing - own.begin

    def shard(self) -> _Piece:
        """Return the own block, where x lies."""
        own = self.blocks.own
        return _Piece("x", self.own_shift(), own.landing, own.landing + own.rows, 0, self.k)

    def own_chunks(self) -> list[int]:
        rows = self.blocks.own.rows
        return [chunk for chunk in range(self.chunks) if not self.empty(rows, chunk)]

    def word(self, shard: int, chunk: int) -> Word:
        return Word(self.rank, "data", shard, chunk)

    def data_words(self) -> list[Word]:
        return [self.word(*at) for at in self.arrivals]


def _pushes(cut: _Cut, schedule: Schedule, peers: list[int]) -> list[Step]:
    """Return the handshake's first half and all pushes, each with its signal behind it."""
    rank = cut.rank
    lanes = push_lanes(schedule, peers)
    steps = enter_all(rank, lanes)
    last = None  # the peer whose turn it was
    in_step = schedule.pace == "in_step"
    coming = dict(enumerate(arrivals(schedule, cut.world, rank)))
    for turn, (peer, chunk) in enumerate(departures(schedule, cut.world, rank)):
        if in_step and last not in (None, peer) and coming[turn - 1] in cut.arrivals:
            came = (cut.word(*coming[turn - 1]),)
            steps.append(Step(f"turn{turn}", lanes[peer], "wait", "none", words=came))
        last = peer
        begin, rows, landing = cut.blocks.outgoing[peer]
        row0, row1, col0, col1 = cut.box(rows, chunk)
        if row0 == row1 or col0 == col1:
            continue
        source = Region(rank, "x", begin + row0, begin + row1, col0, col1)
        target = Region(peer, WINDOW, landing + row0, landing + row1, col0, col1)
        lane, name = lanes[peer], f"{chunk}to{peer}"
        steps.append(Step(f"push.{name}", lane, "copy", "dma", (source,), (target,)))
        landed = (Word(peer, "data", rank, chunk),)
        steps.append(Step(f"landed.{name}", lane, "signal", "none", words=landed))
    return steps


def _stage(cut: _Cut, first: bool) -> Step:
    """Return the copy of the own shard into the own window; `first`: the GEMMs wait for it."""
    begin, rows, landing = cut.blocks.own
    source = Region(cut.rank, "x", begin, begin + rows, 0, cut.k)
    target = Region(cut.rank, WINDOW, landing, landing + rows, 0, cut.k)
    return Step("stage", COMPUTE if first else KEEP, "local_copy", "dma", (source,), (target,))


def _late(cut: _Cut, products: _Products, staged: bool) -> list[Step]:
    """Return the GEMMs over all that has come, which follow on the waits for it."""
    if not products.late:
        return []
    pieces = [cut.piece(cut.rank, chunk) for chunk in cut.own_chunks()]
    pieces += [cut.piece(*at) for at in cut.arrivals]
    steps = products.gemms([_Group("all", (), _merged(pieces))], products.late, gated=False)
    if steps and cut.blocks.own.rows and not staged:
        steps[0] = steps[0]._replace(after=("stage",))
    return steps


def _own_kept(index: int, blocks: Blocks, k: int) -> list[Step]:
    """Return the copy of the own shard into an output that is the gathered x."""
    begin, rows, landing = blocks.own
    if not rows:
        return []
    source = Region(blocks.rank, "x", begin, begin + rows, 0, k)
    target = Region(blocks.rank, f"y{index}", landing, landing + rows, 0, k)
    return [Step(f"keep{index}.own", KEEP, "local_copy", "dma", (source,), (target,))]


def _arrivals_kept(index: int, cut: _Cut) -> list[Step]:
    """Return waits for chunks, and their copies from the window into such an output."""
    steps = []
    for shard, chunk in cut.arrivals:
        piece, word = cut.piece(shard, chunk), cut.word(shard, chunk)
        box = (piece.row0, piece.row1, piece.col0, piece.col1)
        source, target = Region(cut.rank, WINDOW, *box), Region(cut.rank, f"y{index}", *box)
        name = f"keep{index}.{chunk}of{shard}"
        steps += [
            Step(f"{name}.wait", KEEP, "wait", "none", words=(word,)),
            Step(name, KEEP, "local_copy", "dma", (source,), (target,)),
        ]
    return steps


def _groups(cut: _Cut, schedule: Schedule) -> list[_Group]:
    """Return what is multiplied in which order, own shard included."""
    groups: list[_Group] = []
    own = cut.own_chunks()
    unit = schedule.compute
    if schedule.start == "local_first" and own:
        groups.append(_Group("own", (), (cut.shard(),)))
        own = []
    if unit == "whole":
        chunks = [cut.piece(cut.rank, j) for j in own] + [cut.piece(*at) for at in cut.arrivals]
        groups.append(_Group("whole", tuple(cut.data_words()), _merged(chunks)))
    elif unit == "per_step":
        groups += _per_step(cut, schedule, own)
    else:
        groups += _per_chunk(cut, schedule, own)
    return [group for group in groups if group.pieces]


def _per_step(cut: _Cut, schedule: Schedule, own: list[int]) -> list[_Group]:
    """Group chunks by the step that brings them: one of every peer, or all of one peer."""
    by_step = schedule.order == "by_step"
    pieces: dict[int, list[_Piece]] = {}
    words: dict[int, list[Word]] = {}
    for chunk in own:
        key = chunk if by_step else -1  # by peer, the own shard is the first step
        pieces.setdefault(key, []).append(cut.piece(cut.rank, chunk))
    for shard, chunk in cut.arrivals:
        key = chunk if by_step else (cut.rank - shard) % cut.world
        pieces.setdefault(key, []).append(cut.piece(shard, chunk))
        words.setdefault(key, []).append(cut.word(shard, chunk))
    return [
        _Group(
            f"step{key}" if key >= 0 else "own",
            tuple(words.get(key, ())),
            _merged(pieces[key]),
        )
        for key in sorted(pieces)
    ]


def _per_chunk(cut: _Cut, schedule: Schedule, own: list[int]) -> list[_Group]:
    """One group a chunk, own chunks read from x: first of all, or first of their step."""
    here = [
        (chunk, _Group(f"own.{chunk}", (), (cut.piece(cut.rank, chunk, direct=True),)))
        for chunk in own
    ]
    there = [
        (chunk, _Group(f"{chunk}of{shard}", (cut.word(shard, chunk),), (cut.piece(shard, chunk),)))
        for shard, chunk in cut.arrivals
    ]
    both = here + there
    if schedule.order == "by_step":
        both.sort(key=lambda entry: entry[0])  # stable: the own chunk of a step comes first
    return [group for _, group in both]


def _merged(pieces: list[_Piece]) -> tuple[_Piece, ...]:
    """Join pieces that touch, below one another or side by side, into larger ones."""
    columns: list[_Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.buffer, p.row0, p.row1, p.col0)):
        last = columns[-1] if columns else None
        if (
            last
            and (last.buffer, last.row0, last.row1) == (piece.buffer, piece.row0, piece.row1)
            and last.col1 == piece.col0
        ):
            columns[-1] = last._replace(col1=piece.col1)
        else:
            columns.append(piece)
    rows: list[_Piece] = []
    for piece in sorted(columns, key=lambda p: (p.buffer, p.col0, p.col1, p.row0)):
        last = rows[-1] if rows else None
        if (
            last
            and (last.buffer, last.col0, last.col1) == (piece.buffer, piece.col0, piece.col1)
            and last.row1 == piece.row0
        ):
            rows[-1] = last._replace(row1=piece.row1)
        else:
            rows.append(piece)
    return tuple(rows)


class _Products:
    """Turns pieces into products of every output, and knows which outputs need a float32 sum.

    An output along rows multiplies a piece with the weight's rows that stand for its columns; it
    adds up where the cut is by columns. One along the contraction multiplies the transposed piece
    with the weight's rows that stand for its rows; it adds up where the cut is by rows.

    Attributes:
        all: numbers of the outputs that are products.
        first: of those that are made of what arrives, as it arrives.
        late: of those that are made at the end: along the contraction, beside others.
        kept: of outputs that are the gathered x.
        summed: of those that are added to.
    """

    def __init__(self, problem: Problem, blocks: Blocks) -> None:
        self.problem, self.blocks, self.rank = problem, blocks, blocks.rank
        axes: dict[str, list[int]] = {"rows": [], "contraction": [], "gathered": []}
        for index, output in enumerate(problem.outputs):
            axes[output.axis].append(index)
        self.kept = axes["gathered"]
        self.all = sorted(axes["rows"] + axes["contraction"])
        self.first, self.late = axes["rows"], axes["contraction"]
        if not self.first:
            self.first, self.late = self.late, []
        self.summed: set[int] = set()

    def gemms(self, groups: list[_Group], wanted: list[int], gated: bool) -> list[Step]:
        """Return waits and GEMMs of all groups, or one gated GEMM with a part per group."""
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for index in wanted:
            output = self.problem.outputs[index]
            if output.columns[self.rank]:
                flags = (output.axis == "contraction", output.operand_transposed)
                kinds.setdefault(flags, []).append(index)
        touched = self._accumulations(groups, wanted)
        steps: list[Step] = []
        if gated:
            for number, ((trans_a, trans_b), indices) in enumerate(kinds.items()):
                parts = tuple(
                    Part(group.waits, self._products(group, indices, touched[g]))
                    for g, group in enumerate(groups)
                )
                name = "gemm" + (f".{number}" if number else "")
                steps.append(
                    Step(
                        name, COMPUTE, "gemm", "sm", parts=parts,
                        transpose_a=trans_a, transpose_b=trans_b,
                    )
                )  # fmt: skip
            words = tuple(word for group in groups for word in group.waits)
            if not kinds and words:  # no columns here: arrivals are awaited all the same
                steps.append(Step("wait.all", COMPUTE, "wait", "none", words=words))
            return steps
        for g, group in enumerate(groups):
            if group.waits:
                steps.append(Step(f"wait.{group.name}", COMPUTE, "wait", "none", words=group.waits))
            for number, ((trans_a, trans_b), indices) in enumerate(kinds.items()):
                name = f"gemm.{group.name}" + (f".{number}" if number else "")
                products = self._products(group, indices, touched[g])
                steps.append(
                    Step(
                        name, COMPUTE, "gemm", "sm", products=products,
                        transpose_a=trans_a, transpose_b=trans_b,
                    )
                )  # fmt: skip
        return steps

    def _accumulations(
        self, groups: list[_Group], wanted: list[int]
    ) -> list[dict[tuple[int, int], bool]]:
        """Return per group, by (output, piece): whether its product adds to an earlier one."""
        seen: dict[int, list[tuple[int, int]]] = {i: [] for i in wanted}
        result = []
        for group in groups:
            adds: dict[tuple[int, int], bool] = {}
            for p, piece in enumerate(group.pieces):
                for i in wanted:
                    begin, end = _range_in(self.problem.outputs[i], piece)
                    adds[i, p] = any(b < end and begin < e for b, e in seen[i])
                    if adds[i, p]:
                        self.summed.add(i)
                    else:
                        seen[i].append((begin, end))
            result.append(adds)
        return result

    def _products(
        self, group: _Group, indices: list[int], adds: dict[tuple[int, int], bool]
    ) -> tuple[Product, ...]:
        rank, products = self.rank, []
        for i in indices:
            output = self.problem.outputs[i]
            columns = output.columns[rank]
            target = self._target(i)
            for p, piece in enumerate(group.pieces):
                shift = piece.shift
                a = Region(
                    rank, piece.buffer, piece.row0 - shift, piece.row1 - shift, piece.col0,
                    piece.col1,
                )  # fmt: skip
                if output.axis == "rows":
                    deep = (piece.col0, piece.col1)
                else:
                    deep = (piece.row0, piece.row1)
                if output.operand_transposed:
                    b = Region(rank, output.operand, 0, columns, *deep)
                else:
                    b = Region(rank, output.operand, *deep, 0, columns)
                c = Region(rank, target, *_range_in(output, piece), 0, columns)
                added = adds[i, p]
                bias = output.bias and not added
                add = (Region(rank, f"bias{i}", 0, 1, 0, columns),) if bias else ()
                products.append(Product(a, b, c, added, add))
        return tuple(products)

    def _target(self, index: int) -> str:
        widened = index in self.summed and self.problem.dtype != "float32"
        return f"acc{index}" if widened else f"y{index}"

    def _height(self, output: Output) -> int:
        return self.problem.k if output.axis == "contraction" else self.blocks.arriving

    def roundings(self) -> list[Step]:
        """Return the conversions of float32 sums into outputs."""
        steps = []
        for i in sorted(self.summed):
            output = self.problem.outputs[i]
            columns = output.columns[self.rank]
            if self._target(i) == f"y{i}" or not columns:
                continue
            box = (0, self._height(output), 0, columns)
            source, target = (Region(self.rank, name, *box) for name in (f"acc{i}", f"y{i}"))
            steps.append(Step(f"round.{i}", COMPUTE, "reduce", "sm", (source,), (target,)))
        return steps

    def buffers(self, window: bool) -> tuple[Buffer, ...]:
        """Return all buffers of this rank; call after `gemms`, which finds what is summed."""
        problem, rank = self.problem, self.rank
        found = [Buffer("x", "input", problem.rows[rank], problem.k, problem.dtype)]
        operands: set[str] = set()
        for i, output in enumerate(problem.outputs):
            columns = output.columns[rank]
            depth = problem.m if output.axis == "contraction" else problem.k
            if output.operand not in operands and output.axis != "gathered":
                operands.add(output.operand)
                shape = (columns, depth) if output.operand_transposed else (depth, columns)
                found.append(Buffer(output.operand, "weight", *shape, problem.dtype))
            if output.bias:
                found.append(Buffer(f"bias{i}", "weight", 1, columns, problem.dtype))
            height = self._height(output)
            found.append(Buffer(f"y{i}", "output", height, columns, problem.dtype))
            if self._target(i) == f"acc{i}":
                found.append(Buffer(f"acc{i}", "workspace", height, columns, "float32"))
        if window:
            rows = self.blocks.window_rows
            found.append(Buffer(WINDOW, "window", rows, problem.k, problem.dtype, copies=2))
        return tuple(found)


def _range_in(output: Output, piece: _Piece) -> tuple[int, int]:
    """Return the rows of an output that a piece contributes to."""
    if output.axis == "rows":
        return piece.row0, piece.row1
    return piece.col0, piece.col1
