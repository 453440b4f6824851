"""The native tests, built three times: plain, with address and undefined, with thread sanitizers.

Many files are compiled as one, which takes a third of the time, as most of it goes to headers.
Native code is held by native/tests/*.cpp; here they are only built and run. A sanitizer's report
fails the test that made it, whatever the exit status.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# cmake and ninja may lie beside a Python that is not activated.
ENVIRONMENT = os.environ | {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}

JOINED = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=13")
REPORTS = ("AddressSanitizer", "LeakSanitizer", "ThreadSanitizer", "runtime error:")


def run(*command: str | Path) -> tuple[int, str]:
    """Run a command and return its exit status and all it said."""
    done = subprocess.run(
        [str(part) for part in command],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout


def build(folder: Path, *options: str) -> Path:
    """Build the native tests and return the executable."""
    for command in (
        ("cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, "-DFICCO_TESTS=ON", *JOINED,
         *options),
        ("cmake", "--build", folder),
    ):  # fmt: skip
        status, said = run(*command)
        assert status == 0, said
    return folder / "ficco_native_tests"


@pytest.mark.parametrize(
    "options",
    [
        # Only here, as sanitizers make GCC see warnings that are none.
        pytest.param(["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"], id="plain"),
        # Debug: with the assertions of native code.
        pytest.param(["-DFICCO_SANITIZE=address", "-DCMAKE_BUILD_TYPE=Debug"], id="address"),
        pytest.param(["-DFICCO_SANITIZE=thread", "-DCMAKE_BUILD_TYPE=Debug"], id="thread"),
    ],
)
def test_native_tests_pass(tmp_path: Path, options: list[str]) -> None:
    executable = build(tmp_path, *options)
    status, said = run(executable)
    if "unexpected memory mapping" in said and (setarch := shutil.which("setarch")):
        # An older thread sanitizer on a kernel that places memory more randomly.
        status, said = run(setarch, "-R", executable)
    assert status == 0, said
    assert not [report for report in REPORTS if report in said], said
    assert "tests passed" in said
