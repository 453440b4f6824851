"""Simulator: Plan x Machine -> Timeline. It predicts the duration of a call without running it.

It compiles the plan of every rank for the machine, as an engine does, and simulates the copies,
signal writes, waits and launches of these programs event by event. Copies share links by the same
model as in the paced host engine. The machine's profile provides all costs.

Regimes, which are those of the benchmarks:
    captured      the call is in a graph: all its steps are submitted when it begins
    synchronized  the host submits the call, step by step, while it runs, and waits for its end
    eager         calls follow one another without waiting: each takes the maximum of the captured
                  time and the submission time of the slowest host
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.errors import EngineError, InputError, PlanError, closest
from ficco.core.machine import Machine
from ficco.lowering import lower
from ficco.measure.simulator.alike import are_alike, encode_alike
from ficco.measure.simulator.collectives import spans_of
from ficco.measure.simulator.encoding import (
    Encoded,
    encode,
    is_one_launch,
    names,
    signals_raised,
    simulated_target,
)
from ficco.operators.problem import Problem
from ficco.plan import Plan, copy_unit
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import REGIMES, Span, Timeline
from ficco.program import Program
from ficco.program.passes import compile_plan
from ficco.program.passes.served import check_predicted

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

__all__ = ["REGIMES", "predict", "predict_ms", "simulate", "simulate_call", "simulate_ms"]


def simulate(plan: Plan, machine: Machine, regime: str = "captured") -> Timeline:
    """Predict the timeline of a plan.

    Args:
        plan: the plan of all ranks; verify it first, as the simulator does not.
        machine: a machine with figures.
        regime: one of REGIMES. A single eager call has the timeline of a captured one.

    Returns:
        One span per entry of the compiled programs: per copy, signal write, wait and launch. A
        gated launch has a span per part, and a kernel that runs a whole call a span per step. A
        wait begins when its lane reaches it. Time 0 is when rank 0 begins the call.

    Raises:
        MachineError: the machine has no figures.
        InputError: the regime is unknown, or the machine has too few ranks.
        ScheduleError, EngineError: the machine's engine cannot run the plan, or its profile lacks a
            cost; see `compile_plan` and `check_predicted`.
        PlanError: the plan would never end; the message names rank, lane, entry and signal.
    """
    return _Simulated(plan, machine, regime).timeline()


def simulate_ms(plan: Plan, machine: Machine, regime: str = "captured") -> float:
    """Predict the duration of a call, from rank 0's begin to the last rank's end, in ms.

    It is the last end of `simulate`, plus `call_us` if lanes fork and join. In the eager regime it
    is at least the host's time. Raises the errors of `simulate`.
    """
    return _Simulated(plan, machine, regime).ms()


def simulate_call(plan: Plan, machine: Machine, regime: str = "captured") -> tuple[Timeline, float]:
    """Return the results of `simulate` and `simulate_ms`. The plan is compiled and runs once."""
    simulated = _Simulated(plan, machine, regime)
    return simulated.timeline(), simulated.ms()


class _Simulated:
    """A plan that was compiled for a machine and simulated. See `simulate`."""

    def __init__(self, plan: Plan, machine: Machine, regime: str) -> None:
        _check(plan.problem, plan.schedule, machine, regime)
        self._machine, self._regime = machine, regime
        self._of_library: list[Span] | None = None
        if plan.schedule.transport == "collective":
            self._of_library = spans_of(plan, machine, regime == "synchronized")
            return
        self._programs = [
            compile_plan(entry, simulated_target(machine, entry.rank)) for entry in plan.ranks
        ]
        self._encoded = encode(plan.problem, self._programs, machine, regime == "synchronized")
        self._times = _times(self._programs, self._encoded, machine)

    def timeline(self) -> Timeline:
        """Return the spans of all ranks."""
        if self._of_library is not None:
            return _timeline(self._of_library, self._machine)
        return _timeline(_spans(self._programs, self._times, self._machine), self._machine)

    def ms(self) -> float:
        """Return the duration of a call. A library has no fork and join, so no `call_us`."""
        if self._of_library is not None:
            us = max(span.end_us for span in self._of_library)
            least = self._machine.costs.host_serial_us if self._regime == "eager" else 0.0
            return max(us, least) / 1e3
        once = is_one_launch(self._programs)
        return _call_ms(self._encoded, self._times, self._machine, self._regime, once)


def _call_ms(encoded: Encoded, times: Any, machine: Machine, regime: str, once: bool) -> float:
    us = (float(times[:, 1].max()) if len(times) else 0.0) / 1e3
    if not once:
        us += machine.costs.call_us
    if regime == "eager":
        us = max(us, max(encoded.host_ns) / 1e3)
    return us / 1e3


def _alike_ms(encoded: Encoded, machine: Machine, regime: str) -> float | None:
    """Return the duration for ranks that are alike; None if a wait never ends."""
    times, stuck = _run(encoded, machine, once=False)
    return None if stuck else _call_ms(encoded, times, machine, regime, once=False)


def predict(
    problem: Problem, schedule: Schedule, machine: Machine, regime: str = "captured"
) -> Timeline:
    """Predict the timeline of a problem under a schedule.

    Args:
        problem: the problem.
        schedule: resolved (`Schedule.resolve`).
        machine: see `simulate`.
        regime: see `simulate`.

    Raises:
        ScheduleError: nothing implements the schedule.
        MachineError, InputError: see `simulate`.
    """
    _check(problem, schedule, machine, regime)
    return simulate(lower(problem, schedule), machine, regime)


def predict_ms(
    problem: Problem, schedule: Schedule, machine: Machine, regime: str = "captured"
) -> float:
    """Predict the duration of a call in ms, like `simulate_ms`, at the lowest cost.

    If ranks are alike, it lowers and encodes only one of them; the result is the same. Raises the
    errors of `predict`.
    """
    _check(problem, schedule, machine, regime)
    if schedule.transport != "collective" and are_alike(problem, schedule, machine):
        encoded = encode_alike(problem, schedule, machine, regime == "synchronized")
        if encoded is not None and (ms := _alike_ms(encoded, machine, regime)) is not None:
            return ms
    with _collector_paused():
        return simulate_ms(lower(problem, schedule), machine, regime)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector.

    The plans of many ranks are millions of tuples, none of them in a cycle. The search for cycles
    takes a third of a simulation.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(problem: Problem, schedule: Schedule, machine: Machine, regime: str) -> None:
    check_predicted(problem, schedule, machine)
    machine.check_rated(None if problem.flow.pools else problem.dtype)
    if regime not in REGIMES:
        raise InputError(
            f"regime={regime!r}{closest(regime, REGIMES)}: it is one of {', '.join(REGIMES)}"
        )
    if problem.world > machine.ranks:
        raise InputError(
            f"{problem.world} ranks requested, but machine {machine.name!r} has {machine.ranks}; "
            "use fewer ranks or a larger machine"
        )


def _times(programs: Sequence[Program], encoded: Encoded, machine: Machine) -> Any:
    """Return start and end of every row in ns from rank 0's begin, as [rows, 2]."""
    times, stuck = _run(encoded, machine, is_one_launch(programs))
    if stuck:
        raise PlanError(_why_stuck(programs, encoded, stuck))
    return times


