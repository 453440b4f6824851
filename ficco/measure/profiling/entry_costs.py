"""The host's submissions for a call, counted in its plan, and the cost of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ficco.core.machine import Machine
from ficco.measure.profiling.figures import least_squares
from ficco.operators.problem import Problem
from ficco.plan import RankPlan
from ficco.plan.schedule import Schedule
from ficco.program import Copy, Launch, SignalWrite, Wait
from ficco.program.passes import compile_plan
from ficco.program.target import cuda_target, own_signals


class Tally(NamedTuple):
    """The submissions of one rank's call.

    Attributes:
        launches: library calls.
        kernels: ficco's own kernels.
        copies: pushes, copies within the device, and signals if these are copies.
        signals: waits, clears and raises; a kernel that clears and raises counts twice, as
            in the simulator.
    """

    launches: int
    kernels: int
    copies: int
    signals: int


def tally(plan: RankPlan, signal_kind: str = "write") -> Tally:
    """Count the host's submissions for a plan, with a kind of signals."""
    writable = () if signal_kind == "write" else own_signals(plan.rank)
    entries = compile_plan(plan, cuda_target(writable)).entries
    launches = [entry for entry in entries if isinstance(entry, Launch)]
    writes = [entry for entry in entries if isinstance(entry, SignalWrite)]
    copied = [entry for entry in writes if entry.how == "copy"]
    kernels = sum(launch.by == "native" for launch in launches)
    copies = sum(isinstance(entry, Copy) for entry in entries)
    return Tally(
        launches=len(launches) - kernels,
        kernels=kernels,
        copies=copies + sum(len(entry.raises) for entry in copied),
        signals=sum(isinstance(entry, Wait) for entry in entries)
        + sum(bool(w.clears) + bool(w.raises) for w in writes if w.how != "copy"),
    )


def submission_costs(
    tallies: Sequence[Tally], us: Sequence[float], launch_us: float, direct_us: float
) -> dict[str, float]:
    """Return the host's costs of a call and of each submission, from timed calls.

    Native code makes calls without library launches as a whole: these cost as much as a call of one
    kernel, plus their further submissions. See `Costs.host_native_us`. A kernel costs at most as
    much as such a call, whatever least squares find (55 us for 18 on 4 H100s, once).

    Args:
        tallies: the submissions of each call.
        us: the host's time of each call.
        launch_us: the least cost of a launch.
        direct_us: the cost of a call of one of ficco's kernels, including checks.
    """
    rows, remaining_us = [], []
    for call_us, counts in zip(us, tallies, strict=True):
        native = not counts.launches
        submitted = (counts.kernels - native, counts.launches, counts.copies, counts.signals)
        rows.append((*submitted, 0.0 if native else 1.0))
        remaining_us.append(call_us - (direct_us if native else counts.launches * launch_us))
    (kernel, *others), _ = least_squares(rows, remaining_us)
    if kernel > direct_us:  # it would take longer than a whole call of one kernel
        kernel = direct_us
        left = [us - row[0] * kernel for row, us in zip(rows, remaining_us, strict=True)]
        others, _ = least_squares([row[1:] for row in rows], left)
    extra_launch, copy, signals, call = others
    return {
        "host_call_us": call,
        "host_launch_us": launch_us + extra_launch,
        "host_kernel_us": kernel,
        "host_copy_us": copy,
        "host_words_us": signals,
    }


def probe(world: int, dtype: str) -> tuple[Problem, Schedule]:
    """Return a call with few bytes and operations; its schedule is not resolved.

    Rank r passes x_r [64, 256] and w_r [256, 128] to an all_gather_matmul.
    """
    problem = Problem.chunked("all_gather_matmul", world, 64 * world, 128 * world, 256, dtype)
    return problem, replace(Schedule.named("hetero_unfused_1d"), grain=1)


def call_us(measured_us: float, world: int, dtype: str, table: Mapping[str, Any]) -> float:
    """Return the overhead of a call besides its steps, in us, 0 or more.

    Args:
        measured_us: time of the `probe`, as one of many consecutive calls.
        world: number of ranks of the probe.
        dtype: dtype of the probe.
        table: the profile so far, without `call_us`.
    """
    from ficco.measure.simulator import predict_ms

    machine = Machine.from_toml(table, table["name"])
    problem, schedule = probe(world, dtype)
    resolved = schedule.resolve(world, machine)
    return max(0.0, measured_us - 1e3 * predict_ms(problem, resolved, machine, regime="captured"))
