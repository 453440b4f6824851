"""schedule="auto": kernels that have to be compiled are taken for calls that come often."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ficco.api import auto  # noqa: E402
from ficco.core.errors import EngineError  # noqa: E402
from ficco.core.machine import Machine  # noqa: E402
from ficco.engine import group_kernels  # noqa: E402
from ficco.engine.group_kernels import OFTEN, GroupKernels  # noqa: E402
from ficco.engine.wanted import DescribedKernels, launches_in  # noqa: E402
from ficco.kernels import fallback  # noqa: E402
from ficco.kernels.variants import variant_of  # noqa: E402
from ficco.lowering import lower_rank  # noqa: E402
from ficco.operators.problem import Problem  # noqa: E402
from ficco.operators.problem_checks import Output  # noqa: E402
from ficco.plan.schedule import Schedule  # noqa: E402

GPUS = ((90, 132),)
PLACE = torch.device("cuda", 0)
LACKED = Problem.chunked("matmul_all_reduce", 2, 4000, 8200, 16400, "float32")


class Runtime:
    """Has the kernels of a group's ranks, and no limit of windows."""

    window_limit = None

    def __init__(self, kernels: GroupKernels) -> None:
        self.kernels = kernels


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled; the best schedule is a gated one, and the plain one is serial."""
    found: list[Any] = []
    gated = Schedule.named("gated_1d").resolve(2, Machine.named("h200x2"))
    plain = Schedule.named("serial").resolve(2, Machine.named("h200x2"))

    def chosen(problem: Any, runtime: Any, device: Any, when: str, kernels: bool) -> Any:
        return SimpleNamespace(schedule=gated if kernels else plain, predicted_ms=1.0, by="rule",
                               reasons=())  # fmt: skip

    monkeypatch.setattr(auto, "_chosen", chosen)
    monkeypatch.setattr(fallback, "compile_together", lambda *given: found.append(given))
    return found


def _call(runtime: Any) -> str:
    """Choose as a call does, for a problem that the pack has no kernels for."""
    found = auto.automatic(LACKED, runtime, PLACE, None).name
    auto.waits_for_kernels(LACKED, runtime, PLACE)
    return found


def test_what_comes_often_is_compiled_once(compiled: list[Any]) -> None:
    own = GroupKernels("", True, GPUS, 90)
    runtime = Runtime(kernels=own)
    taken = [_call(runtime) for _ in range(OFTEN + 3)]
    assert taken == ["serial"] * OFTEN + ["gated_1d"] * 3
    assert len(compiled) == 1 and compiled[0][1] == 90 and compiled[0][0]
    assert not auto.waits_for_kernels(LACKED, runtime, PLACE)
    assert auto.choice(LACKED, runtime, PLACE).schedule.name == "gated_1d"


def test_asking_alone_changes_nothing(compiled: list[Any]) -> None:
    runtime = Runtime(kernels=GroupKernels("", True, GPUS, 90))
    for _ in range(2 * OFTEN):
        assert auto.choice(LACKED, runtime, PLACE).schedule.name == "serial"
    assert not compiled


def test_reserve_compiles_at_once(compiled: list[Any]) -> None:
    own = GroupKernels("", True, GPUS, 90)
    own.at_once = True
    assert _call(Runtime(kernels=own)) == "gated_1d" and len(compiled) == 1


def test_what_cannot_be_compiled_is_left(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise EngineError("Triton failed")

    monkeypatch.setattr(fallback, "compile_together", fails)
    own = GroupKernels("", True, GPUS, 90)
    own.at_once = True
    with caplog.at_level(logging.WARNING, "ficco"):
        assert [_call(Runtime(kernels=own)) for _ in range(2)] == ["serial"] * 2
    assert caplog.text.count("Triton failed") == 1
    without = Runtime(kernels=GroupKernels("", False, GPUS, 90))
    assert [_call(without) for _ in range(OFTEN + 2)] == ["serial"] * (OFTEN + 2)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_that_stand_for_all_want_all_kernels(world: int) -> None:
    machine, kernels = Machine.named("h200x8"), DescribedKernels(90, 132)
    for op, name in (
        ("all_gather_matmul", "gated_1d"), ("matmul_reduce_scatter", "gated_1d"),
        ("matmul_all_reduce", "gated_sums_1d"), ("matmul_all_reduce", "one_shot_sm"),
        ("matmul_all_reduce", "two_shot_sm"), ("all_gather_matmul", "gather_sm"),
        ("all_to_all_matmul", "gated_1d"), ("matmul_all_reduce", "gated_1d"),
    ):  # fmt: skip
        schedule = Schedule.named(name).resolve(world, machine)
        for m in (1, 13, 64, 520):
            problem = Problem.chunked(op, world, m, 96 * world, 200 * world, "bfloat16")
            want = {
                variant_of(launch)
                for rank in range(world)
                for launch in launches_in(lower_rank(problem, schedule, rank), kernels)
            }
            found = group_kernels._launched(problem, schedule, GPUS)
            assert {variant for _, variant in found} == want, (op, name, m)


@pytest.mark.parametrize("dimension", [64, 61])
def test_ranks_that_pool_differently_have_the_same_kernels(dimension: int) -> None:
    """A rank knows only its own tables: how they pool, with which integers, and their sizes."""
    counts, schedule = (0, 3, 9), Schedule.named("pool_sm").resolve(3, Machine.named("h200x8"))

    def of_rank(rank: int, modes: tuple[str, ...], integers: str) -> Problem:
        entries: dict[str, Any] = {}
        for name, other, own in (("tables", 1, 50), ("lookups", 0, 30), ("modes", "sum", "")):
            rows: list[Any] = [(other,) * count for count in counts]
            rows[rank] = modes if name == "modes" else (own,) * counts[rank]
            entries[name] = tuple(rows)
        output = Output((dimension,) * 3)
        return Problem("embedding_all_to_all", 3, (5, 5, 4), 1, (output,), "float32",
                       index_dtype=integers, **entries)  # fmt: skip

    found = {
        group_kernels._launched(problem, schedule, GPUS)
        for problem in (
            of_rank(0, (), "int64"),
            of_rank(1, ("weighted", "mean", "sum"), "int32"),
            of_rank(1, ("sum",) * 3, "int64"),
            of_rank(2, ("weighted",) * 9, "int64"),
        )
    }
    assert len(found) == 1
    kernels, want = DescribedKernels(*GPUS[0]), set()
    for problem in (of_rank(1, ("weighted", "mean", "sum"), "int32"), of_rank(0, (), "int64")):
        for rank in range(3):
            launches = launches_in(lower_rank(problem, schedule, rank), kernels)
            want |= {variant_of(launch) for launch in launches}
    assert want <= {variant for _, variant in found.pop()}
