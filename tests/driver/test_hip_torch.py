"""The functions on tensors of AMD devices, a process per device, on the double of AMD's library.

Tensors of the CPU pass for those of a device (torch_on_hip_double.py). Windows, handles, probes,
captures and failures are the product's own. What each rank holds true is in hip_torch_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_torch

WORKER = Path(__file__).with_name("hip_torch_worker.py")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test, and no probes unless a test wants them: they take a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FICCO_PROBES", "0")
    monkeypatch.setattr(test_torch, "WORKER", WORKER)
    return tmp_path / "cache"


CHECKS = [
    *((check, world) for check in ("functions", "gradients") for world in (1, 2, 3)),
    *(("predicted", world) for world in (2, 3)),
    *((check, 3) for check in ("captures", "failures", "refused_by_driver", "at_random", "death")),
]


@pytest.mark.parametrize(("check", "world"), CHECKS)
def test_ranks_are_right(hip_folder: Path, tmp_path: Path, check: str, world: int) -> None:
    """Functions, gradients and predictions; graphs, ranks that fail or die, calls at random."""
    test_torch.run(hip_folder / "hip_double", tmp_path, world, check)


def test_devices_are_probed_and_auto_is_serial_where_kernels_copy(
    hip_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_PROBES", "1")
    test_torch.run(
        hip_folder / "hip_double", tmp_path, 2, "serial_without_trust", nocu="small_blit"
    )
    assert len(list(cache.rglob("probes-*.json"))) == 1


def test_copies_to_windows_are_probed_too(
    hip_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_PROBES", "1")
    double = hip_folder / "hip_double"
    test_torch.run(double, tmp_path, 2, "windows_by_kernels", opened="local")
    (record,) = cache.rglob("probes-*.json")
    assert '"ok": false' not in record.read_text().partition('"rates"')[0]


def test_devices_that_lose_copies_are_refused(hip_folder: Path, tmp_path: Path) -> None:
    test_torch.run(hip_folder / "hip_double", tmp_path, 2, "refused_devices", nocu="dropped")
