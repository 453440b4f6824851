"""A mixture of experts over ranks on the CPU. What each rank checks is in moe_worker.py."""

from __future__ import annotations

from typing import Any

import pytest
from one_run import OneRun

CHECKS = (
    "values", "activations", "routed", "capacity", "recomputed", "compiled", "bad_input",
    "reserved", "limited",
)  # fmt: skip
RUNS = (
    OneRun("experts of one rank", "moe_worker.py", 1, *CHECKS),
    OneRun("experts of two ranks", "moe_worker.py", 2, *CHECKS, "one_refuses", "differing"),
    OneRun("experts of four ranks", "moe_worker.py", 4, "values", "routed", "capacity"),
)


@pytest.mark.parametrize(("run", "check"), [test for run in RUNS for test in run.tests])
def test_mixtures_of_experts(
    run: OneRun, check: str, torch: Any, request: pytest.FixtureRequest
) -> None:
    run.judge(check, request)
