"""Plans written by hand, of operators and kinds of steps that no lowering makes yet, or otherwise.

Two ranks, r and its peer q. They show that verifier and interpreter know the plan alone.
"""

from __future__ import annotations

from ficco.operators.problem import Problem
from ficco.operators.problem_checks import Output
from ficco.plan import Buffer, Part, Plan, Product, RankPlan, Region, Signal, Step, digest_of
from ficco.plan.schedule import Schedule

SCHEDULE = Schedule(grain=1, route="rotation", name="by hand")
M0, M1, N = 3, 2, 4
M = M0 + M1


def whole(rank: int, buffer: str, rows: int, cols: int) -> Region:
    return Region(rank, buffer, 0, rows, 0, cols)


def made(problem: Problem, ranks: list[RankPlan]) -> Plan:
    return Plan(problem, SCHEDULE, digest_of(problem, SCHEDULE), tuple(ranks))


def opening(r: int, q: int, lane: str) -> list[Step]:
    free = (Signal(r, "free", q),)
    return [
        Step("f1", lane, "wait", "none", signals=free),
        Step("f2", lane, "clear", "none", signals=free),
        Step("e1", lane, "raise", "none", signals=(Signal(q, "entered", r),)),
    ]


def closing(r: int, q: int, lane: str, extra: tuple[Signal, ...] = ()) -> list[Step]:
    signals = (Signal(r, "data", q), Signal(r, "entered", q), *extra)
    return [
        Step("c1", lane, "clear", "none", signals=signals),
        Step("c2", lane, "raise", "none", signals=(Signal(q, "free", r),)),
    ]


def scattering(dtype: str) -> tuple[Problem, tuple[int, int], tuple[int, int]]:
    depths, rows = (2, 3), (M0, M1)
    problem = Problem("matmul_reduce_scatter", 2, rows, 5, (Output((N, N)),), dtype, depths=depths)
    return problem, depths, rows


def reduce_scatter(dtype: str = "bfloat16") -> Plan:
    """The peer's rows first, pushed while the own rows are multiplied; then their sum."""
    problem, depths, rows = scattering(dtype)
    ranks = []
    for r in range(2):
        q = 1 - r
        mine, theirs = ((0, M0), (M0, M)) if r == 0 else ((M0, M), (0, M0))
        w = whole(r, "w", depths[r], N)
        part, own = whole(r, "part", rows[q], N), whole(r, "own", rows[r], N)
        there, here = whole(q, "recv", rows[q], N), whole(r, "recv", rows[r], N)
        y = whole(r, "y0", rows[r], N)
        a_theirs = Region(r, "x", *theirs, 0, depths[r])
        a_mine = Region(r, "x", *mine, 0, depths[r])
        steps = [
            Step("g1", "sm", "gemm", "sm", products=(Product(a_theirs, w, part),)),
            *opening(r, q, "push"),
            Step("p", "push", "copy", "dma", (part,), (there,), after=("g1",)),
            Step("d", "push", "raise", "none", signals=(Signal(q, "data", r),)),
            Step("g2", "sm", "gemm", "sm", products=(Product(a_mine, w, own),)),
            Step(
                "w1", "sm", "wait", "none", signals=(Signal(r, "data", q), Signal(r, "entered", q))
            ),
            Step("sum", "sm", "reduce", "sm", (own, here), (y,)),
            *closing(r, q, "sm"),
        ]
        ranks.append(RankPlan(r, _scatter_buffers(r, rows, depths, dtype), tuple(steps)))
    return made(problem, ranks)


def _scatter_buffers(
    r: int, rows: tuple[int, int], depths: tuple[int, int], dtype: str
) -> tuple[Buffer, ...]:
    return (
        Buffer("x", "input", M, depths[r], dtype),
        Buffer("w", "weight", depths[r], N, dtype),
        Buffer("y0", "output", rows[r], N, dtype),
        Buffer("part", "workspace", rows[1 - r], N, dtype),
        Buffer("own", "workspace", rows[r], N, "float32"),
        Buffer("recv", "window", max(rows), N, dtype, 2),
    )


