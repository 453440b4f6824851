"""Candidates: the points of the design space to consider for a problem on a machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache

from ficco.core.machine import Machine
from ficco.lowering.cutting import is_edged
from ficco.lowering.sending import sends as is_sending
from ficco.measure.selector.facts import Facts
from ficco.operators import registry
from ficco.plan.schedule import MAX_CHUNKS, Schedule

# The order among equal predictions: fewest chunks first; then pace="in_step", because drift is
# random; then fewest GEMMs, because each costs slightly more than predicted; then schedules that
# hide their beginning.
_PLAINEST = (
    "serial", "hetero_fused_1d", "shard_p2p", "hetero_unfused_1d", "ring_1d", "gated_1d",
    "gated_sums_1d", "uniform_fused_1d", "uniform_fused_2d",
)  # fmt: skip

FEW_ROWS = 64  # above this, the kernel that stores at peers multiplies too slowly to gain
_SUMMED_ROWS = 512  # above this, stores into mailboxes take longer than NCCL
_MOST_ROWS = {"gather": FEW_ROWS, "pool": sys.maxsize}  # by kernel; bags may be any number
# Of launches that send. With 4 chunks they took 1.04 to 1.35 times as long (H200s, bench/NOTES.md).
_SENT_GRAINS = (1, 2)
_MULTIPLIED_ROWS = 384  # above this, the kernel that sums in one shot multiplies far more slowly


@lru_cache(maxsize=64)
def serial(world: int, machine: Machine) -> Schedule:
    """Return the schedule without overlap, resolved for the machine."""
    return Schedule.named("serial").resolve(world, machine)


def plainness(schedule: Schedule) -> tuple[int, bool, int]:
    """Return a sort key that puts the plainest schedule first."""
    known = schedule.name in _PLAINEST
    place = _PLAINEST.index(schedule.name) if known else len(_PLAINEST)
    return schedule.chunks, schedule.pace != "in_step", place


def _flow(op: str) -> registry.Flow:
    return registry.get(op).flow


def _gates(op: str, machine: Machine, gates: bool) -> bool:
    """Return whether gated launches exist for an operator; on GPUs none pools bags."""
    return gates and (machine.engine == "host" or not _flow(op).pools)


def _sums(op: str, machine: Machine) -> bool:
    """Return whether sums within a launch may win: on GPUs only in all-reduce (bench/NOTES.md)."""
    return machine.engine == "host" or _flow(op).shares


def _rings(op: str, machine: Machine, world: int, grain: int) -> bool:
    """Return whether sums on a ring may win. A ring uses only one link of a mesh.

    In an all-reduce the pushes of sums meet sums that still circulate (measured: `bench/NOTES.md`).
    A single chunk has no overlap: it is either made or travels. The number of signals limits grain.
    """
    rings = _flow(op).finish == "sum" and machine.best_route == "rotation"
    return rings and grain > 1 and grain * (world - 1) <= MAX_CHUNKS


def _turns(op: str, machine: Machine) -> bool:
    """Return whether data is ready to push at the start, so that pace="in_step" may gain."""
    alike = _flow(op).collective in ("all_gather", "all_reduce")  # peers get equal amounts
    return alike and machine.best_route == "rotation"


def _edged(op: str, machine: Machine, grain: int) -> list[Schedule]:
    """Return gated_1d with taper="edge" (only the last or first shard cut), if it applies."""
    if not is_edged(_flow(op)) or machine.best_route != "rotation":
        return []
    cut = replace(Schedule.named("gated_1d"), grain=grain, taper="edge", order="by_peer")
    return [replace(cut, pace="in_step") if _flow(op).own_columns else cut]


def _stores(machine: Machine, world: int) -> bool:
    """Return whether kernels can store at all ranks, and the cost of a store is known."""
    near = world <= machine.devices
    return near and machine.engine == "cuda" and machine.costs.store_us > 0


def few_rows(op: str) -> int:
    """Return the largest number of rows for which one launch that stores at peers may win."""
    return _MOST_ROWS.get(_flow(op).one_kernel, _SUMMED_ROWS)


def are_few(facts: Facts) -> bool:
    """Return whether a problem has few rows, and one launch that stores at peers can run it."""
    return facts.storing and facts.m <= few_rows(facts.op)


@lru_cache(maxsize=256)
def points(  # noqa: PLR0913 - a point depends on as many facts
    op: str,
    world: int,
    machine: Machine,
    sums: bool = False,
    gates: bool = True,
    alone: bool = True,
    stores: str = "",
    pulls: str = "",
    sends: bool = False,
) -> tuple[Schedule, ...]:
    """Return resolved schedules; the first one is `serial`.

    These are all named schedules at grains 1, 2, 4, ... up to the number of ranks (at least 4), and
    on a switch also those with pace="in_step". Schedules without a plan, or that the machine's
    engine cannot run, are left out. So is sums="within" for a reduce-scatter on GPUs
    (`bench/NOTES.md`). On GPUs, outputs that are sums over arrivals have only `serial`: adding to
    float32 sums chunk by chunk, and rounding them, takes longer than the transfer.

    Args:
        op: the operator.
        world: number of ranks.
        machine: the machine to run on.
        sums: whether an output is a sum over arrivals, which parts of one launch cannot add to.
        gates: whether the GEMM library has gated GEMMs.
        alone: whether kernels may wait for peers' kernels.
        stores: the `shots` of one launch that multiplies and stores at peers: "" if it does not
            apply, as rows are not few (`are_few`), "both", or "two" if they are too many for one.
        pulls: the same of one kernel that reads peers' products, and sums or moves them.
        sends: whether one launch may send rows, or products by rows.
    """
    schedules = [serial(world, machine)]
    if not registry.get(op).general:
        own = [Schedule.named(name).resolve(world, machine) for name in registry.get(op).schedules]
        return (*schedules, *(own if world > 1 and gates else ()))
    if world == 1 or (sums and machine.engine == "cuda"):
        return tuple(schedules)
    grains, grain = [], 1
    while grain <= max(world, 4):
        grains.append(grain)
        grain *= 2
    for grain in grains:
        for name in Schedule.names(op):
            named = Schedule.named(name)
            if name == "serial" or (name == "shard_p2p" and grain > 1) or named.transport == "sm":
                continue
            if named.sums == "within" and not (alone and _sums(op, machine)):
                continue
            if named.sums == "along" and not _rings(op, machine, world, grain):
                continue
            if named.compute == "gated" and (sums or not _gates(op, machine, gates)):
                continue
            if name == "uniform_fused_2d" and _flow(op).pools:
                continue  # a bag has no contraction to cut
            if named.cut == "columns" and machine.engine == "hip" and not gates:
                continue  # the engine has no 2-D copies and no kernels; predictions have both
            schedules.append(replace(named, grain=grain).resolve(world, machine))
        paced = ["hetero_unfused_1d"]
        if not sums and _gates(op, machine, gates):
            paced.append("gated_1d")
            if _flow(op).shares and alone:
                paced.append("gated_sums_1d")
        for name in paced if world > 2 and _turns(op, machine) else ():
            in_step = replace(Schedule.named(name), grain=grain, pace="in_step")
            schedules.append(in_step.resolve(world, machine))
        if grain > 1 and world > 2 and not sums and _gates(op, machine, gates):
            schedules += [edged.resolve(world, machine) for edged in _edged(op, machine, grain)]
    if not (gates and alone):
        return tuple(schedules)
    stores = stores if _stores(machine, world) else ""
    for schedule in [Schedule.named(name) for name in Schedule.names(op)]:
        if is_sending(schedule, _flow(op)):
            known = machine.costs.pull_us if schedule.moves else machine.costs.sending_gemm
            if sends and known and _stores(machine, world):
                cuts = (1,) if schedule.moves else _SENT_GRAINS
                schedules += [replace(schedule, grain=cut).resolve(world, machine) for cut in cuts]
            continue
        shots = stores if schedule.stores else pulls if schedule.moves else ""
        if shots in ("both", schedule.shots):
            schedules.append(schedule.resolve(world, machine))
    return tuple(schedules)


def candidates(
    facts: Facts, machine: Machine, gates: bool = True, alone: bool = True
) -> tuple[Schedule, ...]:
    """Return the points for a problem; see `points`."""
    few = facts.flow.pools or facts.m <= _MULTIPLIED_ROWS
    stores = ("both" if few else "two") if are_few(facts) else ""
    pulls = _pulls(facts, machine)
    sends = facts.sending and not (are_few(facts) and facts.m <= FEW_ROWS)
    return points(facts.op, facts.world, machine, facts.sums, gates, alone, stores, pulls, sends)


def _pulls(facts: Facts, machine: Machine) -> str:
    """Return the `shots` with which a kernel may read peers' products, if the cost is known.

    Only shared sums have shots; other calls have those of every schedule.
    One shot cannot add a bias. It reads more than two shots if there are more than two ranks, by a
    factor of half the number of ranks; so it is for few bytes or few ranks.
    """
    near = facts.world <= machine.devices and machine.engine == "cuda"
    known = near and machine.costs.pull_us > 0
    if not facts.flow.shares:
        return "two" if known and facts.sending and not facts.gathers else ""
    if not (known and facts.storing):
        return ""
    return "two" if facts.biased else "both"
