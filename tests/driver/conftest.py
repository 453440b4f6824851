"""The test doubles of drivers (tests/double), built once for all tests of a run."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def double_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that needs no GPU, for LD_LIBRARY_PATH of child processes."""
    return _built(tmp_path_factory, "ficco_cuda_double") / "cuda_double"


@pytest.fixture(scope="session")
def hip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ficco_hip_tests; its folder `hip_double` has libamdhip64.so.7."""
    return _built(tmp_path_factory, "ficco_hip_double", "ficco_hip_tests")


def _built(tmp_path_factory: pytest.TempPathFactory, *targets: str) -> Path:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whichever process comes first builds it for all
        base = base.parent
    folder, done = base / "drivers", base / f"{targets[0]}-is-built"
    with (base / "drivers-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build(folder, targets)
            done.touch()
    return folder


def _build(folder: Path, targets: tuple[str, ...]) -> None:
    # cmake and ninja may lie beside a Python that is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (
        ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), "-DFICCO_TESTS=ON",
         f"-DPython_EXECUTABLE={sys.executable}",  # which may have triton, and HIP's headers
         "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", "-DCMAKE_UNITY_BUILD=ON",
         "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0", "-DCMAKE_BUILD_TYPE=Debug",
         "-DCMAKE_CXX_FLAGS_DEBUG=-O1"],  # with its assertions, and quicker than without a level
        ["cmake", "--build", str(folder), "--target", *targets],
    ):  # fmt: skip
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout
