"""Every check of checks.py on GPUs: operators, calls, graphs, faults, gradients, models.

Ranks share GPUs where there are fewer of these: the same runs as on GPUs of their own, but in
turns, so that `a rank a GPU` finds races that `8 ranks` cannot. pool.py says which processes make
which check; each check has a time limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checks import A_RANK_A_GPU, CHECKS, MOST, Check
from pool import Pool, Ran, lanes_here

Run = Callable[[Check], Ran]


def _marks(check: Check) -> list[Any]:
    return [pytest.mark.quick] if check.quick else []


@pytest.fixture(scope="module")
def run(
    shared_gpus: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Returns what a check said; all that are selected start to run at once."""
    wanted = [item.callspec.params["check"] for item in request.session.items
              if item.path == request.path]  # fmt: skip
    checks = [check for check in wanted if not left_out(check, shared_gpus)]
    folder = tmp_path_factory.mktemp("ranks")
    pool = Pool(checks, shared_gpus, folder, request.config.getoption("--calls"), lanes_here())
    try:
        yield pool.result
    finally:
        pool.close()


def left_out(check: Check, gpus: int) -> str:
    """Say why a check is not for so many GPUs, or return nothing."""
    if check.world == A_RANK_A_GPU and gpus < 2:
        return f"{gpus} GPU found, 2 or more are needed"
    if check.scenario in ("captured", "measured") and gpus < check.world:
        return f"{gpus} GPU found, {check.world} are needed"  # no graph captures gloo
    if check.scenario == "operators" and check.world == gpus > 1:
        return f"{gpus} GPUs found: `a rank a GPU` has these ranks, and every dtype"
    if check.world == MOST <= gpus:
        return f"{gpus} GPUs found: ranks need not share them"
    return ""


@pytest.mark.timeout(0)  # checks have limits of their own, and wait for one another
@pytest.mark.parametrize(
    "check", [pytest.param(check, id=check.id, marks=_marks(check)) for check in CHECKS]
)
def test_on_ranks(
    check: Check, shared_gpus: int, run: Run, request: pytest.FixtureRequest,
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
