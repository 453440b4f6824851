"""Which of ficco's own kernels the ranks of a group have, and which they must compile first.

Every rank computes the answer for all ranks, so a call exchanges nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

from ficco.core.dtypes import INDEX_DTYPES
from ficco.core.errors import EngineError
from ficco.engine.wanted import DescribedKernels, launches_in
from ficco.kernels import fallback, pack
from ficco.kernels.variants import Variant, variant_of
from ficco.lowering import lower_rank
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.lowering.sending import sends
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

_log = logging.getLogger("ficco")
OFTEN = 8  # calls of a problem before its missing kernels are compiled
_MOST_HELD = 4096  # problems whose calls are counted

_Gpus = tuple[tuple[int, int], ...]
_Variants = frozenset[tuple[int, Variant]]


def is_own(schedule: Schedule) -> bool:
    """Return whether a schedule launches ficco's own kernels, which no library has."""
    own = schedule.compute == "gated" or schedule.transport == "sm"
    return own and schedule.transport != "collective"


class GroupKernels:
    """The kernels that all ranks of a group have.

    Args:
        reason: why the ranks can have no kernels; "" if they can.
        compiles: whether every rank can compile kernels that the pack lacks.
        gpus: compute capability and multiprocessors of the ranks' GPUs, without duplicates.
        mine: compute capability of this rank's GPU.
        packed: whether every rank uses its pack.

    Attributes:
        reason, compiles: as above.
        at_once: whether kernels are compiled for the first call of a problem, which `reserve`
            sets; otherwise only after `OFTEN` calls.
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
        """Return whether all ranks have the kernels of a call without compiling any."""
        if not is_own(schedule):
            return True
        return not self.reason and not self._lacked(problem, schedule)

    def waits(self, problem: Problem) -> bool:
        """Return whether it is too early to compile kernels for a problem."""
        return not self.at_once and self._held.get(_key(problem), 0) < OFTEN

    def hold(self, problem: Problem) -> None:
        """Count a call that was made without the best kernels.

        All ranks count alike. No rank caches the choice for such a call, so each chooses again for
        the next.
        """
        key = _key(problem)
        if key not in self._held and len(self._held) >= _MOST_HELD:
            del self._held[next(iter(self._held))]
        self._held[key] = self._held.get(key, 0) + 1

    def compile(self, calls: Iterable[tuple[Problem, Schedule]]) -> bool:
        """Compile the kernels that calls lack, for both weight layouts; all ranks pass the same.

        Returns False if compilation failed; nothing is compiled from then on.
        """
        lacked = frozenset().union(*[self._lacked(*call) for call in calls if is_own(call[1])])
        if self.compiles and lacked:
            try:
                variants = sorted(variant for gpu, variant in lacked if gpu == self._mine)
                fallback.compile_together(variants, self._mine)
            except EngineError as error:  # all ranks should have the same Triton
                _log.warning("schedule='auto' uses no kernels that must be compiled: %s", error)
                self.compiles = False
            else:
                self._compiled |= lacked
        return self.compiles

    def launched(self, problem: Problem, schedule: Schedule) -> _Variants | None:
        """Return the kernels that all ranks' calls launch, for both weight layouts.

        Returns None if a library also computes products, whose kernels are not known.
        """
        few = sends(schedule, problem.flow) or not problem.flow.shares
        few = few or not is_made_before(problem.m, schedule.shots == "two")
        few = few and not schedule.moves  # a library multiplies
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
    return frozenset(
        (capability, variant)
        for capability, variant in _launched(problem, schedule, gpus)
        if not (packed and pack.has(variant, capability))
    )


@lru_cache(maxsize=1024)
def _launched(problem: Problem, schedule: Schedule, gpus: _Gpus) -> _Variants:
    variants: set[tuple[int, Variant]] = set()
    for like in _alike(problem):
        for rank in _unlike(like, schedule):
            plan = lower_rank(like, schedule, rank)
            for capability, processors in gpus:
                launches = launches_in(plan, DescribedKernels(capability, processors))
                variants.update((capability, variant_of(launch)) for launch in launches)
    return frozenset(variants)


def _alike(problem: Problem) -> list[Problem]:
    """Return problems that together need the kernels of every rank's version of a problem.

    A rank does not know how its peers pool, and with which integers. So the result depends only on
    what the ranks agree on: `Problem.agreed`.
    """
    if not problem.flow.pools:
        return [problem]
    ones = tuple([(1,) * len(tables) for tables in problem.tables])
    return [
        replace(
            problem, tables=ones, lookups=ones, index_dtype=integers,
            modes=tuple([(mode,) * len(tables) for tables in ones]),
        )
        for mode, integers in product(("sum", "weighted"), INDEX_DTYPES)  # means are as sums
    ]  # fmt: skip


def _unlike(problem: Problem, schedule: Schedule) -> list[int]:
    """Return representative ranks: the other ranks need no other kernels.

    A call that is one launch needs the kernels of the rank's own sizes. The kernels of other calls
    depend on all ranks' sizes and, if they sum, on the rank itself.
    """
    ranks = range(problem.world)
    sizes = {
        (
            problem.rows[rank],
            tuple([output.columns[rank] for output in problem.outputs]),
            problem.depths[rank] if problem.depths else 0,
            len(problem.tables[rank]) if problem.tables else 0,
        ): rank
        for rank in ranks
    }
    alike = len(sizes) == 1 and not problem.splits and schedule.sums != "within"
    own_sizes = alike or (schedule.transport == "sm" and not problem.splits)
    return list(sizes.values()) if own_sizes else list(ranks)
