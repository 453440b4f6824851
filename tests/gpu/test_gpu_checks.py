"""Every check of checks.py on GPUs: operators, calls, graphs, faults, gradients, models.

Ranks share GPUs where there are fewer of these: the same runs as on GPUs of their own, but in
turns, so that `a rank a GPU` finds races that `8 ranks` cannot. pool.py says which processes make
which check; each check has a time limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from checks import CHECKS, Check, left_out
from pool import Ran


def _marks(check: Check) -> list[Any]:
    return [pytest.mark.quick] if check.quick else []


@pytest.mark.timeout(0)  # checks have limits of their own, and wait for one another
@pytest.mark.parametrize(
    "check", [pytest.param(check, id=check.id, marks=_marks(check)) for check in CHECKS]
)
def test_on_ranks(
    check: Check, shared_gpus: int, run: Callable[[Check], Ran], request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    if reason := left_out(check, shared_gpus):
        lacking = shared_gpus < 2 and "gpu" in request.config.getoption("--require")
        assert not lacking, reason
        pytest.skip(reason)
    if check.scenario == "crowded" and "gpu" not in request.config.getoption("--require"):
        pytest.importorskip("cupy")
    ran = run(check)
    record_property("ran_s", ran.seconds)
    assert not ran.wrong, ran.wrong
