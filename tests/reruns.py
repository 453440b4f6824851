"""A plugin of pytest: tests that fail while the machine stands still are run again, and counted.

The summary lists them with their first failure. More than MOST of them fail the run: then something
else than the machine is at fault. Tests in CERTAIN folders wait for no other process, so that a
failure of theirs is one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import stalls

MOST = 3
CERTAIN = frozenset({"plan", "program", "operators", "simulator", "kernels", "native"})
_SHOWN = 4000  # characters of a failure


def may_run_again(path: Path) -> bool:
    """Return whether tests of a file, relative to the folder of tests, may be run again."""
    return path.parts[0] not in CERTAIN


def _stalled(error: BaseException | None) -> bool:
    """Return whether a test failed in a stall. It is asked about each test, also if that passed."""
    return error is not None and stalls.happened()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that may be run again."""
    if config.pluginmanager.hasplugin("rerunfailures"):  # GPU machines may lack it
        for item in items:
            if may_run_again(item.path.relative_to(config.rootpath / "tests")):
                item.add_marker(pytest.mark.flaky(reruns=1, condition=_stalled))


def _again(config: pytest.Config) -> list[pytest.TestReport]:
    """Return the reports of first runs; none in a process of pytest-xdist."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("rerun", []) if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that repeated too many tests."""
    if len(_again(session.config)) > MOST and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the first failure of each test that was run again; pytest shows only the last run."""
    reports = _again(terminalreporter.config)
    for report in reports:
        terminalreporter.section(f"first run of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-_SHOWN:])
    if reports:
        terminalreporter.section(f"{len(reports)} tests were run again; at most {MOST} may be")
        for report in reports:
            terminalreporter.write_line(report.nodeid)