def _run(encoded: Encoded, machine: Machine, once: bool) -> tuple[Any, list[tuple[int, int, int]]]:
    """Return the times [rows, 2], and the waits that never end: row, signal, preceding row."""
    costs = machine.costs
    figures = (
        0.0 if once else 1e3 * costs.wait_us,
        1e3 * (costs.store_us if once else costs.raise_us),
        costs.gemm_beside_copies,
        costs.copies_beside_gemm,
        machine.copy_engines,
        machine.cores,
    )
    try:
        return _native.simulate(*encoded.tables, *encoded.ports, figures)
    except ValueError as wrong:
        raise PlanError(
            f"the plan cannot be simulated ({wrong}); `ficco plan --check` proves a plan"
        ) from None


def _why_stuck(
    programs: Sequence[Program], encoded: Encoded, stuck: list[tuple[int, int, int]]
) -> str:
    """Describe a wait that never ends, preferably one whose signal no entry raises."""
    raised = {
        signal
        for program in programs
        for entry in program.entries
        for signal in signals_raised(program, entry)
    }
    waits = [(row, encoded.signals[signal]) for row, signal, _ in stuck if signal >= 0]
    row, signal = next((wait for wait in waits if wait[1] not in raised), waits[0])
    named = list(names(programs))[row]
    why = "its signal is never reached" if signal in raised else "no step of the plan raises it"
    return (
        f"rank {named.rank}, lane {named.lane!r}, step {named.name!r} waits for {signal} for ever: "
        f"{why}; `ficco plan --check` proves a plan"
    )


def _spans(programs: Sequence[Program], times: Any, machine: Machine) -> list[Span]:
    item = {
        (program.rank, buffer.name): ELEMENT_BYTES[buffer.dtype]
        for program in programs
        for buffer in program.buffers
    }
    spans = []
    for row, (begin, end) in zip(names(programs), times.tolist(), strict=True):
        moved = sum([box.area * item[row.rank, box.buffer] for box in row.copied])
        unit = row.unit if row.kind != "local_copy" else copy_unit(machine.engine, same_device=True)
        spans.append(
            Span(row.rank, row.lane, row.name, row.kind, unit, begin / 1e3, end / 1e3, moved)
        )
    return spans


def _timeline(spans: list[Span], machine: Machine) -> Timeline:
    spans.sort(key=lambda span: (span.rank, span.start_us))
    return Timeline(tuple(spans), machine.engine, machine.name, simulated=True)
