"""Cases from shapes.toml, their sizes, and the schedules that are tried on them. No torch here."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ficco.schedule import Schedule
from ficco.selector.candidates import FEW_ROWS

SHAPES = Path(__file__).resolve().parent.parent / "shapes.toml"
DTYPE, ITEM_BYTES = "bfloat16", 2
LINK_GBPS = 395.0  # most that one H200 was seen to push to one peer (2026-11-20)
EXCHANGES = ("all_to_all_matmul", "matmul_all_to_all")
# What NCCL's zero-CTA policy moves by copy engines; NCCL 2.28 has no such reduction.
BY_COPY_ENGINES = ("all_gather_matmul", *EXCHANGES)
Shape = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One operator on one shape; m is rows on each rank for all-to-all, else over all ranks."""

    op: str
    m: int
    n: int
    k: int
    world: int
    all_points: bool = False

    @property
    def id(self) -> str:
        """Operator and shape."""
        return f"{self.op} {self.m}x{self.n}x{self.k}"

    @property
    def unfit(self) -> str:
        """Say why the shape cannot be split evenly; empty where it can."""
        split = {"m": self.m}
        if self.op == "all_gather_matmul":
            split["n"] = self.n
        elif self.op not in EXCHANGES:
            split["k"] = self.k
        odd = [f"{name}={size}" for name, size in split.items() if size % self.world]
        return f"{', '.join(odd)} not divisible by {self.world}" if odd else ""

    @property
    def x(self) -> Shape:
        """Shape of a rank's input."""
        if self.op == "all_gather_matmul":
            return self.m // self.world, self.k
        return self.m, self.k if self.op in EXCHANGES else self.k // self.world

    @property
    def w(self) -> Shape:
        """Shape of a rank's weight."""
        if self.op == "all_gather_matmul":
            return self.k, self.n // self.world
        return self.x[1], self.n

    @property
    def product(self) -> Shape:
        """Shape of a rank's whole GEMM's result."""
        return self.m, self.w[1]

    @property
    def y(self) -> Shape:
        """Shape of a rank's output."""
        rows = self.m // self.world if self.op == "matmul_reduce_scatter" else self.m
        return rows, self.w[1]

    @property
    def flops(self) -> float:
        """Operations of one rank."""
        return 2.0 * self.m * self.w[0] * self.w[1]

    @property
    def piece(self) -> int:
        """Elements that a rank sends to one peer at once."""
        width = self.n if self.op.startswith("matmul") else self.k
        return self.m // self.world * width

    @property
    def passes(self) -> int:
        """How many times a rank sends a piece to every peer."""
        return 2 if self.op == "matmul_all_reduce" else 1

    @property
    def bytes_out(self) -> int:
        """Bytes that must leave a rank."""
        return self.passes * (self.world - 1) * self.piece * ITEM_BYTES

    @property
    def sets(self) -> int:
        """Sets of inputs in turn, so that together they exceed the L2 (60 MB) twice."""
        each = ITEM_BYTES * (self.x[0] * self.x[1] + self.w[0] * self.w[1])
        return min(10, max(2, -(-120_000_000 // each)))

    def facts(self) -> dict[str, Any]:
        """Return what every result says of its case."""
        return {
            "case": self.id, "op": self.op, "m": self.m, "n": self.n, "k": self.k,
            "m_is": "rows on each rank" if self.op in EXCHANGES else "rows over all ranks",
            "world": self.world, "dtype": DTYPE, "flops": self.flops, "bytes_out": self.bytes_out,
            "input_sets": self.sets, "floor_ms": round(self.bytes_out / LINK_GBPS / 1e6, 4),
        }  # fmt: skip


def read(world: int) -> list[Case]:
    """Return all cases, in the file's order."""
    table = tomllib.loads(SHAPES.read_text())
    return [
        Case(entry["op"], *shape, world, entry.get("all_points", False))
        for entry in table["cases"]
        if world in entry.get("worlds", (world,))
        for shape in entry["shapes"]
    ]


def host_cost_cases(world: int) -> list[Case]:
    """Return the cases of host_cost.py."""
    table = tomllib.loads(SHAPES.read_text())["host_cost"]
    return [Case(op, *shape, world) for op, shape in table.items()]


def points(case: Case, grains: Sequence[int | str]) -> list[Schedule]:
    """Return the schedules to try: every named one at every grain, and more for some cases."""
    numbers = sorted({case.world if grain == "world" else int(grain) for grain in grains})
    found = []
    for name in Schedule.names(case.op):
        schedule = Schedule.named(name)
        if name == "serial":
            continue
        if schedule.transport == "sm":
            if case.m <= FEW_ROWS:
                found.append(schedule)
            continue
        for grain in [1] if name == "shard_p2p" else numbers:
            found.append(replace(schedule, grain=grain))
    if case.op == "matmul_all_reduce" and case.world > 2:
        unfused = replace(Schedule.named("hetero_unfused_1d"), route="rotation", pace="in_step")
        found += [replace(unfused, grain=grain) for grain in numbers]
    if case.all_points:
        base = Schedule.named("hetero_unfused_1d")  # rotation, by_step where the machine decides
        for grain in numbers:
            found.append(replace(base, grain=grain, route="all_peers"))
            if grain > 1:  # one chunk has one order
                found.append(replace(base, grain=grain, route="rotation", order="by_peer"))
                found.append(replace(base, grain=grain, route="all_peers", order="by_peer"))
            if case.op == "all_gather_matmul" and case.world > 2:
                paced = replace(base, grain=grain, route="rotation", pace="in_step")
                found.append(paced)
                if grain > 1:
                    found.append(replace(paced, order="by_peer"))
    return found
