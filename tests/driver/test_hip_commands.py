"""The commands on AMD devices, a process per device, on the double of AMD's library.

Tensors of the CPU pass for those of a device (torch_on_hip_double.py); all else is the product's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import DENSE, ROUTED
from double_control import environment
from test_gpu_command_lines import Line, call, check_refusal, check_trace

from ficco import operators
from ficco.plan.schedule import Schedule

SIZES = ("--m", "67", "--n", "33", "--k", "50")
RUN = (*SIZES, "--ranks", "2", "--iters", "2", "--json")


@pytest.fixture
def given(hip_folder: Path, tmp_path: Path, torch: Any) -> dict[str, str]:
    """The environment of a command: two devices, and no probes, which take a second."""
    return environment(hip_folder / "hip_double", devices=2) | {
        "COMMAND_ON": "hip", "FICCO_PROBES": "0", "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip


def served(op: str) -> list[str]:
    """Return the schedules that run: kernels wait for chunks of inputs alone, and store nowhere."""
    gathers = operators.get(op).flow.gathers
    return [
        name
        for name in Schedule.names(op)
        if Schedule.named(name).transport != "sm"
        and (gathers or Schedule.named(name).compute != "gated")
        and (op != "embedding_all_to_all" or name != "uniform_fused_2d")
    ]


@pytest.mark.parametrize("op", DENSE)
def test_every_operator_runs(given: dict[str, str], tmp_path: Path, op: str) -> None:
    line = Line(f"operator {op}", ("run", op, *RUN))
    traced = ("--trace", "trace.json") if op == "all_gather_matmul" else ()
    done = call(tmp_path, line, given, *traced)
    assert done.code == 0, done.err
    document = done.document
    assert (document["engine"], document["machine"]) == ("hip", "hip")
    assert [row["schedule"] for row in document["results"]] == served(op)
    assert all(row["ok"] for row in document["results"]), document
    if traced:
        check_trace(tmp_path / "trace.json", 2, clocks_differ_us=1e5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--schedule", "one_shot_sm"), "no kernel that stores at peers"),
        (("--schedule", "gated_1d"), "none for chunks of results"),
        (("--schedule", "auto"), "--machine mi300x8"),
        (("--schedule", "serial", "--engine", "cuda"), "--engine cuda"),
        (("--schedule", "serial", "--ranks", "3"), "--ranks 3"),
        (("--schedule", "serial", "--machine", "h200x2"), "--machine h200x2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_devices_of_amd_lack_is_refused(
    given: dict[str, str], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    line = Line("refused", ("run", "matmul_all_reduce", *RUN, *words), 2, said)
    check_refusal(line, call(tmp_path, line, given))


@pytest.mark.parametrize("op", ROUTED)
def test_experts_are_refused(given: dict[str, str], tmp_path: Path, op: str) -> None:
    words = ("run", op, *RUN, "--schedule", Schedule.names(op)[-1])
    line = Line("refused", words, 2, "no kernels for rows of experts")
    check_refusal(line, call(tmp_path, line, given))


def test_auto_predicts_from_a_profile_that_is_named(given: dict[str, str], tmp_path: Path) -> None:
    words = (*SIZES, "--ranks", "2", "--machine", "mi300x8", "--json")
    told = call(tmp_path, Line("explain", ("explain", "all_gather_matmul", *words)), given)
    line = Line("auto", ("run", "all_gather_matmul", *words, "--schedule", "auto"))
    done = call(tmp_path, line, given)
    assert told.code == done.code == 0, told.err + done.err
    (row,) = done.document["results"]
    assert row["ok"] and done.document["engine"] == "hip"
    assert row["schedule"] == told.document["choice"]["schedule"]
