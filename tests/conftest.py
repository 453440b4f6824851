"""What all tests share: hypothesis profiles, the --require option, and tests that run alone.

Tests run in twice as many processes as there are processors (pytest-xdist). What measures time is
marked `@pytest.mark.alone`: no other test of the same run goes on beside it. reruns.py says which
tests are run again after a failure, tiers.py which are fast.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Helper modules of the tests lie beside them; --import-mode=importlib does not look there.
for folder in (".", "plan", "program", "host", "kernels", "report", "sweeping"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import reruns  # noqa: E402
import stalls  # noqa: E402
import tiers  # noqa: E402

# Two files that are there anyway, which the processes of a run lock.
_ROOM, _DOOR = Path(__file__), Path(__file__).parents[1] / "pyproject.toml"

# No test measures the machine by surprise: what auto chooses would depend on it.
os.environ["FICCO_MEASURE"] = "0"

# Tests go on side by side, and so do ranks: threads of BLAS would only be in each other's way.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# Commands write as into a file, however wide the terminal of the run is.
os.environ.pop("COLUMNS", None)

settings.register_profile(
    "ficco", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ficco")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for plugin in (reruns, tiers):
        pluginmanager.register(plugin)
    parser.addoption(
        "--require", action="append", default=[], metavar="WHAT",
        help="fail instead of skipping where WHAT (torch, transformers, peft, megatron, deepspeed, "
        "torchtitan, torchrec, vllm, sglang, chromium) is missing",
    )  # fmt: skip
    parser.addoption(
        "--complete", action="store_true", help="run combinations, too, that CI leaves out"
    )
    parser.addoption(
        "--calls",
        type=int,
        help="calls, and replays, that checks of tests/gpu make again and again",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers that fork programs with PyTorch imported, once for all processes."""
    from forking import Servers

    if not Servers.are_there():
        config.add_cleanup(Servers().close)
    if not stalls.Watch.is_there():
        config.add_cleanup(stalls.Watch().close)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return twice the number of processors, as many tests wait; 0 where there are GPUs.

    These serve one test at a time.
    """
    return 0 if Path("/dev/nvidiactl").exists() else 2 * len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that run alone first: later they would wait for long ones, and hold up the rest."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let one process of a run make the bytecode of all modules, which the others then read."""
    with _ROOM.open() as room:
        try:
            fcntl.flock(room, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(room, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """Spare tests a sixth of their time, which went to looks for cycles."""
    from forking import collect_seldom

    collect_seldom()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that is marked `alone` wait until the others have ended, and hold them up.

    All queue at the door, so that who waits for the room is not overtaken for ever. To wait is no
    part of a test's timeout.
    """
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with _ROOM.open() as room, _DOOR.open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        stalls.begin()
        try:
            return (yield)
        finally:  # a process that the test has forked may have the file open still
            fcntl.flock(room, fcntl.LOCK_UN)


@pytest.fixture
def torch(request: pytest.FixtureRequest):
    """PyTorch, or a skip; with --require torch a failure."""
    if "torch" in request.config.getoption("--require"):
        import torch

        return torch
    return pytest.importorskip("torch")
