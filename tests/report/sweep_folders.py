"""Makes folders as a sweep writes them, by the simulator, some with times as if they had run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ficco.core.errors import FiccoError
from ficco.core.machine import Machine
from ficco.measure import simulator
from ficco.measure.selector.facts import facts_of
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

Shape = tuple[str, int, int, int]
SHAPES: tuple[Shape, ...] = (
    ("all_gather_matmul", 8192, 28672, 8192),
    ("all_gather_matmul", 2048, 4096, 4096),
    ("matmul_reduce_scatter", 8192, 8192, 28672),
    ("matmul_reduce_scatter", 256, 1024, 1024),  # too little to gain anything
)


def simulated_sweep(
    folder: Path,
    shapes: Sequence[Shape] = SHAPES,
    machine: str = "h200x4",
    grains: Sequence[int] = (1, 2, 4),
    noise: float = 0.0,
    regimes: Sequence[str] = ("simulated",),
) -> list[dict[str, Any]]:
    """Write sweep.json and results.jsonl; return the lines.

    Args:
        folder: made where it does not exist.
        shapes: operators with m, n, k.
        machine: that is simulated.
        grains: of every schedule but serial.
        noise: spread of the factors between predicted and "measured" times; 0: simulated.
        regimes: of every shape.
    """
    profile, chance = Machine.named(machine), random.Random(1)
    lines: list[dict[str, Any]] = []
    for op, m, n, k in shapes:
        problem = Problem.chunked(op, profile.devices, m, n, k, "bfloat16")
        for regime in regimes:
            lines += _case(problem, profile, grains, noise, regime, chance)
    write(folder, machine, lines, executed=noise > 0)
    return lines


def write(
    folder: Path, machine: str | None, lines: Sequence[dict[str, Any]], executed: bool
) -> None:
    """Write a folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "version": 1, "grid": "made for tests", "digest": "0" * 16,
        "how": "executed" if executed else "simulated", "paced": False,
        "machine": {"name": machine or "somewhere", "about": "a machine <of tests>", "devices": 4},
        "profile": machine, "driver": "13.0", "ficco": "0.1.0",
        "versions": {"python": "3.11", "torch": "2.13.0"}, "date": "2026-11-21",
        "cpu": "a CPU", "cores": 2, "assumptions": ["links & GEMMs as they were published"],
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(head))
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _case(
    problem: Problem,
    machine: Machine,
    grains: Sequence[int],
    noise: float,
    regime: str,
    chance: random.Random,
) -> list[dict[str, Any]]:
    p, facts = problem, facts_of(problem)
    simulate = "captured" if regime == "simulated" else regime
    shape = f"{p.op}-{p.m}-{p.n}-{p.k}-{p.dtype}-{p.world}"
    key = {"shape": shape, "regime": regime}
    serial = Schedule.named("serial").resolve(p.world, machine)
    alone: dict[str, float] = {}
    for span in simulator.predict(p, serial, machine, simulate).spans:
        if span.rank == 0:
            alone[span.kind] = alone.get(span.kind, 0.0) + (span.end_us - span.start_us) / 1e3
    gemm, ideal = alone["gemm"], max(alone.values())
    asked = [serial] + [
        replace(Schedule.named(name), grain=grain).resolve(p.world, machine)
        for name in Schedule.names(p.op)
        if name not in ("serial", "push_sm", "whole_sm")  # so that serial wins some
        for grain in grains
    ]
    points, bad, times = [], [], {}
    for schedule in asked:
        ident = f"{shape}-{regime}-{schedule.name}-{schedule.chunks}"
        label = {"id": ident, **key, "name": schedule.name, "grain": schedule.chunks}
        try:
            predicted = simulator.predict_ms(p, schedule, machine, simulate)
        except FiccoError as problem_found:
            bad.append({"kind": "bad", **label, "reason": str(problem_found)})
            continue
        ms = predicted * (1 + noise * (chance.random() - 0.3)) if noise else predicted
        times[ident] = (ms, schedule)
        loses = schedule.name != "serial"
        points.append({
            "kind": "point", **label, "schedule": schedule.to_json(), "ms": ms,
            "iqr_ms": ms * 0.02, "runs": 20 if noise else 1, "screened": False, "ok": True,
            "max_rel_error": 1e-3 * chance.random() if noise else None,
            "predicted_ms": predicted,
            "dil": 1 + 0.02 * schedule.chunks * chance.random() if loses else None,
            "cil": 1 + 0.05 * chance.random() if loses else None,
        })  # fmt: skip
    serial_ms = next(point["ms"] for point in points if point["name"] == "serial")
    for point in points:
        point["speedup"], point["efficiency"] = serial_ms / point["ms"], ideal / point["ms"]
    ranked = sorted(times, key=lambda ident: times[ident][0])
    traced = [
        {
            "kind": "timeline", "id": ident, **key, "which": which,
            "timeline": asdict(simulator.predict(p, times[ident][1], machine, simulate)),
        }
        for ident, which in ((ranked[0], "best"), (ranked[-1], "worst"))
    ]  # fmt: skip
    head = {
        "kind": "shape", **key, "op": p.op, "dtype": p.dtype, "world": p.world, "m": p.m,
        "n": p.n, "k": p.k, "gemm_ms": gemm, "transfer_ms": sum(alone.values()) - gemm,
        "ideal_ms": ideal, "floor_ms": facts.sent_bytes / 395e6, "flops": facts.flops,
        "bytes_out": facts.sent_bytes, "op_to_byte": facts.intensity, "serial_ms": serial_ms,
    }  # fmt: skip
    return [head, *points, *bad, *traced]
