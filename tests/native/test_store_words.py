"""The text of the kernel that stores words, as an assembler reads it; what it does needs a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ficco.program.target import MOST_STORED

NATIVE = Path(__file__).parents[2] / "native/src"
TEXT = NATIVE / "driver/store_words.ptx.inc"


def assembler() -> Path:
    """Return the one that Triton brings."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


def instructions() -> str:
    found = re.search(r'R"\((.*)\)"', TEXT.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("capability", [70, 80, 90, 100, 120])
def test_every_gpu_takes_it(capability: int, tmp_path: Path) -> None:
    source, machine = tmp_path / "store_words.ptx", tmp_path / "store_words.cubin"
    source.write_text(instructions())
    command = [assembler(), f"-arch=sm_{capability}", "-v", source, "-o", machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert machine.stat().st_size, done.stderr
    assert "0 bytes spill stores" in done.stderr, "nothing of a thread's own memory is needed"


def test_programs_and_native_core_give_a_kernel_the_same_words() -> None:
    header = (NATIVE.parent / "include/ficco/gpu.hpp").read_text()
    found = re.search(r"kMostStored = (\d+);", header)
    assert found is not None and int(found[1]) == MOST_STORED + 1  # the watchdog's word


def test_raised_words_come_behind_cleared_ones_of_all_threads() -> None:
    order = re.findall(
        r"st\.relaxed\.sys|fence\.acq_rel\.sys|bar\.sync|st\.release\.sys", TEXT.read_text()
    )
    assert order == ["st.relaxed.sys", "fence.acq_rel.sys", "bar.sync", "st.release.sys"]
