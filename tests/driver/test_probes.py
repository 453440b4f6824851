"""Probes of devices on the doubles of both vendors' drivers: they pass, or name what is wrong.

Rates are those of this machine's memory, so their verdict is not judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from hip_control import run

HERE = Path(__file__).parent
JUDGED = ("arrive", "engines", "order", "release")


def found_on(
    folder: Path, vendor: str, world: int, signals: str, **double: Any
) -> dict[str, dict[str, Any]]:
    """Return the verdicts of the probes on a double with these settings, by name."""
    if vendor == "cuda":
        pytest.importorskip("cuda.bindings")
    given = environment(folder, **{"devices": world, "peer_writes": "done", **double})
    if "single_queue" in double:
        given["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    worker = str(HERE / "probes_worker.py")
    for _ in range(3):
        said = json.loads(run(worker, vendor, str(world), signals, env=given, timeout_s=100))
        if "verdicts" in said or not said["error"].startswith(("fill", "testing")):
            break  # else this machine is busy, and the error says to try again
    assert "verdicts" in said, said
    verdicts: dict[str, dict[str, Any]] = said["verdicts"]
    assert list(verdicts) == [*JUDGED, "rates"]
    for measured in ("gbps", "small_copy_us"):
        assert len(verdicts["rates"]["numbers"][measured]) == world * (world - 1)
    return verdicts


def failed(verdicts: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name in JUDGED if not verdicts[name]["ok"]}


@pytest.mark.parametrize(("world", "signals"), [(2, "write"), (3, "copy")])
def test_cuda_passes(double_folder: Path, world: int, signals: str) -> None:
    verdicts = found_on(double_folder, "cuda", world, signals)
    assert not failed(verdicts)
    assert verdicts["order"]["numbers"]["signals"] >= 1024


@pytest.mark.parametrize(
    "mode",
    [{}, {"queues": 1}, {"queues": 4}, {"stale": 1}, {"sync_locks": 1}],
    ids=lambda mode: " ".join(f"{name} {value}" for name, value in mode.items()) or "usual",
)
def test_hip_passes_however_the_library_behaves(hip_folder: Path, mode: dict[str, Any]) -> None:
    assert not failed(found_on(hip_folder / "hip_double", "hip", 3, "copy", **mode))


@pytest.mark.parametrize(
    ("mode", "names", "words"),
    [
        ({"nocu": "dropped"}, {"arrive", "order"}, "did not arrive"),
        ({"nocu": "blit"}, {"engines"}, "copies of 4 B, by calls; 4 B, by graphs"),
        ({"nocu": "small_blit"}, {"engines"}, "16 KiB, by graphs wait for a kernel"),
        ({"copies": "late"}, {"arrive", "order"}, "did not arrive"),
        ({"copies": "lost"}, {"arrive", "order"}, "did not arrive"),
    ],
    ids=lambda each: " ".join(each.values()) if isinstance(each, dict) else None,
)
def test_each_fault_of_hip_is_named(
    hip_folder: Path, mode: dict[str, Any], names: set[str], words: str
) -> None:
    verdicts = found_on(hip_folder / "hip_double", "hip", 2, "copy", **mode)
    assert failed(verdicts) == names
    assert words in verdicts[min(names)]["found"]
    if mode == {"copies": "late"}:
        assert "arrived after the signal behind them" in verdicts["order"]["found"]
    if mode == {"nocu": "small_blit"}:
        assert "64 KiB" not in verdicts["engines"]["found"]


def test_faults_of_cuda_are_named(double_folder: Path) -> None:
    assert failed(found_on(double_folder, "cuda", 2, "copy", copies="late")) == {"arrive", "order"}
    assert failed(found_on(double_folder, "cuda", 2, "write", peer_writes="lost")) == {"order"}


def test_copies_behind_kernels_are_found_where_all_streams_share_a_queue(
    double_folder: Path,
) -> None:
    assert failed(found_on(double_folder, "cuda", 2, "copy", single_queue=1)) == {"engines"}


def first_use(hip_folder: Path, cache: Path, scenario: str, **double: Any) -> str:
    """Open a node of two AMD devices, which probes them unless the cache knows them."""
    given = environment(hip_folder / "hip_double", **{"devices": 2, **double})
    given |= {"XDG_CACHE_HOME": str(cache), "OPENBLAS_NUM_THREADS": "1"}
    return run(str(HERE / "hip_engine_worker.py"), scenario, "{}", env=given, timeout_s=60)


def test_amd_devices_are_probed_before_their_first_use_alone(
    hip_folder: Path, tmp_path: Path
) -> None:
    assert "overlaps" in first_use(hip_folder, tmp_path, "opened")
    (record,) = (tmp_path / "ficco").glob("probes-*.json")
    written = json.loads(record.read_text())
    assert written["identity"]["vendor"] == "AMD" and len(written["identity"]["devices"]) == 2
    assert all(verdict["ok"] for verdict in written["verdicts"][:4])

    written["verdicts"][1] |= {"ok": False, "found": "as this test says"}  # engines
    record.write_text(json.dumps(written))
    said = first_use(hip_folder, tmp_path, "opened")
    assert "serial: the probe 'engines' of the devices failed: as this test says" in said

    for place, name in ((0, "arrive"), (2, "order"), (3, "release")):
        other = json.loads(json.dumps(written))
        other["verdicts"][place] |= {"ok": False, "found": "as this test says"}
        record.write_text(json.dumps(other))
        said = first_use(hip_folder, tmp_path, "opened")
        assert f"refused: the probe '{name}' of the devices failed: as this test says" in said
        assert "ficco doctor --report FILE.json" in said

    written["verdicts"].pop()
    record.write_text(json.dumps(written))  # it is measured again
    assert "overlaps" in first_use(hip_folder, tmp_path, "opened")
    assert json.loads(record.read_text())["verdicts"][0]["ok"]


def test_small_copies_by_kernels_make_auto_serial(hip_folder: Path, tmp_path: Path) -> None:
    said = first_use(hip_folder, tmp_path, "opened", nocu="small_blit")
    assert "serial: the probe 'engines'" in said and "no copy engine" in said


def test_probes_may_be_declined(
    hip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "FICCO_PROBES", "0")
    assert "overlaps" in first_use(hip_folder, tmp_path, "opened", nocu="small_blit")
    assert not list(tmp_path.rglob("probes-*.json"))
    monkeypatch.setitem(os.environ, "FICCO_PROBES", "no")
    assert "refused: FICCO_PROBES='no'" in first_use(hip_folder, tmp_path, "opened")


def test_ranks_that_share_or_hide_devices_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from ficco.runtime.trusted_gpus import _answer  # the test's own reach inside

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = [0, 2, 0], [0, 3, 0]
    kind, why = _answer([(first, 0), (second, 1), (first, 0)], "copy")
    assert kind == "serial" and "ranks share a device" in why
    kind, why = _answer([(first, 0), (second, 0)], "copy")
    assert kind == "serial" and "let every process see all devices" in why
    kind, why = _answer([(first, 0), (second, 1)], "copy")  # there is no library here
    assert kind == "serial" and "cannot be probed" in why
    monkeypatch.setenv("FICCO_PROBES", "0")
    assert _answer([(first, 0), (second, 1)], "copy") == ("declined", "")
    monkeypatch.setenv("FICCO_PROBES", "2")
    kind, why = _answer([(first, 0), (second, 1)], "copy")
    assert kind == "input" and "FICCO_PROBES='2'" in why
