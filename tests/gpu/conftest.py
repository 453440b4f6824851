"""GPUs for the tests in this folder; without them they are skipped, or fail with --require gpu.

Commands, examples, blocks of the documentation and the checks of ranks run side by side, and come
first. What must have the GPUs to itself comes behind them. Each test is told by one line when it
ends.
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # behind folders whose files have the same names
from checks import Check, left_out
from pool import Pool, Ran, lanes_here

# Those that are not here have the GPUs to themselves, and come last.
STAGES = ("test_commands", "test_examples", "test_documentation", "test_gpu_checks")
PROGRAMS_AT_ONCE = 3  # examples and pages of the documentation, with a process per GPU each
_FAILURE_LINES = 40
_CONFIG: list[pytest.Config] = []
_BEGUN = time.monotonic()


def _count() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _at_least(needed: int, request: pytest.FixtureRequest) -> int:
    found = _count()
    if found < needed:
        told = f"{found} GPUs found, {needed} or more are needed"
        assert "gpu" not in request.config.getoption("--require"), told
        pytest.skip(told)
    return found


@pytest.fixture(scope="session")
def gpus(request: pytest.FixtureRequest) -> int:
    """Number of GPUs that reach each other: 2 or more."""
    return _at_least(2, request)


@pytest.fixture(scope="session")
def shared_gpus(request: pytest.FixtureRequest) -> int:
    """Number of GPUs, which more ranks than these may share: 1 or more."""
    return _at_least(1, request)


@pytest.fixture(scope="session")
def run(
    shared_gpus: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Check], Ran]]:
    """Returns what a check of checks.py said; those that are selected begin at once."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    checks = [each.params["check"] for each in given if each and "check" in each.params]
    wanted = [check for check in checks if not left_out(check, shared_gpus)]
    folder = tmp_path_factory.mktemp("ranks")
    pool = Pool(wanted, shared_gpus, folder, request.config.getoption("--calls"), lanes_here())
    try:
        yield pool.result
    finally:
        pool.close()


@pytest.fixture(scope="session")
def programs(
    gpus: int, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Returns what a program's function returned, or raises what it raised.

    A mark names the programs of a test: `programs((function, *arguments), ...)`. A function takes a
    folder and these arguments. Those of the selected tests begin at once, a few at a time, since
    most of their time goes to the start of processes.
    """
    wanted = [
        call
        for item in request.session.items
        for mark in item.iter_markers("programs")
        for call in mark.args
    ]
    with ThreadPoolExecutor(PROGRAMS_AT_ONCE) as executor:
        futures = {
            call: executor.submit(call[0], tmp_path_factory.mktemp("program"), *call[1:])
            for call in dict.fromkeys(wanted)
        }
        yield lambda *call: futures[call].result()
        executor.shutdown(cancel_futures=True)


def pytest_configure(config: pytest.Config) -> None:
    _CONFIG.append(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests of this folder by stage; others stay where they are."""
    places = [i for i, item in enumerate(items) if item.path.parent == HERE]
    names = {name: number for number, name in enumerate(STAGES)}
    mine = sorted(
        (items[i] for i in places), key=lambda item: names.get(item.path.stem, len(STAGES))
    )
    for place, item in zip(places, mine, strict=True):
        items[place] = item


def _here(report: pytest.TestReport) -> bool:
    return "tests/gpu/" in report.nodeid


def pytest_report_teststatus(report: pytest.TestReport) -> Any:
    """Print no letters for the tests of this folder, which have a line each."""
    if isinstance(report, pytest.TestReport) and _here(report):
        if report.when == "call" or not report.passed:
            category = "error" if report.failed and report.when != "call" else report.outcome
            return category, "", ""
        return "", "", ""
    return None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print when a test ended, its outcome, how long it ran, its name, and why it failed."""
    if not _CONFIG or not _here(report) or (report.when != "call" and report.passed):
        return
    terminal: Any = _CONFIG[0].pluginmanager.get_plugin("terminalreporter")
    if terminal is None:
        return
    seconds = dict(report.user_properties).get("ran_s", report.duration)
    terminal.ensure_newline()
    elapsed = time.monotonic() - _BEGUN
    terminal.write_line(f"{elapsed:5.0f} s  {report.outcome:7} {seconds:6.1f} s  {report.nodeid}")
    if report.failed:  # at once, for a run that is cut short prints no summary
        for line in report.longreprtext.splitlines()[-_FAILURE_LINES:]:
            terminal.write_line(f"    {line}")
    terminal.flush()
