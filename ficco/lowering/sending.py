"""Products and stores at peers by one launch, whose programs are ordered so that none blocks.

The plan has one lane, because one kernel runs all of it (`ficco.kernels.sending`). The rows of each
pair of ranks are cut into chunks. Work for peers comes first: a chunk for every peer, then the next
chunk. Own rows come after it, and work on arrivals last. With three ranks:

    multiply   [free] enter | store x 0 at all peers, x 1, ... | own x . w | [entered]
               [each chunk] its x . w | clear, free
    move       [free] enter | make 0, store it at all peers, make 1, ... | own x . w | [entered]
               [each chunk] copy it to y | clear, free
    sum        [free] enter | make 0, store it at the owners, make 1, ... | [entered]
               [chunk 0 of all] own x . w plus arrivals, ... | clear, free
    share      the same; each sum is stored at all peers | [each sum] copy it to y | clear, free
    keep       [free] enter | store x 0 at all peers, x 1, ... | keep own x | [entered]
               [each chunk] keep it | clear, free | multiply x of all ranks

With "keep" a library multiplies. The kernel copies rows that arrive out of the window, so that the
library reads one matrix, and later calls may store in the window meanwhile.
Products that travel are rounded to the dtype of the result. The own product is not rounded before
it is added, in the order of ranks: the bits are those of sums="within".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ficco.core.errors import ScheduleError
from ficco.lowering.cutting import check_implemented, chunk_bounds
from ficco.lowering.one_kernel import check_axes, products_of
from ficco.lowering.one_kernel_gather import MOST_OUTPUTS
from ficco.lowering.one_kernel_steps import Span, Steps, plan_of, register
from ficco.lowering.producing import PARTIAL, alone
from ficco.operators.problem import Problem, offsets
from ficco.operators.registry import Flow
from ficco.plan import Buffer, RankPlan, Region, Signal, operand_buffers, window_places
from ficco.plan.schedule import MAX_CHUNKS, Schedule
from ficco.plan.tables import OutputNames, RowsReceived, RowsSent, SendTable, peers_of

SENT = "sent"  # window: what peers have sent, rows of x or of products
SHARED = "shared"  # window: the sums of all ranks
KEPT = "kept"  # workspace: x of all ranks, for a library


def sends(schedule: Schedule, flow: Flow) -> bool:
    """Return whether the kernel of this module runs a schedule of an operator."""
    other = flow.one_kernel and schedule.cut == "columns"
    gathers = schedule.moves and flow.gathers
    return not flow.pools and (gathers or (schedule.stores and not other))


def sends_all(problem: Problem) -> bool:
    """Return whether one launch makes all outputs: products along rows, the gathered x once."""
    axes = [output.axis for output in problem.outputs]
    pairs = max(map(len, problem.pairs), default=1)
    few = 1 <= axes.count("rows") <= MOST_OUTPUTS and axes.count("gathered") <= 1
    return pairs == 1 and few and "contraction" not in axes


def lower_sending(problem: Problem, schedule: Schedule, rank: int) -> RankPlan:
    """Return the plan of one rank. See `ficco.lowering.lower_rank`."""
    check_implemented(problem.op, schedule)
    if schedule.moves:
        check_axes(schedule, cut="rows", compute="whole")
    else:
        check_axes(schedule, cut="rows", start="local_first", shots="two")
    gathers, shares = problem.flow.gathers, problem.flow.shares
    kept = [f"y{i}" for i, output in enumerate(problem.outputs) if output.axis == "gathered"]
    if gathers:
        outputs, depth = _products(problem, rank), problem.k
        # A rank without columns only sends rows, and waits for those of its peers.
        keeps = schedule.moves and problem.world > 1 and any(names.n for names in outputs)
        buffers = _gathered(problem, rank, keeps and not kept)
        kept = kept or [KEPT] * keeps
    else:
        products, names = products_of(problem, rank)
        if problem.world == 1:
            return alone(problem, products)
        outputs, depth, buffers = (names,), products.depth, _scattered(problem, rank)
    if shares and schedule.chunks > MAX_CHUNKS // 2:
        raise ScheduleError(
            f"grain={schedule.chunks} with transport='sm' and shots='two'; grain is at most "
            f"{MAX_CHUNKS // 2}: every chunk has a signal for its products and one for its sums"
        )
    places, _ = window_places(buffers)
    blocks, peers = problem.operator.blocks(problem, rank), peers_of(rank, problem.world)
    own, first = blocks.own, offsets(problem.rows)
    sent = [RowsSent(p, at.begin, at.recv, at.rows) for p in peers for at in [blocks.outgoing[p]]]
    received = [RowsReceived(p, *blocks.incoming[p]) for p in reversed(peers)]
    top = {"multiply": own.recv, "move": own.recv, "sum": 0, "share": first[rank]}
    table = SendTable(
        rank=rank, world=problem.world, n=0 if gathers else problem.n, k=depth,
        dtype=problem.dtype, finish="keep" if gathers and keeps else problem.flow.finish,
        row=own.begin if own.rows else 0, rows=own.rows,
        top=top[problem.flow.finish] if own.rows else 0,
        sent=tuple([each for each in sent if each.rows]),
        received=tuple([each for each in received if each.rows]),
        chunks=schedule.chunks, recv=places.get(SENT, 0), sums=places.get(SHARED, 0),
        kept=kept[0] if kept else "", outputs=outputs,
    )  # fmt: skip
    return plan_of(table, buffers)


def _products(problem: Problem, rank: int) -> tuple[OutputNames, ...]:
    """Return the products of rows of all ranks that have columns, or one that has none.

    Raises:
        ScheduleError: one launch does not make all outputs.
    """
    if not sends_all(problem):
        raise ScheduleError(
            f"{problem.op}: transport='sm' with cut='rows' makes at most {MOST_OUTPUTS} products "
            "along rows, and the gathered x once; these outputs are "
            f"{', '.join(output.axis for output in problem.outputs)}; the nearest that works is "
            "transport='dma'"
        )
    found = [
        OutputNames(
            f"y{i}", output.operand, f"bias{i}" if output.bias else "", output.columns[rank],
            output.operand_transposed,
        )
        for i, output in enumerate(problem.outputs)
        if output.axis == "rows"
    ]  # fmt: skip
    return tuple([names for names in found if names.n] or found[:1])


def _gathered(problem: Problem, rank: int, keeps: bool) -> tuple[Buffer, ...]:
    """Return the buffers of a call that sends rows of x; keeps: whether no output keeps them."""
    buffers = operand_buffers(problem, rank)
    if problem.world > 1:
        rows = problem.operator.blocks(problem, rank).window_rows
        buffers.append(Buffer(SENT, "window", rows, problem.k, problem.dtype, copies=2))
    if keeps:
        arriving = problem.operator.blocks(problem, rank).arriving
        buffers.append(Buffer(KEPT, "workspace", arriving, problem.k, problem.dtype))
    return tuple(buffers)


def _scattered(problem: Problem, rank: int) -> tuple[Buffer, ...]:
    """Return the buffers of a call that sends products."""
    blocks, dtype = problem.operator.blocks(problem, rank), problem.result_dtype
    height = sum(block.rows for block in blocks.outgoing)
    buffers = [
        *operand_buffers(problem, rank),
        Buffer(PARTIAL, "workspace", height, problem.n, dtype),
        Buffer(SENT, "window", blocks.window_rows, problem.n, dtype, copies=2),
    ]
    if problem.flow.finish == "share":
        buffers.append(Buffer(SHARED, "window", problem.m, problem.n, dtype, copies=2))
    return tuple(buffers)


# ---- steps


def _send(steps: Steps, table: SendTable) -> None:
    """Append products and stores at peers; see `sending`."""
    window = steps.window_at(table.recv) if table.world > 1 else ""
    depth, columns = (0, table.k), (0, table.n)
    steps.wait_free()
    steps.enter()
    for number in range(table.chunks):
        boxes, products = [], []
        for peer, row, top, high in table.sent:
            begin, end = chunk_bounds(high, table.chunks, "none")[number : number + 2]
            if begin < end:
                rows, target = (row + begin, row + end), (top + begin, top + end)
                source = steps.box("x", rows, depth)
                if table.sends_products:
                    made = steps.box(steps.workspace, rows, columns)
                    products.append((source, table.outputs[0].w, made, ""))
                    source = made
                place = steps.box(window, target, (source.col0, source.col1), peer)
                boxes.append((source, place))
        steps.multiply(f"gemm.{number}", products, table.outputs[0].turned)
        steps.store(f"{number}", boxes, number)
    own = (table.row, table.row + table.rows), (table.top, table.top + table.rows)
    if table.finish in ("multiply", "move") and table.rows:
        _multiply(steps, table, "own", steps.box("x", own[0], depth), own[1])
    if table.kept and table.rows:
        kept = steps.box(table.kept, own[1], depth)
        steps.copy("keep.own", "local_copy", [(steps.box("x", own[0], depth), kept)])
    steps.wait_entered()
    if table.adds:
        _add_arrivals(steps, table, window)
    else:
        _finish_arrivals(steps, table, window)
    steps.clear()
    steps.leave()


def _multiply(
    steps: Steps, table: SendTable, name: str, source: Region, rows: Span,
    terms: Sequence[Region] = (),
) -> None:  # fmt: skip
    """Append the products of a source with all weights, plus terms, in these rows of results."""
    outputs = [each for each in table.outputs if each.n]
    for number, turned in enumerate(dict.fromkeys([each.turned for each in outputs])):
        pieces = [
            (source, each.w, steps.box(each.y, rows, (0, each.n)), each.bias)
            for each in outputs
            if each.turned == turned
        ]
        steps.multiply(f"gemm.{name}.{number}", pieces, turned, terms)


def _finish_arrivals(steps: Steps, table: SendTable, window: str) -> None:
    """Append the products of each chunk that arrives, or its copy, or both."""
    width = table.n if table.sends_products else table.k
    target = table.outputs[0].y if table.sends_products else table.kept
    for number in range(table.chunks):
        for source, top, high in table.received:
            begin, end = chunk_bounds(high, table.chunks, "none")[number : number + 2]
            if begin == end:
                continue
            rows, name = (top + begin, top + end), f"{number}of{source}"
            steps.wait(f"wait.{name}", [Signal(table.rank, "data", source, number)])
            arrived = steps.box(window, rows, (0, width))
            if table.finish == "multiply":
                _multiply(steps, table, name, arrived, rows)
            if target:
                moved = [(arrived, steps.box(target, rows, (0, width)))]
                steps.copy(f"move.{name}", "local_copy", moved)


def _add_arrivals(steps: Steps, table: SendTable, window: str) -> None:
    """Append the sums of own products and those that arrive; shared sums are stored at peers."""
    rank, columns, target = table.rank, (0, table.n), table.outputs[0].y
    for number, rows in enumerate(pairwise(chunk_bounds(table.rows, table.chunks, "none"))):
        if rows[0] == rows[1]:
            continue
        signals = [Signal(rank, "data", each.source, number) for each in table.received]
        steps.wait(f"wait.{number}", signals)
        terms = [
            steps.box(window, (top + rows[0], top + rows[1]), columns)
            for _, top, _ in sorted(table.received)
        ]
        span = (table.top + rows[0], table.top + rows[1])
        source = steps.box("x", (table.row + rows[0], table.row + rows[1]), (0, table.k))
        _multiply(steps, table, f"sum{number}", source, span, terms)
        if table.finish == "share":
            y, shared = steps.box(target, span, columns), steps.window_at(table.sums)
            boxes = [(y, steps.box(shared, span, columns, peer)) for peer in steps.peers]
            steps.store(f"sum{number}", boxes, table.chunks + number)
    for number in range(table.chunks if table.finish == "share" else 0):
        for owner, row, _, high in table.sent:
            begin, end = chunk_bounds(high, table.chunks, "none")[number : number + 2]
            if begin < end:
                rows, name = (row + begin, row + end), f"sum{number}of{owner}"
                steps.wait(f"wait.{name}", [Signal(rank, "data", owner, table.chunks + number)])
                sums = steps.box(steps.window_at(table.sums), rows, columns)
                moved = [(sums, steps.box(target, rows, columns))]
                steps.copy(f"move.{name}", "local_copy", moved)


register(SendTable, _send)
