"""Code that all runtimes share: machine checks, the cache of bound programs, timelines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ficco.core.errors import InputError
from ficco.core.machine import Machine
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Span, Timeline

BOUND_PROGRAMS = 64  # cached per runtime; the least recently used is dropped first

Bound = TypeVar("Bound")


@dataclass(eq=False)
class Call:
    """A call that this process's ranks can make.

    Attributes:
        problem, schedule, digest: the identity of the call.
        ranks: an engine's BoundProgram per rank.
        prepared: prepared calls that repeat it, one per layout of its matrices.
        loaded: layouts of all ranks' arrays for which a node has loaded all kernels.
    """

    problem: Problem
    schedule: Schedule
    digest: int
    ranks: list[Any]
    prepared: list[Any] = field(default_factory=list)
    loaded: set[Any] = field(default_factory=set)

    @property
    def bound(self) -> Any:
        """The BoundProgram of the only rank of this process."""
        return self.ranks[0]


class BoundPrograms(Generic[Bound]):
    """An LRU cache of bound programs, by problem and schedule.

    Attributes:
        is_ordered: whether so many programs are cached that their order matters.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[Problem, Schedule], Bound] = OrderedDict()
        self.is_ordered = False

    def get(self, problem: Problem, schedule: Schedule, bind: Callable[[], Bound]) -> Bound:
        """Return the cached program, or bind it now. `bind` may clear the cache."""
        key = (problem, schedule)
        bound = self._programs.get(key)
        if bound is None:
            bound = bind()
            self._programs[key] = bound
            self.is_ordered = len(self._programs) >= BOUND_PROGRAMS // 2
            if len(self._programs) > BOUND_PROGRAMS:
                self._programs.popitem(last=False)
        elif self.is_ordered:
            self._programs.move_to_end(key)
        return bound

    def find(self, problem: Problem, schedule: Schedule) -> Bound | None:
        """Return the program if it is cached."""
        return self._programs.get((problem, schedule))

    def __iter__(self) -> Iterator[Bound]:
        """Yield the cached programs."""
        return iter(list(self._programs.values()))

    def used(self, problem: Problem, schedule: Schedule) -> None:
        """Mark a cached program as just used, as `get` does. Needless unless `is_ordered`."""
        if (problem, schedule) in self._programs:
            self._programs.move_to_end((problem, schedule))

    def holds(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether the program is cached."""
        return (problem, schedule) in self._programs

    def clear(self) -> None:
        """Drop all programs."""
        self._programs.clear()
        self.is_ordered = False


def check_machine(world: int, machine: Machine, engine: str = "host") -> None:
    """Refuse a machine that does not fit the engine or the number of ranks.

    Raises:
        InputError: the machine needs another engine, or has too few ranks.
    """
    if machine.engine != engine:
        example = "'host' or 'mesh4'" if engine == "host" else f"'{engine}'"
        raise InputError(
            f"machine {machine.name!r} is for the {machine.engine} engine, and these ranks run on "
            f"the {engine} engine: use a machine such as {example}"
        )
    if world > machine.ranks:
        raise InputError(
            f"{world} ranks requested, machine {machine.name!r} has {machine.ranks}; use fewer "
            "ranks or a larger machine, 'host' for example"
        )


def timeline_of(spans: Sequence[Span], machine: Machine) -> Timeline:
    """Return an engine's spans as a timeline; time 0 is the start of the first span."""
    zero = min((span.start_us for span in spans), default=0.0)
    shifted = [
        Span(s.rank, s.lane, s.step, s.kind, s.unit, s.start_us - zero, s.end_us - zero, s.bytes)
        for s in spans
    ]
    shifted.sort(key=lambda s: (s.rank, s.start_us))
    return Timeline(
        tuple(shifted), machine.engine, machine.name, paced=machine.paced, origin_us=zero
    )
