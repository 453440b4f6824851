"""The table of the kernel that runs a whole plan. Numbers only: no torch and no Triton.

Buffers, regions and signals of the plan suggest a table. `one_kernel_steps` says what the kernel
does with it, and the plan must be the same, step by step. So a table that is returned describes the
plan, whoever wrote it, and the kernel does what the verifier has proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NoReturn

from ficco.core.errors import PlanError
from ficco.lowering.multiplying import WINDOW
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.lowering.one_kernel_pool import POOLED
from ficco.lowering.one_kernel_steps import plan_of
from ficco.lowering.pulling import PRODUCTS, SUMS, TERMS
from ficco.lowering.sending import SENT
from ficco.operators.problem import MODES
from ficco.plan import Buffer, RankPlan, Region, Step, window_places
from ficco.plan.schedule import MAX_CHUNKS
from ficco.plan.tables import (
    BagsReceived,
    BagsSent,
    GatherTable,
    OneKernelChunk,
    OneKernelTable,
    OutputNames,
    PoolTable,
    PullTable,
    RowsTaken,
    WholeTable,
    peers_of,
)
from ficco.program.passes.sending_tables import send_table


def table_of(plan: RankPlan) -> WholeTable:
    """Return the table of the kernel that runs a rank's plan.

    Args:
        plan: of a schedule with transport "sm", on several ranks.

    Raises:
        PlanError: no kernel can run the plan; the message names the step.
    """
    table = _Reader(plan).table()
    wanted = plan_of(table, plan.buffers).steps
    for step, expected in zip(plan.steps, wanted, strict=False):
        if step is not expected and _content(step) != _content(expected, plan.steps[0].lane):
            _refuse(plan, step, f"the kernel does {_words(expected)} here")
    if len(plan.steps) != len(wanted):
        why = f"the plan has {len(plan.steps)} steps, the kernel {len(wanted)}"
        _refuse(plan, plan.steps[-1], why)
    if isinstance(table, OneKernelTable):
        table = table._replace(made=is_made_before(table.m, table.twice))
    return table


def _refuse(plan: RankPlan, step: Step | None, why: str) -> NoReturn:
    name = repr(step.id) if step else "-"
    raise PlanError(
        f"rank {plan.rank}, step {name}: {why}; the kernels run only plans of transport='sm' on "
        "several ranks"
    )


def _content(step: Step, lane: str = "") -> Step:
    """Return what a step does, in this lane: without its name and the order of its signals."""
    return step._replace(id="", lane=lane or step.lane, signals=tuple(sorted(step.signals)))


def _words(step: Step) -> str:
    signals = f" of {_listed(step.signals)}" if step.signals else ""
    boxes = f" from {_listed(step.reads)} to {_listed(step.writes)}" if step.writes else ""
    return f"a {step.kind}{signals}{boxes}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"


class _Reader:
    """Reads what a plan suggests. Nothing is checked here but that there is something to read."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan, self.rank = plan, plan.rank
        self.buffers = {buffer.name: buffer for buffer in plan.buffers}
        self.places, _ = window_places(plan.buffers)
        self.mailboxes = [buffer.name for buffer in plan.buffers if buffer.role == "mailbox"]
        entered = next((step.signals for step in plan.steps if step.kind == "raise"), ())
        self.world = len(entered) + 1
        self.chunks = [s.chunk for step in plan.steps for s in step.signals if s.name == "data"]

    def table(self) -> WholeTable:
        """Return the suggested table."""
        if not 0 <= self.rank < self.world or self.world == 1:
            self._refuse(f"{self.world - 1} peers are notified")
        if WINDOW in self.places:
            return self._gather()
        if PRODUCTS in self.places:
            return self._pull()
        if POOLED in self.places:
            return self._pool()
        if SENT in self.places:
            return send_table(self.plan, self.world, self._most_chunks())
        if len(self.mailboxes) not in (1, 2):
            self._refuse(f"it has {len(self.mailboxes)} mailboxes, and no window of a kernel")
        return self._all_reduce()

    def _refuse(self, why: str) -> NoReturn:
        _refuse(self.plan, next(iter(self.plan.steps), None), why)

    def _buffer(self, name: str) -> Buffer:
        if name not in self.buffers:
            self._refuse(f"it has no buffer {name!r}")
        return self.buffers[name]

    def _steps(self, kind: str) -> list[Step]:
        return [step for step in self.plan.steps if step.kind == kind]

    def _copies(self, kind: str) -> list[tuple[Region, Region]]:
        steps = self._steps(kind)
        return [copy for step in steps for copy in zip(step.reads, step.writes, strict=False)]

    def _most_chunks(self) -> int:
        """Return the number of chunks, of which the last one is never empty."""
        return min(max(self.chunks, default=0) + 1, MAX_CHUNKS)

    def _gather(self) -> GatherTable:
        x, gathered = self._buffer("x"), self.buffers[WINDOW]
        stored = self._copies("copy") if x.rows else []
        waited = [signal for step in self._steps("wait") for signal in step.signals]
        outputs: dict[str, OutputNames] = {}
        for step in self._steps("gemm"):
            for _, b, c, _, add in step.products:
                bias = add[0].buffer if add else ""
                names = OutputNames(c.buffer, b.buffer, bias, c.cols, step.transpose_b)
                outputs.setdefault(c.buffer, names)
        kept = next((target.buffer for _, target in self._copies("local_copy")), "")
        for buffer in self.plan.buffers:
            if buffer.role == "output" and buffer.cols and buffer.name not in (*outputs, kept):
                self._refuse(f"no step computes {buffer.name!r}")
        return GatherTable(
            rank=self.rank, world=self.world, m=gathered.rows, k=x.cols, dtype=x.dtype,
            own_row=stored[0][1].row0 if stored else 0, own_rows=x.rows,
            width=stored[0][0].cols if stored else 0, slices=self._most_chunks(),
            sources=tuple(sorted({signal.peer for signal in waited if signal.name == "data"})),
            gathered=self.places[WINDOW], outputs=tuple(outputs.values()), kept=kept,
        )  # fmt: skip

    def _sums(self) -> dict[str, Any]:
        """Return what the tables of calls that sum or read products have in common."""
        x, y = self._buffer("x"), self._buffer("y0")
        weights = [buffer for buffer in self.plan.buffers if buffer.role == "weight"]
        bias = next((buffer.name for buffer in weights if buffer.name == "bias0"), "")
        w = next((buffer for buffer in weights if buffer.name != bias), None)
        if w is None:
            self._refuse("it has no weight")
        turned = any(step.transpose_b for step in self.plan.steps)
        turned = turned or (x.cols == 0 and w.rows > 0)  # a plan without products
        return {
            "rank": self.rank, "world": self.world, "m": y.rows, "n": y.cols, "k": x.cols,
            "dtype": y.dtype, "bias": bool(bias),
            "outputs": (OutputNames("y0", w.name, bias, y.cols, turned),),
        }  # fmt: skip

    def _all_reduce(self) -> OneKernelTable:
        known = self._sums()
        recv, twice = self.mailboxes[0], len(self.mailboxes) == 2
        begun = takewhile(lambda step: step.kind != "wait", self.plan.steps)
        made = [
            piece
            for step in begun
            if step.kind in ("gemm", "reduce")
            for piece in [*[(p.c, p.add) for p in step.products],
                          *[(target, step.reads) for target in step.writes]]
        ]  # fmt: skip
        columns = list(dict.fromkeys([(target.col0, target.col1) for target, _ in made]))
        totals = min([i for i in self.chunks if i >= len(columns)], default=0) if twice else 0
        rows = [0] * self.world
        if twice:
            sent = [target for _, target in self._copies("copy")]
            own = [target._replace(rank=self.rank) for target, _ in made]
            for target in (*sent, *own):
                if target.buffer == recv and 0 <= target.rank < self.world:
                    rows[target.rank] = target.rows
        biased = next((target for target, add in made if add), None)
        top = self.rank * known["m"]
        return OneKernelTable(
            **known, twice=twice, made=False,
            chunks=tuple([OneKernelChunk(*edges, i, (totals + i) * twice)
                          for i, edges in enumerate(columns)]),
            rows=tuple(rows) if twice else (),
            bias_row=biased.row0 - top if biased else 0, bias_rows=biased.rows if biased else 0,
            recv=self.places[recv], kept=self.places[self.mailboxes[1]] if twice else 0,
        )  # fmt: skip

    def _pull(self) -> PullTable:
        twice, moves, rows = SUMS in self.places, TERMS not in self.buffers, [0] * self.world
        sums = [target for step in self._steps("reduce") for target in step.writes]
        copies = self._copies("copy") + self._copies("local_copy") * moves
        for box in (*sums, *[source for source, _ in copies]):
            if box.buffer == SUMS and 0 <= box.rank < self.world:
                rows[box.rank] += box.rows
        own = [box for step in self._steps("reduce") for box in step.reads if box.rank == self.rank]
        read = [(source, target.row0 * moves) for source, target in copies]
        read += [(box, 0) for box in own]
        taken = {
            source.rank: RowsTaken(source.rank, source.row0, top, source.rows)
            for source, top in read
            if source.buffer == PRODUCTS
        }
        ranks = range(0 if twice else self.world)
        return PullTable(
            **self._sums(), made=self._buffer("x").rows, moves=moves,
            taken=tuple([taken.get(rank, RowsTaken(rank, 0, 0, 0)) for rank in ranks]),
            twice=twice, rows=tuple(rows) if twice else (),
            chunks=self._most_chunks(), products=self.places[PRODUCTS],
            sums=self.places.get(SUMS, 0),
        )  # fmt: skip

    def _pool(self) -> PoolTable:
        y = self._buffer("y0")
        tables = [buffer for buffer in self.plan.buffers if buffer.name.startswith("table")]
        bags = [step for step in self._steps("bag") if step.writes]
        modes = [mode for step in bags[:1] for mode in step.modes if mode in MODES]
        own = [step for step in bags if step.writes[0].buffer == "y0" and len(step.reads) > 2]
        sent: dict[int, BagsSent] = {}
        for source, target in self._copies("copy"):
            _, bag, height = sent.get(target.rank, (0, source.row0, 0))
            sent[target.rank] = BagsSent(target.rank, min(bag, source.row0), height + source.rows)
        received: dict[int, BagsReceived] = {}
        for step, following in pairwise(self.plan.steps):
            if step.kind == "wait" and following.kind == "local_copy":
                for signal, box in zip(step.signals, following.reads, strict=False):
                    received[signal.peer] = BagsReceived(signal.peer, box.col0, box.cols)
        common = math.gcd(*[columns.width for columns in received.values()])
        lefts = [target.col0 for _, target in self._copies("copy")]
        peers = peers_of(self.rank, self.world)
        return PoolTable(
            rank=self.rank, world=self.world, dtype=y.dtype,
            modes=tuple(modes[: len(tables)] or ["sum"] * len(tables)),
            dim=tables[0].cols if tables else max(common, 1),
            left=next(iter(lefts), own[0].writes[0].col0 if own else 0),
            bag=own[0].reads[2].col0 if own else 0, rows=y.rows,
            sent=tuple([sent[peer] for peer in peers if peer in sent]),
            received=tuple([received[peer] for peer in peers if peer in received]),
            chunks=self._most_chunks(), recv=self.places[POOLED],
        )  # fmt: skip
