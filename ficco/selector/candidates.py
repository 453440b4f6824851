"""Candidates: the points of the design space that are worth a look for a problem on a machine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ficco import registry
from ficco.lowering.cutting import is_edged
from ficco.machine import Machine
from ficco.schedule import MAX_CHUNKS, Schedule
from ficco.selector.facts import Facts

__all__ = ["FEW_ROWS", "are_few", "candidates", "few_rows", "plainness", "points", "serial"]

# Of equal predictions: fewest chunks first, then what keeps in step, for drift is a matter of luck,
# then fewest GEMMs, for each costs a little more than it is predicted to, and what hides its
# beginning before what does not.
_PLAINEST = (
    "serial", "hetero_fused_1d", "shard_p2p", "hetero_unfused_1d", "ring_1d", "gated_1d",
    "gated_sums_1d", "uniform_fused_1d", "uniform_fused_2d",
)  # fmt: skip

FEW_ROWS = 64  # with more the kernel that stores at peers multiplies more slowly than it saves
_SUMMED_ROWS = 512  # with more of these stores into mailboxes take longer than NCCL
_MULTIPLIED_ROWS = 384  # with more the kernel that sums in one shot multiplies far more slowly


@lru_cache(maxsize=64)
def serial(world: int, machine: Machine) -> Schedule:
    """Return the schedule that overlaps nothing, as the machine does it."""
    return Schedule.named("serial").resolve(world, machine)


def plainness(schedule: Schedule) -> tuple[int, bool, int]:
    """Return what to sort by, so that the plainest schedule comes first."""
    known = schedule.name in _PLAINEST
    place = _PLAINEST.index(schedule.name) if known else len(_PLAINEST)
    return schedule.chunks, schedule.pace != "in_step", place


def _flow(op: str) -> registry.Flow:
    return registry.get(op).flow


def _gates(op: str, machine: Machine, gates: bool) -> bool:
    """Whether an operator can be one launch; on GPUs none pools bags."""
    return gates and (machine.engine == "host" or not _flow(op).pools)


def _sums(op: str, machine: Machine) -> bool:
    """Whether sums within a launch may win: on GPUs where they are sent on; measured, see NOTES."""
    return machine.engine == "host" or _flow(op).shares


def _rings(op: str, machine: Machine, world: int, grain: int) -> bool:
    """Whether sums on a ring may win: it uses one link of a mesh.

    Those that are passed on meet what still goes round; measured, see `bench/NOTES.md`. One chunk
    alone is made or travels, never both; and there are words for so many chunks only.
    """
    rings = _flow(op).finish == "sum" and machine.best_route == "rotation"
    return rings and grain > 1 and grain * (world - 1) <= MAX_CHUNKS


def _turns(op: str, machine: Machine) -> bool:
    """Whether what is pushed is there before, and keeping turns at its receivers may pay."""
    alike = _flow(op).collective in ("all_gather", "all_reduce")  # every peer gets equally much
    return alike and machine.best_route == "rotation"


def _edged(op: str, machine: Machine, grain: int) -> list[Schedule]:
    """Return one launch whose last (first) shard alone is cut, where shards travel in turns."""
    if not is_edged(_flow(op)) or machine.best_route != "rotation":
        return []
    cut = replace(Schedule.named("gated_1d"), grain=grain, taper="edge", order="by_peer")
    return [replace(cut, pace="in_step") if _flow(op).own_columns else cut]


def _stores(machine: Machine, world: int) -> bool:
    """Whether kernels can store at all ranks, and it is known what that takes."""
    near = world <= machine.devices
    return near and machine.engine == "cuda" and machine.costs.store_us > 0


def few_rows(op: str) -> int:
    """Return how many rows of an operator are few, for one launch that stores at peers."""
    return FEW_ROWS if _flow(op).one_kernel == "gather" else _SUMMED_ROWS


def are_few(facts: Facts) -> bool:
    """Whether a problem has few rows, and one launch that stores at peers can do it."""
    return facts.storing and facts.m <= few_rows(facts.op)


@lru_cache(maxsize=256)
def points(
    op: str,
    world: int,
    machine: Machine,
    sums: bool = False,
    gates: bool = True,
    alone: bool = True,
    few: bool = False,
    more: bool = False,
) -> tuple[Schedule, ...]:
    """Return resolved schedules; the first one is `serial`.

    Every named schedule at grains 1, 2, 4, ... to the number of ranks (at least 4), and on a switch
    those in step that keep turns there. What has no plan, or the machine's engine does not run, is
    left out. So are sums within a launch of a reduce-scatter on GPUs (`bench/NOTES.md`). Outputs
    that add up on GPUs have `serial` alone: products that add to float32 sums chunk by chunk, and
    the rounding of these, take longer than the transfer that they would hide.

    Args:
        op: the operator.
        world: ranks.
        machine: it is to run on.
        sums: whether an output adds up over what arrives, which parts of one launch cannot.
        gates: whether the library for GEMMs has gated ones.
        alone: whether kernels may wait for peers' kernels.
        few: whether rows are few, for which some problems have points of their own: see `are_few`.
        more: whether they are so many of these that one shot is no choice.
    """
    found = [serial(world, machine)]
    if world == 1 or (sums and machine.engine == "cuda"):
        return tuple(found)
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
                continue  # a bag cannot be cut along its sums
            found.append(replace(named, grain=grain).resolve(world, machine))
        paced = ["hetero_unfused_1d"]
        if not sums and _gates(op, machine, gates):
            paced.append("gated_1d")
            if _flow(op).shares and alone:
                paced.append("gated_sums_1d")
        for name in paced if world > 2 and _turns(op, machine) else ():
            in_step = replace(Schedule.named(name), grain=grain, pace="in_step")
            found.append(in_step.resolve(world, machine))
        if grain > 1 and world > 2 and not sums and _gates(op, machine, gates):
            found += [each.resolve(world, machine) for each in _edged(op, machine, grain)]
    if gates and alone and few and _stores(machine, world):
        own = [Schedule.named(name) for name in Schedule.names(op)]
        found += [
            each.resolve(world, machine)
            for each in own
            if each.transport == "sm" and not (more and each.shots == "one")
        ]
    return tuple(found)


def candidates(
    facts: Facts, machine: Machine, gates: bool = True, alone: bool = True
) -> tuple[Schedule, ...]:
    """Return the points for a problem; see `points`."""
    few, more = are_few(facts), facts.m > _MULTIPLIED_ROWS
    return points(facts.op, facts.world, machine, facts.sums, gates, alone, few, few and more)
