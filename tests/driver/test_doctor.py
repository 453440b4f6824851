"""`ficco doctor` on the test double of the driver: what it says of GPUs, in a new process each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import double_control as control

from ficco.cli.findings import Finding, verdict

Findings = dict[str, dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = "import sys; from ficco.cli.main import main; sys.exit(main(['doctor', '--json']))"
NO_TORCH = "import sys; sys.modules['torch'] = None; "  # to import it takes longer than the rest


HOLDING = DOCTOR.replace("'--json'", "'--json', '--hold-multiprocessors'")


def doctor(
    folder: Path, environment: dict[str, str] | None = None, torch: bool = False, **double: object
) -> Findings:
    """Return what the doctor found, by name; it must find that ficco runs here."""
    given = control.environment(folder, **double) | (environment or {})
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if name not in (environment or {}):
            given.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", DOCTOR if torch else NO_TORCH + DOCTOR],
        env=given, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"ok", "verdict", "findings"} and document["ok"]
    for finding in document["findings"]:
        assert set(finding) == {"name", "ok", "found", "serves", "do"}
    return {finding["name"]: finding for finding in document["findings"]}


def test_a_report_has_what_probes_measured(double_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    words = f"'--json', '--report', {str(target)!r}"
    environment = control.environment(double_folder, devices=2) | {"CUDA_LAUNCH_BLOCKING": "0"}
    command = [sys.executable, "-P", "-c", NO_TORCH + DOCTOR.replace("'--json'", words)]

    def told() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    done = told()
    assert done.returncode == 0, done.stderr
    names = [finding["name"] for finding in json.loads(done.stdout)["findings"]]
    probes = ["arrive", "engines", "order", "release", "rates"]
    assert [name for name in names if "probe" in name] == [f"NVIDIA probe: {p}" for p in probes]
    report = json.loads(target.read_text())
    assert report["format"] == 1 and report["variables"]["CUDA_LAUNCH_BLOCKING"] == "0"
    assert [finding["name"] for finding in report["findings"]] == names
    (record,) = report["probes"]
    assert record["identity"]["vendor"] == "NVIDIA" and record["identity"]["driver"] == "13.0"
    assert [verdict["name"] for verdict in record["verdicts"]] == probes
    assert set(record["verdicts"][4]["numbers"]["gbps"]) == {"0 to 1", "1 to 0"}
    again = told()
    assert again.returncode != 0 and "the file exists" in again.stderr


def gpus_of(found: Findings) -> list[dict[str, Any]]:
    return [finding for name, finding in found.items() if name.startswith("GPU ")]


def test_four_devices_are_shown(double_folder: Path) -> None:
    found = doctor(double_folder, devices=4, version=13000)
    driver = found["CUDA driver"]
    assert driver["ok"] and driver["found"] == "CUDA 13.0, 4 devices"
    assert "does not run" not in driver["serves"] and "`ficco run`" in driver["serves"]
    assert [name for name in found if name.startswith("GPU ")] == [f"GPU {i}" for i in range(4)]
    for gpu in gpus_of(found):
        for words in (
            "ficco test double", "compute capability 9.0", "3 copy engines",
            "flush of remote writes: no", "batch copies:",
        ):  # fmt: skip
            assert gpu["ok"] and words in gpu["found"]
    assert found["peer access"]["ok"] and found["CUDA settings"]["ok"]
    assert found["signals"]["ok"] and found["signals"]["found"].startswith("by copies of 4 bytes")
    assert {"CuPy", "cuda-bindings"} <= set(found)
    assert "has never run" in found["HIP runtime"]["serves"]


def test_signals_that_do_not_arrive_are_told(double_folder: Path) -> None:
    found = doctor(double_folder, devices=2, version=13010, copies="lost")["signals"]
    assert not found["ok"] and "signals do not reach all GPUs" in found["found"]
    assert "nvidia-smi topo" in found["do"]


def test_pairs_without_peer_access_are_listed(double_folder: Path) -> None:
    found = doctor(double_folder, devices=3, peers="none")
    assert len(gpus_of(found)) == 3
    assert not found["peer access"]["ok"]
    assert found["peer access"]["found"] == "not between 0-1, 0-2, 1-2"
    assert "torch.distributed" in found["peer access"]["do"]


def test_what_auto_chooses_by_is_told(double_folder: Path, tmp_path: Path) -> None:
    found = doctor(double_folder, devices=2)["profile, 2 GPUs"]
    assert not found["ok"] and "ficco test double with 2 devices" in found["found"]
    assert "ficco doctor --profile" in found["do"] and "FICCO_MACHINE" in found["do"]
    mine = (ROOT / "schedules" / "machines" / "h200x2.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(mine.replace('"NVIDIA H200"', '"ficco test double"'))
    given = {"FICCO_MACHINE": str(path)}
    found = doctor(double_folder, given, devices=2, version=13000)["profile, 2 GPUs"]
    assert found["ok"] and "h200x2, measured 2026" in found["found"] and not found["do"]
    assert (
        "tuning table h200x2: " in found["found"] and "shapes and execution modes" in found["found"]
    )
    found = doctor(double_folder, given, devices=2, version=12090)["profile, 2 GPUs"]
    assert found["ok"] and "measured with driver 13.0, this is 12.9" in found["found"]
    assert "ficco sweep" in found["do"]
    both = doctor(double_folder, given, devices=4)
    assert both["profile, 2 GPUs"]["ok"]
    found = both["profile, 4 GPUs"]
    assert not found["ok"] and "it has 2 devices, the group has 4" in found["found"]
    assert "ficco doctor --profile" in found["do"]
    found = doctor(double_folder, given | {"FICCO_BOOK": "none"}, devices=2)["profile, 2 GPUs"]
    assert not found["ok"] and "none" in found["found"] and "FICCO_BOOK" in found["do"]
    for devices, sizes in ((1, []), (3, [2, 3]), (8, [2, 4, 8]), (9, [2, 4, 8])):
        names = [name for name in doctor(double_folder, devices=devices) if "profile" in name]
        assert names == [f"profile, {size} GPUs" for size in sizes]


def test_a_driver_that_is_too_old_is_told(double_folder: Path) -> None:
    found = doctor(double_folder, version=11000)
    driver = found["CUDA driver"]
    assert not driver["ok"] and not gpus_of(found) and "peer access" not in found
    assert driver["found"].startswith("too old: ") and len(driver["found"]) < 200
    assert driver["do"] == "install a driver of CUDA 12.0 or newer"


def test_no_device_and_one(double_folder: Path) -> None:
    found = doctor(double_folder, devices=0)
    assert not found["CUDA driver"]["ok"] and not gpus_of(found)
    found = doctor(double_folder, devices=1)
    assert found["CUDA driver"]["found"].endswith("1 devices") and len(gpus_of(found)) == 1
    assert "peer access" not in found


def test_settings_that_matter_are_told(double_folder: Path) -> None:
    found = doctor(double_folder, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})["CUDA settings"]
    assert found["ok"] and "to release a stuck stream" in found["do"]
    found = doctor(double_folder, {"CUDA_LAUNCH_BLOCKING": "1"})["CUDA settings"]
    assert not found["ok"] and "fall back to torch.distributed" in found["do"]


def test_a_device_that_refuses_is_told(double_folder: Path) -> None:
    found = doctor(double_folder, devices=2, fail="cuDeviceGetName:1:101")
    first, second = gpus_of(found)
    assert first["ok"] and not second["ok"]
    assert "cuDeviceGetName" in second["found"]


def _held(folder: Path, **double: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", NO_TORCH + HOLDING], env=control.environment(folder, **double),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["findings"]
    return [finding for finding in found if finding["name"] == "multiprocessors"]


def test_which_calls_need_multiprocessors_is_told_on_request(double_folder: Path) -> None:
    assert "multiprocessors" not in doctor(double_folder, devices=2)
    none, needed = _held(double_folder, devices=2)
    assert none["ok"] and none["found"].startswith("none needed by: copy to a peer, 4 B; ")
    assert "memset, 4 B" in none["found"] and "within" not in none["found"]
    assert needed["ok"] and needed["found"].startswith("needed by: copy within the device, 4 B; ")
    assert needed["found"].endswith("; kernel of one thread")
    none, needed = _held(double_folder, devices=2, peers="none")
    assert none["found"].startswith("none needed by: write of a word; ")
    # The device's own two kernels are loaded first.
    (told,) = _held(double_folder, devices=1, fail="cuModuleLoadData:2:218")
    assert not told["ok"] and "cuModuleLoadData" in told["found"]
    (told,) = _held(double_folder, devices=0)
    assert not told["ok"]


def test_pytorch_without_cuda_is_told(double_folder: Path, torch: Any) -> None:
    found = doctor(double_folder, torch=True)["torch on GPUs"]
    if torch.version.cuda is None:
        assert not found["ok"] and "without CUDA" in found["found"] and found["do"]
    else:
        assert f"CUDA {torch.version.cuda}" in found["found"]


def test_a_run_on_gpus_that_do_not_reach_each_other(double_folder: Path) -> None:
    for more, code, words in (
        ({"peers": "none"}, 1, "0-1, 0-2, 0-3"),
        ({"version": 11000}, 2, "too old"),
        ({"devices": 0}, 2, "no"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ficco", "run", "--engine", "cuda"],
            env=control.environment(double_folder, **more), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_the_verdict_of_doctor() -> None:
    here = [Finding("platform", True, "Linux", "everything")]
    gpus = [Finding(f"GPU {i}", True, "H100", "a rank") for i in range(2)]
    profile = Finding("profile, 2 GPUs", True, "h100x2", "auto")
    lost = Finding("signals", False, "they are lost", "groups", "look at the links")
    windows = Finding("platform", False, "Windows", "everything", "use Linux")
    for findings, words in (
        ([windows, *gpus], "ficco cannot run here: platform: Windows; use Linux"),
        (here, "ficco runs on the CPUs of this machine; it finds no GPU"),
        ([*here, gpus[0], profile._replace(ok=False)], "nothing to overlap on one GPU"),
        ([*here, *gpus, lost], "nothing overlaps on these 2 GPUs: signals: they are lost; look at"),
        ([*here, *gpus, profile], "ficco overlaps on these 2 GPUs, and `auto` chooses"),
        ([*here, *gpus, profile._replace(ok=False)], "`auto` cannot choose for them: profile, 2 G"),
        (
            [*here, Finding("AMD device 0", True, "MI300X", "a rank")],
            "on AMD GPUs it has never run",
        ),
    ):
        assert words in verdict(findings), findings
