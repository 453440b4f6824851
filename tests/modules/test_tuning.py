"""ficco.tune: what tuning_worker.py checks on each rank, and the choice among measured times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks_of_torch import run

from ficco.core.machine import Machine
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

NAMES = ("serial", "shard_p2p", "gated_1d")
SCHEDULES = [Schedule.named(name).resolve(4, Machine.named("mesh4")) for name in NAMES]


@pytest.mark.parametrize("world", [2, 3])
def test_calls_are_measured(world: int, tmp_path: Path, torch: Any) -> None:
    run("tuning_worker.py", world, tmp_path)


@pytest.mark.parametrize(
    ("ms", "when", "name"),
    [
        ({"eager": [1.0, 0.9, 0.8]}, "eager", "gated_1d"),
        ({"eager": [0.805, 0.9, 0.8]}, "eager", "serial"),  # as fast, and plainer
        ({"eager": [0.82, 0.9, 0.8]}, "eager", "gated_1d"),
        ({"eager": [1.0, 0.9, 0.8], "synchronized": [1.0, 1.0, 1.1]}, "eager", "shard_p2p"),
        ({"eager": [1.0, 0.9, 0.8], "synchronized": [1.0, 1.1, 1.1]}, "eager", "serial"),
        ({"eager": [0.02, 0.03, 0.01], "synchronized": [0.02, 0.02, 0.024]}, "eager", "gated_1d"),
        ({"captured": [0.7, 0.9, 0.8], "synchronized": [2.0, 1.0, 1.0]}, "captured", "serial"),
    ],
)
def test_the_fastest_is_chosen(ms: dict[str, list[float]], when: str, name: str) -> None:
    pytest.importorskip("torch")
    from ficco.api.tuned_files import Times
    from ficco.api.tuning import _choice_of

    choice = _choice_of(Times(SCHEDULES, ms), when)
    times = dict(zip(SCHEDULES, ms[when], strict=True))
    assert choice.schedule.name == name and choice.by == "measurement"
    assert choice.predicted_ms == times[choice.schedule]
    assert {choice.schedule, *dict(choice.alternatives)} == set(SCHEDULES)
    others = [ms for _, ms in choice.alternatives]
    assert others == sorted(others)
    assert choice.reasons[0].startswith("measured here by ficco.tune, ")


def _ranked(*entries: tuple[str, int, float | None]) -> list[tuple[Schedule, float | None]]:
    made = [(replace(Schedule.named(name), grain=grain), ms) for name, grain, ms in entries]
    return [(each.resolve(4, Machine.named("mesh4")), ms) for each, ms in made]


def test_the_most_promising_are_measured() -> None:
    pytest.importorskip("torch")
    from ficco.api.tuning import _promising

    ranked = _ranked(
        ("gated_1d", 1, 1.0), ("gated_1d", 2, 1.1), ("hetero_fused_1d", 1, 1.1),
        ("gated_1d", 4, 1.2), ("hetero_fused_1d", 2, 1.3), ("shard_p2p", 1, 1.4),
        ("uniform_fused_1d", 1, 1.6),
    )  # fmt: skip
    device_ms = dict(ranked)

    def points(most: int) -> list[tuple[str, int]]:
        return [(each.name, each.chunks) for each in _promising(ranked, device_ms, most)]

    # hetero_fused_1d at grain 1 is as gated_1d at grain 2, and uniform_fused_1d is hopeless.
    named = [("gated_1d", 1), ("gated_1d", 2), ("hetero_fused_1d", 2), ("shard_p2p", 1)]
    assert points(2) == named
    assert points(1) == [("gated_1d", 1), ("hetero_fused_1d", 1)]
    assert points(3) == [named[0], named[1], ("gated_1d", 4), *named[2:]]
    # Equal times of the host do not make the two schedules one.
    device_ms[ranked[2][0]] = 0.9
    assert points(2) == [named[0], named[1], ("hetero_fused_1d", 1), ("shard_p2p", 1)]
    unknown = [(schedule, None) for schedule, _ in ranked]
    assert _promising(unknown, dict(unknown), 1) == [schedule for schedule, _ in ranked]


@pytest.mark.parametrize("peer_has", [(True, True, True), (True, False, True)])
def test_ranks_run_what_all_have_compiled(
    peer_has: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that cannot compile still meets the others; all leave out what one rank lacks."""
    pytest.importorskip("torch")
    from ficco.api import auto, tuning

    def compile_kernels(calls: list[tuple[Problem, Schedule]]) -> None:
        raise OSError("no room in the folder of kernels")

    def has(problem: Problem, schedule: Schedule) -> bool:
        return schedule.name != "gated_1d"

    told: list[list[bool]] = []

    def gathered(what: str, own: list[bool], call: str) -> list[list[bool]]:
        told.append(own)
        return [own, list(peer_has)]

    kernels = SimpleNamespace(compile=compile_kernels, has=has)
    monkeypatch.setattr(auto, "kernels_of", lambda runtime, device: kernels)
    problem = Problem.chunked("all_gather_matmul", 4, 16, 12, 8)
    runtime: Any = SimpleNamespace(gathered=gathered, rank=0, world=4)
    left = tuning._runnable(problem, SCHEDULES, runtime, device=None)  # type: ignore[arg-type]
    assert told == [[True, True, False]]
    assert left == [each for each, own, peer in zip(SCHEDULES, told[0], peer_has, strict=True)
                    if own and peer]  # fmt: skip
    assert "no room in the folder of kernels" in caplog.text
