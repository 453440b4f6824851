"""Measure one case on this rank: screen all points, then time the best with the baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comparing import summary
from comparing.by_pytorch import FUSED, fused
from comparing.cases import Case, points
from ficco.measure.cases import RecvBuffer
from ficco.measure.clock import Config
from ficco.measure.launching import Rendezvous
from ficco.measure.rounds import Measuring


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    grains: tuple[int | str, ...] = (1, 2, 4, "world")
    rounds: int = 20
    screening_rounds: int = 3
    keep: int = 2


def about(schedule: Any, asked: Any) -> dict[str, Any]:
    """Describe a point; `asked_` fields differ from the named schedule or the machine."""
    found = {"schedule": schedule.name, "grain": schedule.chunks}
    found |= {"route": schedule.route, "order": schedule.order}
    if asked.route != "machine" and schedule.name != "shard_p2p":
        found["asked_route"] = asked.route
    if asked.order == "by_peer" and schedule.name != "shard_p2p":
        found["asked_order"] = asked.order
    if asked.pace == "in_step":
        found["asked_pace"] = asked.pace
    if asked.taper == "edge":
        found["asked_taper"] = asked.taper
    return found


def measure(
    case: Case, rank: int, rendezvous: Rendezvous, settings: Settings, recv: RecvBuffer
) -> dict[str, Any]:
    """Return a case's result, equal on all ranks. A collective call."""
    from ficco.core.machine import Machine

    run = Measuring(case, rank, rendezvous, recv)
    baselines = [Config("serial", run.operands.serial)]
    if case.op in FUSED:
        baselines.append(Config("torch_fused", fused(run.operands)))
    baselines = [config for config in baselines if run.ready(config)]
    alone = run.parts()
    machine = Machine.named("cuda")
    ours = run.ours
    for asked in points(case, settings.grains):
        schedule = asked.resolve(case.world, machine)
        facts = about(schedule, asked)
        name = f"{schedule.name} g{schedule.chunks} {schedule.route} {schedule.order}"
        name += " in_step" if schedule.pace == "in_step" else ""
        name += " edge" if schedule.taper == "edge" else ""
        ours.append(Config(name, run.operands.ficco(schedule), facts))
    known = {config.name: config.about for config in ours}
    ours = run.ours = [config for config in ours if run.ready(config)]

    screened = run.rounds(run.entries(ours), settings.screening_rounds, 0)
    chosen = summary.best_points(screened, settings.keep)
    kept = {name for names in chosen.values() for name in names}
    for config in ours:
        if config.name not in kept:
            config.graph = config.last = None
    entries = run.entries(baselines) + [(config, "captured") for config in alone]
    entries += [
        (config, regime) for config, regime in run.entries(ours) if config.name in chosen[regime]
    ]
    times = run.rounds(entries, settings.rounds, 1)
    for config in ours:
        if config.name in kept:
            run.check_again(config)

    apart = {config.name for config in alone}
    parts = summary.ideal({key: found for key, found in times.items() if key[0] in apart})
    compared = {key: found for key, found in times.items() if key[0] not in apart}
    regimes = summary.regime_rows(compared, known, run.bad)
    for rows in regimes.values():  # the reasons of missing parts follow below
        rows[:] = [row for row in rows if not row["config"].startswith(("gemm", "transfer "))]
    missing = {name: why for (name, _), why in run.bad.items() if name.startswith("transfer ")}
    return {
        **case.facts(), **parts, "parts_missing": missing, "calls_a_run": run.timer.calls,
        "regimes": regimes, **summary.conclusions(regimes, parts["ideal_ms"]),
        "screened": summary.screening(screened),
    }  # fmt: skip
