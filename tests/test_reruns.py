"""Tests that were run again are counted, and those of the fast tier timed: too much fails a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reruns
import tiers

TESTS = Path(__file__).parent
FAILS_ONCE = """
import pytest
failed = set()
@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    again, _ = number in failed, failed.add(number)
    assert again
"""


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """Run files of tests with the plugins of this folder, as if the machine stood still."""
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = fast\naddopts = --import-mode=importlib\n"
    )
    for name, code in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    (folder / "stalls.py").write_text("def happened(): return True")
    at = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(TESTS)!r}]; import pytest"
    plugins = ("-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "reruns", "-p", "tiers")
    command = [sys.executable, "-c", f"{at}; sys.exit(pytest.main())", *plugins, *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("count", "code"), [(3, 0), (4, 1)])
def test_more_than_three_fail_the_run(tmp_path: Path, count: int, code: int) -> None:
    files = {"host/test_a.py": FAILS_ONCE.format(count=count)}
    found, said = run(tmp_path, files, "--fast-budget", "60")
    assert found == code, said
    assert f"{count} tests were run again; at most 3 may be" in said
    assert said.count("first run of tests/host/test_a.py::test_it") == count


def test_only_a_failure_asks_for_stalls() -> None:
    """To ask takes 0.15 s, which every test would take longer."""
    begun = time.monotonic()
    assert not any(reruns._stalled(None) for _ in range(100))
    assert time.monotonic() - begun < 3


def test_what_waits_for_nobody_is_not_run_again(tmp_path: Path) -> None:
    folders = ("plan", "kernels", "native")
    files = {f"{folder}/test_a.py": FAILS_ONCE.format(count=1) for folder in folders}
    found, said = run(tmp_path, files)
    assert found == 1 and "3 failed in" in said, said


def test_a_slow_fast_tier_fails_the_run(tmp_path: Path) -> None:
    code = "import time\ndef test_it():\n    time.sleep(0.1)"
    found, said = run(tmp_path, {"host/test_a.py": code}, "--fast-budget", "0.01", "-m", "fast")
    assert found == 1 and "s tests/host/test_a.py::test_it" in said, said


def test_slow_tests_are_there() -> None:
    for name in tiers.SLOW:
        file, *parts = name.split("::")
        assert (TESTS / file).exists(), name
        assert all(part.partition("[")[0] in (TESTS / file).read_text() for part in parts), name
    assert tiers.is_fast("tests/plan/test_new.py::test_it")
    assert not tiers.is_fast(f"tests/{tiers.SLOW[0]}::test_it")
