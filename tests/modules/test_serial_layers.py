"""Which schedules a layer's measurement counts as serial."""

from __future__ import annotations

import pytest

from ficco.core.machine import Machine
from ficco.plan.schedule import Schedule

pytest.importorskip("torch")

from ficco.api.layer_timing import _is_serial


@pytest.mark.parametrize("machine", ["mesh4", "h200x4"])
def test_serial_alone_is_serial(machine: str) -> None:
    on = Machine.named(machine)
    named = [Schedule.named(name).resolve(4, on) for name in Schedule.names("matmul_all_reduce")]
    assert {schedule.name for schedule in named if _is_serial(schedule)} == {"serial"}
    assert _is_serial(None)
