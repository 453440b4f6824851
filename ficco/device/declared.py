"""A check of the signals that the programs of a kernel set and wait for, before anything runs.

A kernel's author declares the steps of each program, in order. The check simulates them. Signals
only grow within a launch, so a program that is stuck in one order of events is stuck in all orders.
Peers, elements and signals must exist in the window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeAlias

from ficco.core.checking import whole_number
from ficco.core.errors import InputError, counted, shown
from ficco.operators.problem_checks import MAX_WORLD

Place: TypeAlias = tuple[int, int]  # a rank, and a program of it
Word: TypeAlias = tuple[int, Hashable]  # a rank, and a signal of it

_LONGEST = 6  # programs of a chain that a reason names


class Raise(NamedTuple):
    """A program adds to a signal.

    Attributes:
        rank: the rank whose signal it is.
        signal: its number or name.
        by: the number that is added.
    """

    rank: int
    signal: Hashable
    by: int = 1


class Wait(NamedTuple):
    """A program waits until a signal of its own rank has at least a value.

    Attributes:
        signal: its number or name.
        value: the value.
    """

    signal: Hashable
    value: int = 1


class Put(NamedTuple):
    """A program copies elements to a rank's data.

    Attributes:
        rank: the rank whose data they become.
        offset: number of the first element.
        length: number of elements.
    """

    rank: int
    offset: int
    length: int


class Get(NamedTuple):
    """A program copies elements from a rank's data.

    Attributes:
        rank: the rank whose data they are.
        offset: number of the first element.
        length: number of elements.
    """

    rank: int
    offset: int
    length: int


Step: TypeAlias = Raise | Wait | Put | Get


class Unmet(NamedTuple):
    """A wait that is never met, or that is not met in every order of programs.

    Attributes:
        rank: the rank that waits.
        program: the program of that rank.
        wait: the wait.
        reason: the cause, in one sentence.
    """

    rank: int
    program: int
    wait: Wait
    reason: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, program {self.program} waits for signal {self.wait.signal!r} to be "
            f"{self.wait.value}: {self.reason}"
        )


def check(
    declared: Callable[[int, int], Iterable[Step]],
    *,
    world: int,
    programs: int,
    resident: int | None = None,
    in_order: bool = True,
    elements: int | None = None,
    signals: int | None = None,
) -> list[Unmet]:
    """Return the waits of a kernel, on all ranks, that are never met.

    It finds signals that no program raises often enough, cycles of programs that wait for one
    another, and raises that come after the wait that needs them. It also finds programs that cannot
    start, because the programs that wait for them occupy the device.

    Args:
        declared: returns the steps of a program, in order, for a rank and the program's number.
        world: number of ranks.
        programs: number of programs of the kernel on each rank.
        resident: how many programs a device runs at the same time; None: all of them.
        in_order: whether a device starts programs in the order of their numbers. GPUs do, but do
            not guarantee it. If False, a rank may not have `resident` or more programs that wait,
            unless all of its programs are resident.
        elements: number of elements of a rank's data; None: no Put or Get is compared with it.
        signals: number of the window's signals, which are then declared by their numbers; None:
            they may have any names.

    Returns:
        The waits, by rank and program; an empty list if all are met.

    Raises:
        InputError: an argument is invalid, a step is none of these, or a step's peer, elements or
            signal do not exist.

    Example:
        >>> def declared(rank, program):
        ...     yield Wait("data")
        ...     yield Raise(1 - rank, "data")  # too late: both wait first
        >>> for unmet in check(declared, world=2, programs=1):
        ...     print(unmet.rank, unmet.reason)
        0 rank 1, program 0 raises it only after it has waited for 'data', which rank 0, program 0
        raises only after this wait
        1 rank 0, program 0 raises it only after it has waited for 'data', which rank 1, program 0
        raises only after this wait
    """
    if not callable(declared):
        raise InputError(
            f"declared={shown(declared)}: a function of a rank and a program is needed"
        )
    world = whole_number(world, "world", 1, MAX_WORLD)
    programs = whole_number(programs, "programs", 1)
    held = programs if resident is None else whole_number(resident, "resident", 1)
    sizes = (
        world,
        None if elements is None else whole_number(elements, "elements", 1),
        None if signals is None else whole_number(signals, "signals", 0),
    )
    steps = {
        (rank, program): _checked(declared(rank, program), rank, program, sizes)
        for rank in range(world)
        for program in range(programs)
    }
    launch = _Launch(steps, held if in_order else programs)
    launch.run()
    found = [launch.explained(place) for place in sorted(launch.running)]
    if not in_order and held < programs:
        found += _overfull(steps, world, held)
    return found


def _checked(
    steps: Any, rank: int, program: int, sizes: tuple[int, int | None, int | None]
) -> list[Raise | Wait]:
    """Return a program's Raises and Waits.

    Args:
        steps: what `declared` returned.
        rank: whose steps they are.
        program: of that rank.
        sizes: numbers of ranks, of elements of a rank's data, and of signals; None: not known.

    Raises:
        InputError: one of them is invalid.
    """
    if not isinstance(steps, Iterable):
        raise InputError(
            f"rank {rank}, program {program}: {shown(steps)} found; `declared` must return or "
            "yield the program's Raises, Waits, Puts and Gets"
        )
    world, elements, signals = sizes
    found = []
    for number, step in enumerate(steps):
        about = f"rank {rank}, program {program}, step {number}: {shown(step)}"
        if not isinstance(step, Step):
            raise InputError(f"{about}; a Raise, a Wait, a Put or a Get is needed")
        if not isinstance(step, Wait):
            whole_number(step.rank, f"{about}; rank", 0, world - 1)
        if isinstance(step, Put | Get):
            end = whole_number(step.offset, f"{about}; offset", 0)
            end += whole_number(step.length, f"{about}; length", 0)
            if elements is not None and end > elements:
                raise InputError(f"{about} ends at element {end}; a rank's data have {elements}")
            continue
        if signals is not None and whole_number(step.signal, f"{about}; signal", 0) >= signals:
            raise InputError(f"{about}; the window has {signals} signals, numbered from 0")
        if isinstance(step, Raise):
            whole_number(step.by, f"{about}; by", 1)  # counts only grow
        else:
            whole_number(step.value, f"{about}; value", 0)
        found.append(step)
    return found


def _overfull(steps: dict[Place, list[Raise | Wait]], world: int, held: int) -> list[Unmet]:
    """Return the first waits of ranks that may fill their device with programs that wait."""
    found = []
    for rank in range(world):
        waits = {
            program: next(step for step in each if isinstance(step, Wait))
            for (owner, program), each in steps.items()
            if owner == rank and any(isinstance(step, Wait) for step in each)
        }
        if len(waits) < held:
            continue
        reason = (
            f"the rank has {counted(len(waits), 'program')} that wait, and its device runs {held} "
            "at the same time: in some order they keep the others from starting"
        )
        found += [Unmet(rank, program, wait, reason) for program, wait in sorted(waits.items())]
    return found


class _Launch:
    """The launches of all ranks, run as far as they get.

    Attributes:
        running: programs that have started and not ended, with the number of their next step.
    """

    def __init__(self, steps: dict[Place, list[Raise | Wait]], held: int) -> None:
        self._steps, self._held = steps, held
        self._counts: dict[Word, int] = defaultdict(int)
        self._raises: dict[Word, list[tuple[Place, int, int]]] = defaultdict(list)
        for place, each in steps.items():
            for at, step in enumerate(each):
                if isinstance(step, Raise):
                    self._raises[step.rank, step.signal].append((place, at, step.by))
        self._unstarted = dict.fromkeys(sorted(steps))  # in order
        self.running: dict[Place, int] = {}

    def run(self) -> None:
        """Run until no program gets any further."""
        moved = True
        while moved:
            moved = self._start()
            for place in list(self.running):
                moved = self._advance(place) or moved

    def _start(self) -> bool:
        """Start the next programs of each rank; return whether there were any."""
        room: dict[int, int] = defaultdict(lambda: self._held)
        for rank, _ in self.running:
            room[rank] -= 1
        started = False
        for place in list(self._unstarted):
            if room[place[0]] > 0:
                room[place[0]] -= 1
                self.running[place] = 0
                del self._unstarted[place]
                started = True
        return started

    def _advance(self, place: Place) -> bool:
        """Run a program up to a wait that is not met, or its end; return whether it moved."""
        begin = at = self.running[place]
        steps = self._steps[place]
        while at < len(steps):
            step = steps[at]
            if isinstance(step, Raise):
                self._counts[step.rank, step.signal] += step.by
            elif self._counts[place[0], step.signal] < step.value:
                break
            at += 1
        self.running[place] = at
        if at == len(steps):
            del self.running[place]
            return True
        return at > begin

    # ---- why a program is stuck

    def _wait(self, place: Place) -> Wait:
        step = self._steps[place][self.running[place]]
        assert isinstance(step, Wait)
        return step

    def _raisers(self, word: Word) -> list[Place]:
        """Return the programs that would still raise a signal."""
        return [
            place
            for place, at, _ in self._raises[word]
            if place in self._unstarted or at >= self.running.get(place, at + 1)
        ]

    def explained(self, place: Place) -> Unmet:
        """Return why a program is stuck."""
        wait = self._wait(place)
        return Unmet(*place, wait, self._reason(place, (place,)))

    def _reason(self, place: Place, path: tuple[Place, ...]) -> str:
        """Return why the wait of a program is not met; `path` are programs that led here."""
        wait = self._wait(place)
        word = (place[0], wait.signal)
        most = sum(by for _, _, by in self._raises[word])
        if most < wait.value:
            return "nobody raises it" if most == 0 else f"all raises together make it {most}"
        raisers = self._raisers(word)
        if place in raisers:
            return "this program raises it only after this wait"
        return self._why_late(raisers[0], path)

    def _why_late(self, raiser: Place, path: tuple[Place, ...]) -> str:
        """Return why a program has not raised a signal."""
        name = f"rank {raiser[0]}, program {raiser[1]}"
        if raiser in self._unstarted:
            holders = [program for rank, program in self.running if rank == raiser[0]]
            return (
                f"{name} raises it and cannot start: the device runs {self._held} at the same "
                f"time, and {counted(len(holders), 'program')} of that rank wait"
            )
        signal = self._wait(raiser).signal
        if raiser == path[0]:
            return f"{name} raises only after this wait"
        if raiser in path or len(path) == _LONGEST:
            return f"{name} raises only after it has waited for {signal!r}"
        reason = self._reason(raiser, (*path, raiser))
        if reason.startswith("rank "):
            reason = reason.replace(" raises it ", " raises ", 1)
            return f"{name} raises it only after it has waited for {signal!r}, which {reason}"
        return f"{name} raises it only after it has waited for {signal!r}, and {reason}"
