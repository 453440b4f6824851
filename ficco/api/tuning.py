"""tune(): `auto` measures the calls that are made in a context, instead of predicting them.

At the first call of a problem in the context, all ranks run the most promising schedules in turns,
on the call's own tensors, and exchange their times. They run in a second runtime, which is closed
after the measurement. So the measurement neither enlarges the group's windows nor makes the group
fail, and its CUDA graphs do not use the group's windows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator, ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ficco.api import auto, groups, host_profile, tuned_files
from ficco.api.tuned_files import Times
from ficco.api.turns import Turns
from ficco.core import files
from ficco.core.checking import whole_number
from ficco.core.errors import EngineError, InputError, duration_text
from ficco.core.interrupts import is_interrupt
from ficco.core.logs import log
from ficco.engine import compute as computes
from ficco.measure.selector import Choice, Ranked, serial
from ficco.measure.selector.candidates import plainness
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule
from ficco.runtime.failures import ALIKE, call_in_words
from ficco.runtime.object_exchange import gathered_objects
from ficco.runtime.process import ProcessRuntime

MEASUREMENT = "measurement"  # what choices are made by
MOST_SCHEDULES = 64
_HOPELESS = 1.5  # a schedule is hopeless if its prediction is this many times that of the best
_PLAINER = 0.01  # a plainer schedule is taken if it takes at most this much longer
_MOST_TOLD = 400  # characters of a failure that a rank tells the others
_WAITED, _WAITED_MS = 0.03, 0.005  # how much longer than serial a call that is waited for may take
_WHAT = "tune a call"  # the purpose of exchanges
_FOUND_OUT_S = 20.0  # ranks notice that a rank has failed at most this long after the timeout

# Returns a function that makes the call in a runtime by a schedule.
Maker = Callable[[ProcessRuntime, Schedule], Callable[[], object]]


class TuningContext(ContextDecorator):
    """A context of `tune`. It can be entered again, and then measures no problem of `seen`.

    Attributes:
        most: how many schedules are measured of a problem in each regime; see `_promising`.
        folder: where times are kept; None: nowhere.
        seen: the problems of each group that were measured in the context, or found in a folder,
            or could not be measured.
    """

    def __init__(self, most: int, folder: Path | None) -> None:
        self.most, self.folder = most, folder
        self.seen: WeakKeyDictionary[ProcessRuntime, set[str]] = WeakKeyDictionary()

    def __enter__(self) -> None:
        groups.forget_calls()
        _sessions.append(self)

    def __exit__(self, *_: object) -> None:
        places = [place for place, each in enumerate(_sessions) if each is self]
        if not places:
            raise InputError(
                "a context of ficco.tune was left more often than entered; enter and leave it by "
                "a with statement"
            )
        del _sessions[places[-1]]


_sessions: list[TuningContext] = []  # of contexts that have not ended; the last one is in use


def tune(*, schedules: int = 4, folder: str | os.PathLike[str] | None = None) -> TuningContext:
    """Measure the calls with schedule="auto" in a context, instead of predicting their times.

    The first call of each problem in the context runs several schedules a few times, on its own
    tensors. This takes about half a second, and a few seconds for calls of many milliseconds, or if
    kernels must be compiled. The ranks exchange the times, and take the fastest schedule for this
    and all later calls of the problem, until the group is closed. Calls on GPUs are timed eagerly
    and in CUDA graphs; each kind of call gets its own choice. Calls in the backward pass and calls
    of other threads are measured, too. So all ranks must enter and leave the context between the
    same calls of each group. `ficco.explain` and `FICCO_LOG=INFO` show the times.

    Predictions cannot know the shapes for which the GEMM library is unusually fast or slow. Tune
    the calls of a warm-up if they matter. A measurement needs memory for a second set of windows,
    and for results of calls. If it fails, a warning says why, and the prediction is used.

    Args:
        schedules: how many schedules with the fastest predictions are measured for each execution
            mode, 1 to 64. Also measured are `serial`, the choice of a tuning table, and at most as
            many others: the best of each further name whose prediction is at most 1.5 times the
            fastest. Without a profile of the devices, all schedules are timed once, and the fastest
            are measured.
        folder: where times are kept, a file for each problem; it is made if it does not exist. A
            problem with a file is not measured again, so later processes use the same schedules.
            Rank 0 of each group reads and writes it. A file is for one number of ranks, kind of
            device, driver, processor, and set of versions and variables. None: nowhere.

    Returns:
        A context manager, which can also decorate functions. It can be entered again, and then
        measures only new problems.

    Raises:
        InputError: `schedules` is not a number from 1 to 64, or there can be no such folder.

    Example:
        >>> x, w = torch.ones(4, 2), torch.ones(2, 3)
        >>> with ficco.tune():
        ...     y = ficco.all_gather_matmul(x, w)  # measures; later calls use the fastest schedule
        >>> y.shape
        torch.Size([4, 3])
    """
    try:
        most = whole_number(schedules, "schedules", 1, MOST_SCHEDULES)
        return TuningContext(most, None if folder is None else _folder(folder))
    except InputError as error:  # else the ranks that measure would wait for this one
        groups.refuse_everywhere(error)
        raise


def _folder(folder: Any) -> Path:
    """Return a folder, which is made if it does not exist, by a path that chdir does not change."""
    try:
        found = Path(folder).absolute()
        files.make_folder(found)
    except (TypeError, ValueError, OSError) as error:
        raise InputError(f"folder={folder!r}: a folder's path is needed: {error}") from None
    return found


def due(problem: Problem, runtime: ProcessRuntime) -> TuningContext | None:
    """Return the context in which a call with schedule="auto" is to be measured first, or None.

    For the same call, all ranks get a context or all get None, if all are in a context of `tune`.
    """
    inner = _sessions[-1:]  # another thread may end the last one meanwhile
    if not inner or runtime.world == 1 or auto.regime() == "captured":
        return None
    return None if auto.tuned_key(problem) in inner[0].seen.get(runtime, ()) else inner[0]


def measure(
    context: TuningContext, problem: Problem, runtime: ProcessRuntime, group: Any,
    device: torch.device, make: Maker,
) -> bool:  # fmt: skip
    """Measure a problem, and let `auto` choose by the times. A collective call.

    Args:
        context: from `due`.
        problem: of the call.
        runtime: of its group.
        group: its ProcessGroup.
        device: where it runs.
        make: returns a function that makes the call.

    Returns:
        Whether the call was measured now, and so was made before.

    Raises:
        EngineError: another rank makes another call, does not measure it, or has left.
        TimeoutExceeded: a rank did not arrive within the timeout.
    """
    if device.type == "cpu":
        host_profile.measure_once(runtime, group, problem)
    _check_alike(problem, runtime)
    for session in {context, *_sessions}:  # outer contexts do not measure it again
        session.seen.setdefault(runtime, set()).add(auto.tuned_key(problem))
    call = call_in_words(problem, None, runtime.rank)
    leads, folder = runtime.rank == 0, context.folder
    own = tuned_files.read(folder, problem, runtime, device) if leads and folder else None
    kept: Times | None = gathered_objects(runtime, "read tuned times", own, call)[0]
    found = kept or _measured(context.most, problem, runtime, group, device, make)
    if found is None:
        return False
    choices = {when: _choice_of(found, when) for when in found.ms if when != "synchronized"}
    if kept is not None:  # compile their kernels
        _runnable(problem, [choice.schedule for choice in choices.values()], runtime, device)
    auto.tuned.setdefault(runtime, {})[auto.tuned_key(problem)] = choices
    for when, choice in choices.items():
        log.info("%s, %s: %s", problem.op, when, "; ".join(choice.reasons))
    if kept is None and leads and folder:
        tuned_files.write(folder, problem, runtime, device, found)
    return kept is None


def _measured(
    most: int, problem: Problem, runtime: ProcessRuntime, group: Any, device: torch.device,
    make: Maker,
) -> Times | None:  # fmt: skip
    """Measure a problem; return None if a rank has failed."""
    if device.type == "cuda":  # kernels of the two runtimes must not wait for each other
        torch.cuda.synchronize(device)
    schedules, are_ranked = _schedules(problem, runtime, device, most)
    if len(schedules) == 1:
        return None
    timed = partial(_timed, schedules, None if are_ranked else most, make)
    return _measured_apart(problem, runtime, group, device, timed)


def _measured_apart(
    problem: Problem,
    runtime: ProcessRuntime,
    group: Any,
    device: torch.device,
    timed: Callable[[ProcessRuntime, Turns], Times],
) -> Times | None:
    """Return what `timed` returns in a second runtime of the group; None if it failed on a rank."""
    call = call_in_words(problem, None, runtime.rank)
    apart, found, failure = None, None, None
    with ExitStack() as at_end:
        try:
            apart = _opened(runtime, group)
            at_end.callback(_close, apart)
            found = timed(apart, Turns(apart, device, call))
        except BaseException as error:
            if apart is not None:
                apart.fail()
            if is_interrupt(error):
                raise
            told = f"{type(error).__name__}: {error}"
            failure = isinstance(error, EngineError), told[:_MOST_TOLD]
        failures = runtime.gathered(_WHAT, failure, call, least_s=runtime.timeout_s + _FOUND_OUT_S)
    ranks = [rank for rank, each in enumerate(failures) if each is not None]
    if not ranks:
        return found
    # The first failure is not an EngineError, which ranks raise because another rank has failed.
    first = min(ranks, key=lambda rank: failures[rank][0])
    log.warning("%s is not measured, so its time is predicted: rank %d: %s", problem.op, first,
                failures[first][1])  # fmt: skip
    return None


def _timed(
    schedules: Sequence[Schedule],
    most: int | None,
    make: Maker,
    apart: ProcessRuntime,
    turns: Turns,
) -> Times:
    """Return the schedules that can run, and their times, in a runtime.

    Args:
        schedules: `serial` first.
        most: how many others may be left after a single turn; None: all.
        make: see `measure`.
        apart: the runtime.
        turns: times calls of the runtime.
    """
    runs = _runs(schedules, apart, make)
    if most is not None:
        places = turns.fastest(list(runs.values()), most + 1)
        runs = dict([list(runs.items())[place] for place in places])
    return Times(list(runs), turns.ms_by_regime(list(runs.values())))


def _close(apart: ProcessRuntime) -> None:
    try:
        apart.close()
    except Exception as error:  # all ranks have their times
        if is_interrupt(error):
            raise
        log.warning("the runtime of a measurement did not close: %r", error)


def _opened(runtime: ProcessRuntime, group: Any) -> ProcessRuntime:
    """Open a second runtime of a group, with the options of the first one."""
    machine, options = runtime.machine, (runtime.timeout_s, runtime.window_limit, runtime)
    if machine.engine == "host":
        return ProcessRuntime(group, machine, computes.named(runtime.compute), *options)
    from ficco.runtime.process_gpu import GpuProcessRuntime

    apart = GpuProcessRuntime(group, machine, *options)
    apart.kernels = getattr(runtime, "kernels", None)
    return apart


def _schedules(
    problem: Problem, runtime: ProcessRuntime, device: torch.device, most: int
) -> tuple[list[Schedule], bool]:
    """Return the schedules to measure, `serial` first, and whether they are ranked.

    They are those of rank 0, as ranks may know different sizes of their peers. Kernels that the
    pack lacks are compiled.
    """
    regimes = ("captured", "eager") if device.type == "cuda" else ("eager",)
    found = {serial(problem.world, runtime.machine): None}
    are_ranked, device_ms = True, None
    for when in regimes:
        ranked = auto.ranked(problem, runtime, device, when)
        are_ranked = are_ranked and ranked[0][1] is not None
        device_ms = dict(ranked) if device_ms is None else device_ms
        found |= dict.fromkeys(_promising(ranked, device_ms, most))
        found[auto.choice(problem, runtime, device, when).schedule] = None  # a book's, perhaps
    leads, call = runtime.rank == 0, call_in_words(problem, None, runtime.rank)
    own = ([*found], are_ranked) if leads else None
    schedules, are_ranked = gathered_objects(runtime, "choose what to measure", own, call)[0]
    return _runnable(problem, schedules, runtime, device), are_ranked


def _runnable(
    problem: Problem, schedules: Sequence[Schedule], runtime: ProcessRuntime, device: torch.device
) -> list[Schedule]:
    """Compile the missing kernels of schedules; return the schedules that all ranks can run."""
    kernels = auto.kernels_of(runtime, device)
    if kernels is None:
        return [*schedules]
    try:
        kernels.compile([(problem, schedule) for schedule in schedules])
    except Exception as error:  # else the other ranks would wait for this one
        if is_interrupt(error):
            raise
        log.warning("%s: kernels are not compiled: %r", problem.op, error)
    own = [kernels.has(problem, schedule) for schedule in schedules]
    by_rank = runtime.gathered("compile kernels", own, call_in_words(problem, None, runtime.rank))
    return [each for each, *have in zip(schedules, *by_rank, strict=True) if all(have)]


def _check_alike(problem: Problem, runtime: ProcessRuntime) -> None:
    """Raise EngineError on all ranks if another rank makes another call, or does not measure it."""
    call = call_in_words(problem, None, runtime.rank)
    own = hashlib.sha256(auto.tuned_key(problem).encode()).hexdigest()
    digests = runtime.gathered(_WHAT, own, call)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            calls = gathered_objects(runtime, _WHAT, call)
            raise EngineError(
                f"rank {rank} measures another call than rank 0. {calls[0]} {calls[rank]} {ALIKE}."
            )


def _promising(
    ranked: Ranked, device_ms: Mapping[Schedule, float | None], most: int
) -> list[Schedule]:
    """Return the schedules to measure in a regime: all, if there are no predictions.

    Else they are `most` with the fastest predictions, and as many others at most: the best of each
    further name that is not hopeless, as one wrong time of a GEMM may mislead all grains of a name.

    Args:
        ranked: the schedules and their predictions, fastest first.
        device_ms: predictions that do not depend on the host. Schedules with equal predictions of
            both kinds are one schedule under two names.
        most: how many.
    """
    found: dict[tuple[float, float | None], Schedule] = {}
    names: set[str] = set()
    for schedule, ms in ranked:
        if ms is None:
            return [each for each, _ in ranked]
        key = ms, device_ms.get(schedule)
        if key in found:
            continue
        near = ms <= _HOPELESS * next(iter(found), key)[0] and schedule.name not in names
        if len(found) < most or (near and len(found) < 2 * most):
            found[key] = schedule
            names.add(schedule.name)
    return list(found.values())


def _runs(
    schedules: Sequence[Schedule], runtime: ProcessRuntime, make: Maker
) -> dict[Schedule, Callable[[], object]]:
    """Return functions that make the call, by schedule; without schedules that do not fit."""
    runs: dict[Schedule, Callable[[], object]] = {}
    for schedule in schedules:
        run = make(runtime, schedule)
        try:
            run()
        except (InputError, MemoryError) as error:  # on all ranks
            if not runs:
                raise  # the others are compared with serial, which is the first
            log.info("%s is not measured: %s", schedule.name, error)
        else:
            runs[schedule] = run
    return runs


def _choice_of(measured: Times, when: str) -> Choice:
    """Return the choice of a regime: the fastest schedule, or a plainer one that is as fast.

    One eager choice serves calls back to back, and calls that are waited for: of schedules that are
    not slower than `serial` where calls are waited for, it is the fastest back to back.
    """
    schedules, times = measured.schedules, measured.ms[when]
    places = list(range(len(schedules)))
    if when == "eager" and (waited := measured.ms.get("synchronized")):
        most = waited[0] + max(_WAITED * waited[0], _WAITED_MS)
        places = [place for place in places if waited[place] <= most]
    least = min(times[place] for place in places)
    near = [place for place in places if times[place] <= least * (1 + _PLAINER)]
    best = min(near, key=lambda place: plainness(schedules[place]))
    ranked = sorted(range(len(schedules)), key=times.__getitem__)
    words = [
        f"{schedules[place].name}, grain {schedules[place].grain_text}: "
        f"{duration_text(times[place])}"
        for place in ranked
    ]
    others = tuple((schedules[place], times[place]) for place in ranked if place != best)
    reasons = (
        f"{measured.source}, {times[0] / times[best]:.2f} times as fast as serial",
        f"times of a call: {', '.join(words)}",
    )
    return Choice(schedules[best], times[best], MEASUREMENT, reasons, others)
