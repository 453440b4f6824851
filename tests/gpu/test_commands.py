"""The commands on GPUs, as a person or a script calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ficco.schedule import Schedule

ODD = ["--m", "1003", "--n", "517", "--k", "1031", "--iters", "2"]
COMMAND = [sys.executable, "-P", "-m", "ficco"]


def call(
    folder: Path, *args: str, command: list[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder of its own; leave none of its processes behind."""
    calm = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with subprocess.Popen(
        [*(command or COMMAND), *args], env=os.environ | calm | environment, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as started:  # fmt: skip
        try:
            out, err = started.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, 9)  # the ranks are of its session
            out, err = started.communicate()
            pytest.fail(f"{args} did not end: {out[-2000:]} {err[-4000:]}")
    return subprocess.CompletedProcess(args, started.returncode, out, err)


def test_auto_takes_what_is_predicted(gpus: int, tmp_path: Path) -> None:
    """On a GPU that has a shipped profile; elsewhere the error says how to make one."""
    sizes = ["--m", "16384", "--n", "4096", "--k", "8192", "--ranks", "2", "--iters", "2"]
    done = call(tmp_path, "run", *sizes, "--schedule", "auto", "--json")
    if "no profile of" in done.stderr:
        assert done.returncode == 2 and "doctor --profile" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["ok"] and "auto: " in done.stderr
    told = json.loads(
        call(tmp_path, "explain", *sizes[:-2], "--regime", "synchronized", "--json").stdout
    )
    assert (row["schedule"], row["grain"]) == (told["choice"]["schedule"], told["choice"]["grain"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_every_schedule_is_right(gpus: int, tmp_path: Path, op: str, dtype: str) -> None:
    trace = tmp_path / "trace.json"
    done = call(tmp_path, "run", op, *ODD, "--dtype", dtype, "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        "op", "m", "n", "k", "ranks", "dtype", "engine", "machine", "paced", "link_gbps", "results",
        "simulated",
    }  # fmt: skip
    assert (document["engine"], document["machine"]) == ("cuda", "cuda")
    assert (document["paced"], document["link_gbps"]) == (False, None)
    assert document["ranks"] == min(gpus, 8) and document["dtype"] == dtype
    rows = {row["schedule"]: row for row in document["results"]}
    assert list(rows) == [n for n in Schedule.names(op) if Schedule.named(n).transport != "sm"]
    for name, row in rows.items():
        assert row["ok"], row
        assert row["overlap_ms"] > 0 and row["ideal_ms"] > 0 and row["serial_ms"] > 0
        assert (row["copies"] > 0) == (row["bytes"] > 0) == (name != "serial")
    assert "PACED" not in done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(min(gpus, 8)))
    assert {"gemm", "copy"} <= {event["cat"] for event in slices}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    # one clock: ranks were in the call together
    starts = {rank: min(e["ts"] for e in slices if e["pid"] == rank) for rank in range(2)}
    ends = {rank: max(e["ts"] + e["dur"] for e in slices if e["pid"] == rank) for rank in range(2)}
    assert starts[0] < ends[1] and starts[1] < ends[0]


@pytest.mark.parametrize(
    ("op", "more"),
    [
        ("matmul_all_reduce", []),
        ("all_to_all_matmul", ["--splits", "0,900;301,2"]),
        ("matmul_all_to_all", ["--splits", "0,900;0,0"]),
        ("embedding_all_to_all", []),
        ("all_gather_matmul", ["--rows", "0,1003"]),
        ("matmul_reduce_scatter", ["--rows", "1003,0"]),
    ],
)
def test_every_operator_on_two_gpus(gpus: int, tmp_path: Path, op: str, more: list[str]) -> None:
    done = call(tmp_path, "run", op, *ODD, *more, "--engine", "cuda", "--ranks", "2", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ranks"] == 2 and all(row["ok"] for row in document["results"])


def test_the_default_job(gpus: int, tmp_path: Path) -> None:
    done = call(tmp_path, "run", "--iters", "2")
    assert done.returncode == 0, done.stderr
    assert "m=8192 n=8192 k=8192" in done.stdout and "bfloat16" in done.stdout
    assert "engine cuda" in done.stdout and "WRONG" not in done.stdout
    assert done.stdout.count(" right") == 7


def test_one_gpu_and_serial_alone(gpus: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = call(tmp_path, "run", *ODD, "--engine", "cuda", "--ranks", "1", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["ranks"] == 1, done.stderr
    done = call(tmp_path, "run", *ODD, "--schedule", "serial", "--trace", str(trace))
    assert done.returncode == 0 and "has no timeline" in done.stdout, done.stderr
    assert json.loads(trace.read_text())["traceEvents"] == []


def test_under_torchrun(gpus: int, tmp_path: Path) -> None:
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    sizes = [word.upper() if word in ("--m", "--n", "--k") else word for word in ODD]
    done = call(
        tmp_path, "-m", "ficco", "run", *sizes, "--json", command=launcher,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ranks"], document["engine"]) == (2, "cuda")
    assert all(row["ok"] for row in document["results"])


@pytest.mark.parametrize(
    ("args", "environment", "code", "words"),
    [
        (["--ranks", "60"], {}, 2, "--ranks 60: there are"),
        (["--schedule", "one_shot_sm"], {}, 2, "shots='two', as gather_sm"),
        (["--compute", "numpy"], {}, 2, "--compute numpy"),
        (["--engine", "cuda"], {"CUDA_LAUNCH_BLOCKING": "1"}, 1, "CUDA_LAUNCH_BLOCKING is set"),
        (["--engine", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, 2, "--engine cuda"),
        (["--n", "4000000", "--k", "4000000"], {}, 2, "not enough memory"),
    ],
)
def test_what_cannot_be_is_told(
    gpus: int, tmp_path: Path, args: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    done = call(tmp_path, "run", *ODD, *args, **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and words in done.stderr and "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr.count(words) == 1


def test_the_host_engine_runs_beside_gpus(gpus: int, tmp_path: Path) -> None:
    done = call(tmp_path, "run", "--iters", "1", "--machine", "host", "--json")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["engine"], json.loads(done.stdout)["m"]) == ("host", 1024)


def test_the_doctor_sees_them(gpus: int, tmp_path: Path) -> None:
    done = call(tmp_path, "doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0 and found["CUDA driver"]["ok"]
    assert found["peer access"]["ok"] and found["torch on GPUs"]["ok"]
    assert all(found[f"GPU {device}"]["ok"] for device in range(gpus))
