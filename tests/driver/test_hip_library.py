"""Which HIP library the native module takes, and what it says of one that will not do."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import double_control as control
import pytest
from hip_control import refusal, run

_PACKAGES = ("libamdhip64-5", "libhsa-runtime64-1", "libhsakmt1", "libnuma1")


def load(paths: list[str]) -> None:
    """Load libraries, and say which one the native module takes, or why none."""
    from ficco import _native

    loaded = [ctypes.CDLL(path) for path in paths]
    try:
        print(_native.hip_library(), _native.hip_driver_version())
    except _native.GpuError:
        print(refusal(_native.hip_driver_version))
    assert len(loaded) == len(paths)


def taken(folder: Path | None, *loaded: Path, **settings: object) -> str:
    """Return what `load` says in a process that finds libraries in `folder`."""
    env = control.environment(folder, **settings) if folder else dict(os.environ)
    return run(__file__, "load", *map(str, loaded), env=env).strip()


def compile_library(path: Path, text: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("c++")
    assert compiler is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(text)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True, timeout=60)
    return path


def test_the_newest_name_is_opened(hip_folder: Path) -> None:
    path = hip_folder / "hip_double" / "libamdhip64.so.7"
    assert taken(path.parent) == f"{path} 70125424"


def test_the_loaded_library_is_taken(hip_folder: Path, tmp_path: Path) -> None:
    bundled = tmp_path / "torch" / "lib" / "libamdhip64.so"  # as PyTorch's wheel has it
    bundled.parent.mkdir(parents=True)
    shutil.copy(hip_folder / "hip_double" / "libamdhip64.so.7", bundled)
    assert taken(hip_folder / "hip_double", bundled) == f"{bundled} 70125424"


def test_two_libraries_are_refused(hip_folder: Path, tmp_path: Path) -> None:
    first = hip_folder / "hip_double" / "libamdhip64.so.7"
    second = tmp_path / "libamdhip64.so.6"
    shutil.copy(first, second)
    said = taken(hip_folder / "hip_double", first, second)
    assert said.startswith("the process has two HIP libraries")
    assert f"{first} and {second}; load one" in said
    link = tmp_path / "libamdhip64.so"
    link.symlink_to(first)
    assert taken(hip_folder / "hip_double", first, link) == f"{first} 70125424"  # one file


@pytest.mark.skipif(
    ctypes.util.find_library("amdhip64") is not None, reason="this machine has a HIP library"
)
def test_no_library_is_told() -> None:
    said = taken(None)
    assert said.startswith("no HIP library is found (libamdhip64.so.7: cannot open")
    assert "libamdhip64.so.6: cannot" in said
    assert said.endswith("install ROCm 6.1 or later, or PyTorch for ROCm")


def test_an_old_library_is_refused(hip_folder: Path, tmp_path: Path) -> None:
    said = taken(hip_folder / "hip_double", version=60000000)
    assert "libamdhip64.so.7 is HIP 6.0; ficco needs HIP 6.1 or later" in said
    version = "int hipDriverGetVersion(int* version) { *version = 50221153; return 0; }"
    stub = compile_library(tmp_path / "old" / "libamdhip64.so.6", version)
    said = taken(stub.parent)
    assert said.startswith(f"{stub} is HIP 5.2 and has no hipGetErrorName, hipGetErrorString, ")
    assert said.endswith("ficco needs HIP 6.1 or later: install a newer ROCm, or PyTorch for one")
    other = compile_library(tmp_path / "other" / "libamdhip64.so.7", "int nothing;")
    assert "has no hipDriverGetVersion; it is no HIP library" in taken(other.parent)


def try_again(_: list[str]) -> None:
    from ficco import _native

    assert "hipDriverGetVersion answers 999" in refusal(_native.hip_driver_version)
    assert _native.hip_driver_version() == 70125424


def test_a_library_that_fails_is_tried_again(hip_folder: Path) -> None:
    env = control.environment(hip_folder / "hip_double", fail="hipDriverGetVersion:0:999")
    run(__file__, "try_again", env=env)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of AMD's own library 5.2, of Debian's packages."""
    folder = tmp_path_factory.mktemp("debian")
    for command in (["apt-get", "download", *_PACKAGES], ["dpkg", "--version"]):
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            pytest.skip("apt has none of " + ", ".join(_PACKAGES))
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True, timeout=60)
    return next(folder.glob("usr/lib/*/libamdhip64.so.5")).parent


def test_amds_own_library_5_2_is_too_old_and_has_no_device(debian: Path) -> None:
    library = debian / "libamdhip64.so.5"
    said = taken(debian, library)
    assert said.startswith(f"{library} is HIP 5.2 and has no hipGetDevicePropertiesR0600; ")
    count = (
        "import ctypes, sys; place = ctypes.c_int();"
        "sys.exit(ctypes.CDLL(sys.argv[1]).hipGetDeviceCount(ctypes.byref(place)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", count, library],
        env=control.environment(debian),
        timeout=60,
        check=False,
    )
    if Path("/dev/kfd").exists():
        pytest.skip("this machine may have AMD devices")
    assert done.returncode == 100  # as the double's library without devices


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