def signalling_reduce_scatter(dtype: str = "bfloat16") -> Plan:
    """One launch that releases the peer's rows when done and adds the peer's to its own."""
    problem, depths, rows = scattering(dtype)
    ranks = []
    for r in range(2):
        q = 1 - r
        mine, theirs = ((0, M0), (M0, M)) if r == 0 else ((M0, M), (0, M0))
        w, ready = whole(r, "w", depths[r], N), (Signal(r, "ready", q),)
        part, y = whole(r, "part", rows[q], N), whole(r, "y0", rows[r], N)
        there, here = whole(q, "recv", rows[q], N), whole(r, "recv", rows[r], N)
        first = Product(Region(r, "x", *theirs, 0, depths[r]), w, part)
        second = Product(Region(r, "x", *mine, 0, depths[r]), w, y, add=(here,))
        steps = [
            *opening(r, q, "push"),
            Step("r1", "push", "wait", "none", signals=ready),
            Step("r2", "push", "clear", "none", signals=ready),
            Step("p", "push", "copy", "dma", (part,), (there,)),
            Step("d", "push", "raise", "none", signals=(Signal(q, "data", r),)),
            Step("w1", "sm", "wait", "none", signals=(Signal(r, "entered", q),)),
            Step(
                "g", "sm", "gemm", "sm", concurrent=True,
                parts=(
                    Part(products=(first,), raises=ready),
                    Part(waits=(Signal(r, "data", q),), products=(second,)),
                ),
            ),
            *closing(r, q, "sm"),
        ]  # fmt: skip
        ranks.append(RankPlan(r, _scatter_buffers(r, rows, depths, dtype), tuple(steps)))
    return made(problem, ranks)


def collective_all_gather() -> Plan:
    """No window, no signals: a library gathers, one GEMM multiplies."""
    rows, k, columns = (M0, M1), 3, (N, 1)
    problem = Problem("all_gather_matmul", 2, rows, k, (Output(columns, bias=True),))
    ranks = []
    for r in range(2):
        x, all_x = whole(r, "x", rows[r], k), whole(r, "gathered", M, k)
        w, y = whole(r, "w", k, columns[r]), whole(r, "y0", M, columns[r])
        product = Product(all_x, w, y, add=(whole(r, "bias0", 1, columns[r]),))
        buffers = (
            Buffer("x", "input", rows[r], k, "float32"),
            Buffer("w", "weight", k, columns[r], "float32"),
            Buffer("bias0", "weight", 1, columns[r], "float32"),
            Buffer("y0", "output", M, columns[r], "float32"),
            Buffer("gathered", "workspace", M, k, "float32"),
        )
        steps = (
            Step("gather", "c", "collective", "sm", (x,), (all_x,), collective="all_gather"),
            Step("g", "sm", "gemm", "sm", products=(product,), after=("gather",)),
        )
        ranks.append(RankPlan(r, buffers, steps))
    return made(problem, ranks)


def pooled_embedding(modes: tuple[tuple[str, ...], ...] = ()) -> Plan:
    """Bags of own tables for the whole batch, then an all-to-all of batch slices."""
    rows, dim, tables = (M0, M1), 2, ((5,), (4, 6))
    problem = Problem(
        "embedding_all_to_all",
        2,
        rows,
        1,
        (Output((dim, dim)),),
        tables=tables,
        lookups=((9,), (9, 9)),
        modes=modes,
    )
    edges, widths = (0, M0, M), [dim * len(t) for t in tables]
    columns = (0, widths[0], widths[0] + widths[1])
    ranks = []
    for r in range(2):
        buffers = [Buffer("y0", "output", rows[r], columns[2], "float32")]
        steps = []
        for i, height in enumerate(tables[r]):
            buffers += [
                Buffer(f"table{i}", "weight", height, dim, "float32"),
                Buffer(f"indices{i}", "input", 1, 9, "int64"),
                Buffer(f"offsets{i}", "input", 1, M, "int64"),
            ]
            reads = (
                whole(r, f"table{i}", height, dim),
                whole(r, f"indices{i}", 1, 9),
                whole(r, f"offsets{i}", 1, M),
            )
            target = Region(r, "pooled", 0, M, i * dim, (i + 1) * dim)
            step = Step(f"bag{i}", "sm", "bag", "sm", reads, (target,))
            mode = problem.modes_of(r)[i]
            if mode == "weighted":
                buffers.append(Buffer(f"weights{i}", "input", 1, 9, "float32"))
                step = step._replace(reads=(*reads, whole(r, f"weights{i}", 1, 9)))
            steps.append(step._replace(modes=() if mode == "sum" else (mode,)))
        buffers.append(Buffer("pooled", "workspace", M, widths[r], "float32"))
        gives = tuple(Region(r, "pooled", edges[s], edges[s + 1], 0, widths[r]) for s in range(2))
        takes = tuple(Region(r, "y0", 0, rows[r], columns[s], columns[s + 1]) for s in range(2))
        steps.append(Step("swap", "sm", "collective", "sm", gives, takes, collective="all_to_all"))
        ranks.append(RankPlan(r, tuple(buffers), tuple(steps)))
    return made(problem, ranks)


def pooled_by_mode() -> Plan:
    """A weighted table on the first rank; means and sums on the second."""
    return pooled_embedding((("weighted",), ("mean", "sum")))


HANDMADE = {
    "reduce_scatter": reduce_scatter,
    "signalling_reduce_scatter": signalling_reduce_scatter,
    "collective_all_gather": collective_all_gather,
    "pooled_embedding": pooled_embedding,
    "pooled_by_mode": pooled_by_mode,
}
