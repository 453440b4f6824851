"""The table of a pooling and all-to-all in one launch. Numbers only: no torch, no Triton.

The plan's buffers, regions and signals suggest a table. `readback_one_kernel` says what the kernel
does with it, and the plan must be the same, step by step.
"""

from __future__ import annotations

import math

from ficco.lowering.one_kernel_pool import POOLED
from ficco.passes.readback_one_kernel import steps_of_one_kernel
from ficco.passes.same_steps import check_same_steps
from ficco.plan import RankPlan, Signal, bags_of, mode_of, window_places
from ficco.tables import BagsReceived, BagsSent, PoolTable

__all__ = ["table_of"]


def table_of(plan: RankPlan) -> PoolTable:
    """Return the table of a rank's plan.

    Args:
        plan: of an embedding_all_to_all with transport "sm", on several ranks.

    Raises:
        PlanError: the kernel cannot run the plan; the message names the step.
    """
    table = _suggested(plan)
    first = plan.steps[0]
    wanted = steps_of_one_kernel(first.id, first.lane, table, plan.buffers)
    check_same_steps(plan, plan.steps, wanted, "embedding_all_to_all with transport='sm'")
    return table


def _suggested(plan: RankPlan) -> PoolTable:
    """Return the table that the plan suggests."""
    y = plan.buffer("y0")
    tables = [buffer for buffer in plan.buffers if buffer.name.startswith("table")]
    modes: dict[str, str] = {}  # by name of the table
    sent: dict[int, BagsSent] = {}
    received: dict[int, BagsReceived] = {}
    left, bag, chunks, arrived = 0, 0, 1, tuple[Signal, ...]()
    for step in plan.steps:
        data = tuple([signal for signal in step.signals if signal.name == "data"])
        chunks = max([chunks, *[signal.chunk + 1 for signal in data]])
        if step.kind == "wait":
            arrived = data
        elif step.kind == "copy":
            for source, target in zip(step.reads, step.writes, strict=True):
                left = target.col0
                earlier = sent.get(target.rank, BagsSent(target.rank, source.row0, 0))
                rows = earlier.rows + source.rows
                sent[target.rank] = BagsSent(target.rank, min(earlier.bag, source.row0), rows)
        elif step.kind == "local_copy":
            for signal, box in zip(arrived, step.reads, strict=False):
                received[signal.peer] = BagsReceived(signal.peer, box.col0, box.cols)
        elif step.kind == "bag":
            for made in bags_of(step):
                modes[made.table.buffer] = mode_of(made)
            if step.writes and step.writes[0].buffer == y.name:
                left, bag = step.writes[0].col0, step.reads[2].col0
    entered = next((step.signals for step in plan.steps if step.kind == "raise"), ())
    world = len(entered) + 1
    common = math.gcd(*[columns.width for columns in received.values()])
    turns = [(plan.rank + turn) % world for turn in range(1, world)]
    return PoolTable(
        rank=plan.rank, world=world, dtype=y.dtype,
        modes=tuple([modes.get(table.name, "sum") for table in tables]),
        dim=tables[0].cols if tables else max(common, 1), left=left, bag=bag, rows=y.rows,
        sent=tuple([sent[peer] for peer in turns if peer in sent]),
        received=tuple([received[peer] for peer in turns if peer in received]), chunks=chunks,
        recv=window_places(plan.buffers)[0][POOLED],
    )  # fmt: skip
