"""Cases from shapes.toml, their sizes, and the schedules to try. It does not import torch."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ficco.lowering.cutting import is_edged
from ficco.measure.layout import Layout
from ficco.measure.selector.candidates import few_rows
from ficco.operators import registry
from ficco.plan.schedule import Schedule

SHAPES = Path(__file__).resolve().parent.parent / "shapes.toml"
LINK_GBPS = 395.0  # highest measured rate of pushes from one H200 to one peer (2026-11-20)
# Collectives that NCCL's zero-CTA policy runs on copy engines; NCCL 2.28 has no such reduction.
BY_COPY_ENGINES = ("all_gather_matmul", "all_to_all_matmul", "matmul_all_to_all")


@dataclass(frozen=True)
class Case(Layout):
    """A shape to measure.

    Attributes:
        all_points: whether to try hetero_unfused_1d with every route and order, too.
    """

    all_points: bool = False

    def facts(self) -> dict[str, Any]:
        """Return the fields of the case that every result contains."""
        return {
            "case": self.id, "op": self.op, "m": self.m, "n": self.n, "k": self.k,
            "m_is": f"rows {'on each rank' if self.flow.splits else 'over all ranks'}",
            "world": self.world, "dtype": self.dtype, "flops": self.flops,
            "bytes_out": self.bytes_out,
            "input_sets": self.sets, "floor_ms": round(self.bytes_out / LINK_GBPS / 1e6, 4),
        }  # fmt: skip


def read(world: int) -> list[Case]:
    """Return all cases, in the file's order."""
    table = tomllib.loads(SHAPES.read_text())
    return [
        Case(entry["op"], *shape, world, all_points=entry.get("all_points", False))
        for entry in table["cases"]
        if world in entry.get("worlds", (world,))
        for shape in entry["shapes"]
    ]


def host_cost_cases(world: int) -> list[Case]:
    """Return the cases of host_cost.py."""
    table = tomllib.loads(SHAPES.read_text())["host_cost"]
    return [Case(op, *shape, world) for op, shape in table.items()]


def points(case: Case, grains: Sequence[int | str]) -> list[Schedule]:
    """Return the schedules to try: all named schedules at all grains, and more for some cases."""
    numbers = sorted({case.world if grain == "world" else int(grain) for grain in grains})
    found = []
    for name in Schedule.names(case.op):
        schedule = Schedule.named(name)
        if name == "serial":
            continue
        if schedule.transport == "sm":
            if schedule.moves or case.m <= few_rows(case.op):
                found.append(schedule)
            continue
        for grain in [1] if name == "shard_p2p" else numbers:
            found.append(replace(schedule, grain=grain))
    if case.op in ("all_gather_matmul", "matmul_all_reduce") and case.world > 2:
        paced = ("hetero_unfused_1d", "gated_1d", "gated_sums_1d")
        for name in paced[: 3 if case.op == "matmul_all_reduce" else 2]:
            in_step = replace(Schedule.named(name), route="rotation", pace="in_step")
            found += [replace(in_step, grain=grain) for grain in numbers]
    if is_edged(registry.get(case.op).flow) and case.world > 2:
        edge = replace(
            Schedule.named("gated_1d"), route="rotation", order="by_peer", taper="edge",
            pace="in_step" if registry.get(case.op).flow.own_columns else "free",
        )  # fmt: skip
        found += [replace(edge, grain=grain) for grain in numbers if 1 < grain <= 4]
    if case.all_points:
        base = Schedule.named("hetero_unfused_1d")  # rotation, by_step: the machine's choice
        for grain in numbers:
            found.append(replace(base, grain=grain, route="all_peers"))
            if grain > 1:  # with one chunk there is one order
                found.append(replace(base, grain=grain, route="rotation", order="by_peer"))
                found.append(replace(base, grain=grain, route="all_peers", order="by_peer"))
            if case.op == "all_gather_matmul" and case.world > 2 and grain > 1:
                in_step = replace(base, grain=grain, route="rotation", pace="in_step")
                found.append(replace(in_step, order="by_peer"))
    return found
