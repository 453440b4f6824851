"""ficco.tune: what tuning_worker.py checks on each rank, and the choice among measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run

from ficco.machine import Machine
from ficco.schedule import Schedule

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
    from ficco.modules.tuning import _chosen

    choice = _chosen(SCHEDULES, ms, when)
    times = dict(zip(SCHEDULES, ms[when], strict=True))
    assert choice.schedule.name == name and choice.by == "measurement"
    assert choice.predicted_ms == times[choice.schedule]
    assert {choice.schedule, *dict(choice.alternatives)} == set(SCHEDULES)
    others = [ms for _, ms in choice.alternatives]
    assert others == sorted(others)
    assert choice.reasons[0].startswith("measured here by ficco.tune, ")
