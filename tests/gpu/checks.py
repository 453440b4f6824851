"""The checks that ranks make on GPUs, in one table: what runs, on how many ranks, with what words.

test_gpu_checks.py runs each of them on GPUs. tests/driver/test_gpu_checks_on_double.py holds the
table against the scenarios' parameters and runs the checks that the double of the driver can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from ficco.core.dtypes import DTYPES
from ficco.operators import OPERATORS

__all__ = ["A_RANK_A_GPU", "CHECKS", "MOST", "Check", "Stage", "left_out"]

A_RANK_A_GPU = 0  # in place of a number of ranks
MOST = 8  # ranks, which share the GPUs where there are fewer of these
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_KERNELS_WAIT = {"FICCO_WAITS": "kernel"}


class Stage(IntEnum):
    """When a check runs: beside all others; beside its own kind; alone.

    Those of SLEEPING mostly sleep, for times that must not become longer. Those of REPEATED make
    calls again and again; the GPUs are idle for most of their time.
    """

    BESIDE = 0
    SLEEPING = 1
    REPEATED = 2
    ALONE = 3


class Check(NamedTuple):
    """A check, which all ranks of a group make.

    Attributes:
        name: of the check; with the number of ranks it is unique.
        scenario: a name in serve.SCENARIOS.
        world: ranks; or A_RANK_A_GPU.
        words: arguments of the scenario.
        environment: of the ranks' processes, in addition to what is set.
        limit_s: seconds after which the ranks are ended.
        repeats: the word that `--calls` sets, if any.
        fresh: whether it needs processes that have made no other check.
        ends: whether the processes end in it.
        stage: when it runs, and beside what.
        quick: whether the quick selection has it.
    """

    name: str
    scenario: str
    world: int = A_RANK_A_GPU
    words: Mapping[str, Any] = _NOTHING
    environment: Mapping[str, str] = _NOTHING
    limit_s: float = 60.0
    repeats: str = ""
    fresh: bool = False
    ends: bool = False
    stage: Stage = Stage.BESIDE
    quick: bool = False

    @property
    def id(self) -> str:
        """The name, and the number of ranks."""
        ranks = "a rank a GPU" if self.world == A_RANK_A_GPU else f"{self.world} ranks"
        return f"{self.name}-{ranks}"


def _operators() -> Iterator[Check]:
    """Every operator in every schedule: in every dtype by a rank a GPU.

    Other numbers of ranks take the dtypes in turns, so that every operator has every dtype on 3 to
    5 ranks, and again on 6 to 8.
    """
    dtypes = tuple(DTYPES)
    for world in (A_RANK_A_GPU, *range(1, MOST + 1)):
        for number, op in enumerate(OPERATORS):
            turn = dtypes[(world + number) % len(dtypes)]
            for dtype in dtypes if world == A_RANK_A_GPU else (turn,):
                words = {"op": op, "dtype": dtype}
                quick = world == A_RANK_A_GPU and dtype == turn
                name = f"operators-{op}-{dtype}"
                yield Check(name, "operators", world, words, limit_s=90.0, quick=quick)
    for op in OPERATORS:
        words = {"op": op, "dtype": "float32"}
        for name, environment in (("one queue", _ONE_QUEUE), ("waits by kernels", _KERNELS_WAIT)):
            yield Check(f"operators-{op}-{name}", "operators", words=words,
                        environment=environment, limit_s=90.0)  # fmt: skip


def _calls() -> Iterator[Check]:
    """Calls at random, functions, what captures may not do, and which kernels run."""
    for world in (A_RANK_A_GPU, MOST):
        whole = world == A_RANK_A_GPU
        yield Check("capture_rules", "capture_rules", world, quick=whole)
        yield Check("functions", "functions", world)
        yield Check("tuned", "tuned", world, limit_s=90.0, quick=whole)
        yield Check("experts", "experts", world, limit_s=90.0, quick=whole)
        for seed in (1, 2) if whole else (1,):
            words = {"seed": seed, "calls": 90 if whole else 50}
            # Odd sizes and layouts take kernels that the pack lacks: Triton compiles them.
            yield Check(f"random-seed {seed}", "random", world, words, limit_s=180.0)
    for world, seed, steps in ((A_RANK_A_GPU, 1, 300), (4, 2, 60), (MOST, 3, 40)):
        yield Check("pooling_at_random", "pooling_at_random", world,
                    {"seed": seed, "steps": steps}, limit_s=180.0)  # fmt: skip
    yield Check("kernels", "kernels", fresh=True)  # the profiler stays in its processes


def _again() -> Iterator[Check]:
    """Calls again and again, in graphs, of few rows, and of kernels of one's own.

    8 ranks make fewer, since each takes turns with three others on two GPUs. Other numbers of ranks
    make so few calls of their own kernels that Triton's compiler takes most of the time.
    """
    for world, calls in ((A_RANK_A_GPU, 200), (MOST, 12)):
        many: dict[str, Any] = {"world": world, "limit_s": 180.0, "stage": Stage.REPEATED}
        quick = world == A_RANK_A_GPU
        yield Check("fuzz", "fuzz", words={"calls": calls}, repeats="calls", **many)
        yield Check("shared_tiles", "shared_tiles", words={"calls": calls // 2}, repeats="calls",
                    **many)  # fmt: skip
        if quick:
            yield Check("replay-waits by kernels", "replay", words={"replays": calls},
                        environment=_KERNELS_WAIT, **many)  # fmt: skip
        yield Check("replay", "replay", words={"replays": calls}, repeats="replays", quick=quick,
                    **many)  # fmt: skip
        yield Check("few_rows", "few_rows", words={"calls": calls}, quick=quick, **many)
        own = {"calls": 10 * calls if quick else calls}
        yield Check("device_kernels", "device_kernels", words=own, repeats="calls",
                    **many)  # fmt: skip
    yield Check("filled_device", "filled_device", MOST, {"calls": 4, "timeout_s": 10.0},
                limit_s=90.0, stage=Stage.REPEATED)  # fmt: skip
    for world in (1, 3, 4, 5, 6, 7):
        yield Check("device_kernels", "device_kernels", world, {"calls": 12}, limit_s=180.0)


def _gradients() -> Iterator[Check]:
    for world in (A_RANK_A_GPU, 1, 3, 4, MOST):
        yield Check("gradients", "gradients", world, limit_s=90.0)
        yield Check("tables", "tables", world, limit_s=180.0)  # Triton compiles for odd sizes


def _models() -> Iterator[Check]:
    for world in (2, 4):
        yield Check("models", "models", world, limit_s=180.0)
    yield Check("captured", "captured", world=2, quick=True)
    yield Check("measured", "measured", world=2)
    for world in (A_RANK_A_GPU, MOST):
        yield Check("shards", "shards", world, limit_s=90.0)


def _faults() -> Iterator[Check]:
    """Ranks that come late, make other calls, or die, which takes times to pass."""
    short, stage = {"timeout_s": 3.0}, Stage.SLEEPING
    yield Check("faults", "faults", words=short, stage=stage, quick=True)
    yield Check("faults-waits by kernels", "faults", words=short, environment=_KERNELS_WAIT,
                stage=stage)  # fmt: skip
    for ahead in (0, 5000):
        yield Check(f"faults-one queue-{ahead} ahead", "faults", words={"ahead": ahead, **short},
                    environment=_ONE_QUEUE, stage=stage)  # fmt: skip
    for world, few_rows in product((A_RANK_A_GPU, MOST), (False, True)):
        words = {"dies": True, "few_rows": few_rows, **short}
        name = f"faults-death{'-few rows' if few_rows else ''}"
        yield Check(name, "faults", world, words, fresh=True, ends=True, stage=stage)
    for queues in ("1", "8"):
        lazily = {"CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": queues}
        words = {"loads": True, **short}
        yield Check(f"faults-kernel is loaded-{queues} queues", "faults", words=words,
                    environment=lazily, fresh=True, stage=stage)  # fmt: skip
    yield Check("functions-launches block", "functions", words={"fallback": True},
                environment={"CUDA_LAUNCH_BLOCKING": "1"}, stage=stage)  # fmt: skip


def _alone() -> Iterator[Check]:
    """Checks that hold the GPUs' multiprocessors, or need two kernels to run at once."""
    yield Check("opposite", "opposite", words={"rounds": 54}, stage=Stage.ALONE)
    for world in (A_RANK_A_GPU, MOST):
        yield Check("crowded", "crowded", world, {"timeout_s": 20.0}, limit_s=90.0,
                    stage=Stage.ALONE)  # fmt: skip
        yield Check("aside", "aside", world, stage=Stage.ALONE)


def _in_order() -> tuple[Check, ...]:
    """Order checks so that those of the same processes stand together, by stage."""
    found = [*_operators(), *_calls(), *_gradients(), *_models(), *_faults(), *_again(), *_alone()]

    def group(check: Check) -> Any:
        # Large groups first, as they last longest; a rank a GPU and 2 ranks are one on 2 GPUs.
        rank_a_gpu = check.world in (A_RANK_A_GPU, 2)
        return check.stage, len(check.environment), check.fresh, not rank_a_gpu, -check.world

    return tuple(sorted(found, key=group))


CHECKS = _in_order()


def left_out(check: Check, gpus: int) -> str:
    """Say why a check is not for so many GPUs, or return nothing."""
    if check.world == A_RANK_A_GPU and gpus < 2:
        return f"{gpus} GPU found, 2 or more are needed"
    if check.scenario in ("models", "captured", "measured") and gpus < check.world:
        return f"{gpus} GPUs found, {check.world} are needed, one a rank"
    if check.scenario == "operators" and check.world == gpus > 1:
        return f"{gpus} GPUs found: `a rank a GPU` has these ranks, and every dtype"
    if check.world == MOST <= gpus:
        return f"{gpus} GPUs found: ranks need not share them"
    return ""
