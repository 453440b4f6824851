"""A plugin of pytest: the fast tier, which people run while they work (pytest -m fast).

Every test belongs to it, except the slow ones below, so that a new test does. The complete run
holds it to a budget: `--fast-budget` is given by .ci/run.
"""

from __future__ import annotations

from collections import Counter

import pytest

# Beginnings of test ids: what took more than ten seconds on a shared machine, and covers less for
# its time than what is left. tests/driver builds a test double of the driver first.
SLOW = tuple(
    """
    docs/test_blocks.py docs/test_reference.py::test_examples_of_docstrings driver/ examples/
    native/test_native.py device/test_device.py host/test_bad_commands.py
    host/test_commands.py::TestProcesses host/test_endings.py host/test_fuzz.py
    host/test_operators.py::test_every_schedule_is_right_and_gives_the_same_bits_again[8-
    host/test_operators.py::test_operators_schedules_and_grains_in_any_sequence
    kernels/test_gated.py kernels/test_gated_amd.py kernels/test_launching.py
    kernels/test_one_kernel.py::test_it_is_right kernels/test_pack.py kernels/test_pooled_tables.py
    kernels/test_row_updates.py modules/test_absent_ranks.py modules/test_dlrm_bench.py
    modules/test_model_bench.py modules/test_moe_bench.py::test_every_way_is_right
    modules/test_functions.py::test_compilers
    modules/test_functions.py::test_gradients_by_halves
    modules/test_functions.py::test_every_function_and_gradient_is_right_in_every_rank[3]
    modules/test_functions.py::test_every_function_and_gradient_is_right_in_every_rank[4]
    modules/test_no_rows.py modules/test_overlap.py modules/test_private_names.py
    modules/test_tables.py modules/test_tuning.py plan/test_laws.py::test_mutants
    plan/test_laws.py::test_benign plan/test_many_copies.py process/test_chaos.py
    process/test_faults.py process/test_first_calls.py process/test_one_sided.py
    profiling/test_writing.py::test_what_is_written_reads_back
    program/test_readback.py::test_programs_are_proved_and_interpreted_right
    report/test_sweep_page.py::test_many_shapes_stay_small selector/test_host_costs.py
    simulator/test_interface.py::TestSpeed sweeping/test_kills.py sweeping/test_ranks.py
    """.split()  # noqa: SIM905 - as a list it is a page
)
_NAMED = 5  # tests that a run over its budget names
_took: Counter[str] = Counter()  # seconds of each test of the fast tier, in this run


def is_fast(nodeid: str) -> bool:
    """Return whether a test belongs to the fast tier."""
    return not nodeid.removeprefix("tests/").startswith(SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the budget."""
    parser.addoption(
        "--fast-budget", type=float, metavar="SECONDS",
        help="fail if the tests of the fast tier take longer, all durations added",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # pytest selects by marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the fast tier."""
    for item in items:
        if is_fast(item.nodeid):
            item.add_marker(pytest.mark.fast)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test took."""
    if is_fast(report.nodeid):
        _took[report.nodeid] += report.duration


def _over(config: pytest.Config) -> bool:
    budget = config.getoption("--fast-budget")
    return budget is not None and _took.total() > budget


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run whose fast tier is over its budget."""
    if _over(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the fast tier took, and why a run failed that is over its budget."""
    budget = terminalreporter.config.getoption("--fast-budget")
    if budget is None:
        return
    terminalreporter.section(f"tests of the fast tier: {_took.total():.0f} of {budget:.0f} s")
    if _over(terminalreporter.config):
        terminalreporter.write_line("Make tests faster, or list slow ones in tests/tiers.py:")
        for name, seconds in _took.most_common(_NAMED):
            terminalreporter.write_line(f"{seconds:.1f} s {name}")
