"""Which calls need multiprocessors, on the test double, whose kernels and local copies do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from double_control import Cuda, on_double

from ficco._native import DriverCalls, GpuError
from ficco.cli import doctor
from ficco.core.errors import EngineError
from ficco.engine import cuda, probe_bench
from ficco.kernels.probe_code import PTX
from ficco.measure.profiling.gpu import multiprocessor_use
from ficco.measure.profiling.gpu.multiprocessor_use import CONTROL, Use, probe

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from test_copy_engines import EXPECTED


@on_double(devices=2, timeout_s=60, peer_writes="done")
def test_local_copies_and_kernels_wait_and_all_else_ends(cuda: Cuda) -> None:
    found = probe(0, 1)
    assert list(found) == list(EXPECTED), found
    for name, use in found.items():
        waits = "within the device" in name or name == CONTROL
        assert EXPECTED[name] == Use(waits, waits), name
        assert use == Use(waits, waits), f"{name}: {use}"
    assert sum("peer" in name for name in found) == 6
    # Nothing is left behind, and the device works on.
    word = cuda.words(1)
    cuda.cuMemsetD32(word, 7, 1)
    assert cuda.read(word, 1) == [7]


@on_double(devices=1, timeout_s=60)
def test_one_device_has_no_peer(cuda: Cuda) -> None:
    found = probe(0)
    assert CONTROL in found and not any("peer" in name for name in found), found


@on_double(devices=2, timeout_s=60, peers="none")
def test_a_peer_that_is_not_reached_is_told(cuda: Cuda) -> None:
    try:
        probe(0, 1)
    except EngineError as error:
        assert "no peer access from device 0 to 1" in str(error), error
    else:
        raise AssertionError("nothing was refused")


def test_access_in_one_direction_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    peers: list[int | None] = []
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(multiprocessor_use, "probe", lambda gpu, peer: peers.append(peer) or {})
    monkeypatch.setattr(cuda, "capabilities", lambda gpu: SimpleNamespace(peers=(gpu == 0, True)))
    doctor._multiprocessor_use()
    monkeypatch.setattr(cuda, "capabilities", lambda gpu: SimpleNamespace(peers=(True, True)))
    doctor._multiprocessor_use()
    assert peers == [None, 1]


@on_double(devices=1, timeout_s=60)
def test_a_measurement_that_holds_nothing_is_refused(cuda: Cuda) -> None:
    """As many blocks as half of the slots take leave room for the control."""
    launch = probe_bench.launch

    def half(calls: DriverCalls, kernel: probe_bench.Ran, *rest: Any) -> None:
        launch(calls, kernel._replace(blocks=max(kernel.blocks // 2, 1)), *rest)

    probe_bench.launch = half
    probe_bench._FILLS_S = 0.3
    try:
        probe(0)
    except EngineError as error:
        assert "264 of 528 blocks run" in str(error), error
    else:
        raise AssertionError("half of the slots passed for all")


@on_double(devices=1, timeout_s=60)
def test_a_kernel_that_ends_too_early_is_told(cuda: Cuda) -> None:
    probe_bench._HOLDS_S = 1e-3
    try:
        probe(0)
    except EngineError as error:
        assert "reached its time limit" in str(error), error
    else:
        raise AssertionError("what ended early passed for held")


@on_double(devices=1, timeout_s=60)
def test_a_refusal_lets_the_device_go(cuda: Cuda) -> None:
    import double_control

    double_control.fail_call("cuStreamQuery", 719, skip=6)
    try:
        probe(0)
    except GpuError as error:
        assert "cuStreamQuery" in str(error) and "LAUNCH_FAILED" in str(error), error
    else:
        raise AssertionError("a refusal was not told")
    assert probe(0)[CONTROL] == Use(True, True)


def test_the_text_is_what_the_double_knows() -> None:
    assert "ficco_hold(.param .u64 begun, .param .u64 go, .param .u64 limit_ns)" in PTX
    compare = ".param .u64 data, .param .u64 count, .param .u64 value, .param .u64 wrong"
    assert f"ficco_compare_words({compare})" in PTX
    assert "%globaltimer" in PTX and "ld.volatile.global.u32" in PTX and PTX.isascii()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_text_is_assembled(tmp_path: Path, target: str) -> None:
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "hold.ptx").write_text(PTX)
    done = subprocess.run(
        [ptxas, "-v", f"-arch={target}", tmp_path / "hold.ptx", "-o", tmp_path / "hold.cubin"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(used) == 3 and max(used) <= 65536 // 2048, "two full blocks would not fit"


if __name__ == "__main__":
    globals()[sys.argv[1]](Cuda())
