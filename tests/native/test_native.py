"""The native tests, built twice: with address and undefined, with thread sanitizers.

Warnings are errors here, and in CI's build of what is shipped, where code is optimized. All files
of a target are compiled as one, which takes a third of the time, as most of it goes to headers.
Native code is held by tests/native/cpp/*.cpp; here they are only built and run. A report of a
sanitizer fails the test that made it, whatever the exit status.
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

JOINED = ("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0")
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


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_native_tests_pass(tmp_path: Path, sanitizer: str) -> None:
    executable = build(
        tmp_path, f"-DFICCO_SANITIZE={sanitizer}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
        "-DCMAKE_BUILD_TYPE=Debug",  # with the assertions of native code
        "-DCMAKE_CXX_FLAGS_DEBUG=",  # -g1 is enough, see CMakeLists.txt
    )  # fmt: skip
    status, said = run(executable)
    if "unexpected memory mapping" in said and (setarch := shutil.which("setarch")):
        # An older thread sanitizer on a kernel that places memory more randomly.
        status, said = run(setarch, "-R", executable)
    assert status == 0, said
    assert not [report for report in REPORTS if report in said], said
    assert "tests passed" in said
