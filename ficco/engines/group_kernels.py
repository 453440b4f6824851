"""Which of ficco's own kernels the ranks of a group have, and which they have to compile first.

All ranks work out the same answers, each for all ranks, so nothing is exchanged for a call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from functools import lru_cache

from ficco.engines.wanted import DescribedKernels, launches_in
from ficco.errors import EngineError
from ficco.kernels import fallback, pack
from ficco.kernels.variants import Variant, variant_of
from ficco.lowering import lower_rank
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.problem import Problem
from ficco.schedule import Schedule

__all__ = ["OFTEN", "GroupKernels", "is_own"]

_log = logging.getLogger("ficco")
OFTEN = 8  # calls of a problem that are made without kernels that have to be compiled
_MOST_HELD = 4096  # problems whose calls are counted

_Gpus = tuple[tuple[int, int], ...]
_Variants = frozenset[tuple[int, Variant]]


def is_own(schedule: Schedule) -> bool:
    """Return whether a schedule launches kernels of ficco's own, and no library has them."""
    own = schedule.compute == "gated" or schedule.transport == "sm"
    return own and schedule.transport != "collective"


class GroupKernels:
    """What a group's ranks have.

    Args:
        reason: why they can have no kernels; "": they can.
        compiles: whether every rank can compile what the pack lacks.
        gpus: compute capability and multiprocessors of the ranks' GPUs, each pair once.
        mine: compute capability of this rank's GPU.
        packed: whether every rank uses its pack.

    Attributes:
        reason, compiles: as above.
        at_once: whether kernels are compiled for the first call of a problem, as `size_windows` has
            it; otherwise `OFTEN` calls are made without them before.
    """

    def __init__(
        self, reason: str, compiles: bool, gpus: _Gpus, mine: int = 0, packed: bool = True
    ) -> None:
        self.reason, self.compiles = reason, compiles
        self.at_once = False
        self._gpus, self._mine, self._packed = gpus, mine, packed
        self._compiled: set[tuple[int, Variant]] = set()  # by all ranks
        self._held: dict[str, int] = {}

    def has(self, problem: Problem, schedule: Schedule) -> bool:
        """Return whether all ranks have the kernels of a call, and none has to be compiled."""
        if not is_own(schedule):
            return True
        return not self.reason and not self._lacked(problem, schedule)

    def waits(self, problem: Problem) -> bool:
        """Return whether it is too early to compile kernels for a problem."""
        return not self.at_once and self._held.get(_key(problem), 0) < OFTEN

    def hold(self, problem: Problem) -> None:
        """Count a call that was made without the kernels that would be best.

        On all ranks alike: none remembers such a call, so each chooses anew for the next.
        """
        key = _key(problem)
        if key not in self._held and len(self._held) >= _MOST_HELD:
            del self._held[next(iter(self._held))]
        self._held[key] = self._held.get(key, 0) + 1

    def compile(self, calls: Iterable[tuple[Problem, Schedule]]) -> bool:
        """Compile together what calls lack, for either weight layout; all ranks give the same.

        False: it cannot be compiled, nor will be anything else.
        """
        lacked = frozenset().union(*[self._lacked(*call) for call in calls if is_own(call[1])])
        if self.compiles and lacked:
            try:
                mine = sorted(variant for each, variant in lacked if each == self._mine)
                fallback.compile_together(mine, self._mine)
            except EngineError as error:  # all ranks have the same Triton, or should have
                _log.warning("schedule='auto' takes no kernels that have to be compiled: %s", error)
                self.compiles = False
            else:
                self._compiled |= lacked
        return self.compiles

    def launched(self, problem: Problem, schedule: Schedule) -> _Variants | None:
        """Return what all ranks' calls launch, for either weight layout.

        None: a library makes products of it, too, whose kernels are not known.
        """
        few = not problem.flow.shares or not is_made_before(problem.m, schedule.shots == "two")
        within = schedule.compute == "gated" and schedule.sums != "apart"
        gathers = schedule.compute == "gated" and problem.flow.own_columns
        if within or gathers or (schedule.transport == "sm" and few):
            return _launched(problem, schedule, self._gpus)
        return None

    def _lacked(self, problem: Problem, schedule: Schedule) -> _Variants:
        return _lacked(problem, schedule, self._gpus, self._packed) - self._compiled


def _key(problem: Problem) -> str:
    return json.dumps(problem.agreed())


@lru_cache(maxsize=1024)
def _lacked(problem: Problem, schedule: Schedule, gpus: _Gpus, packed: bool) -> _Variants:
    found = _launched(problem, schedule, gpus)
    return frozenset([each for each in found if not (packed and pack.has(each[1], each[0]))])


@lru_cache(maxsize=1024)
def _launched(problem: Problem, schedule: Schedule, gpus: _Gpus) -> _Variants:
    found: set[tuple[int, Variant]] = set()
    for rank in _unlike(problem, schedule):
        plan = lower_rank(problem, schedule, rank)
        for capability, processors in gpus:
            launches = launches_in(plan, DescribedKernels(capability, processors))
            found.update((capability, variant_of(launch)) for launch in launches)
    return frozenset(found)


def _unlike(problem: Problem, schedule: Schedule) -> list[int]:
    """Return ranks that stand for all: the others want no other kernels.

    Kernels of a call that is one launch are those of the rank's own sizes. Those of other calls
    depend on all ranks' sizes, and where they sum, on which rank it is.
    """
    ranks = range(problem.world)
    sizes = {
        (
            problem.rows[rank],
            tuple([output.columns[rank] for output in problem.outputs]),
            problem.depths[rank] if problem.depths else 0,
        ): rank
        for rank in ranks
    }
    alike = len(sizes) == 1 and not problem.splits and schedule.sums != "within"
    return list(sizes.values()) if alike or schedule.transport == "sm" else list(ranks)
