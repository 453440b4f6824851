"""The CUDA engine, with all ranks in one process, on the test double of the driver.

What it computes is held against the oracle, while streams stumble, share a queue, are captured into
graphs, and while the driver refuses one call after another. GPUs' own traits need tests/gpu.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from running_workers import run_worker

WORKER = Path(__file__).with_name("engine_worker.py")
ROOT = WORKER.parents[2]
DTYPES = ["float32", "float16", "bfloat16"]

# Functions of the driver whose failure no call reports, and why.
UNREPORTED = {
    "cuGraphDestroy": "ends something",
    "cuGraphExecDestroy": "ends something",
    "cuThreadExchangeStreamCaptureMode": "constants are written once a process",
    "cuCtxCreate": "the watch's, when all else has failed",
    "cuCtxDestroy": "ends something",
    "cuDriverGetVersion": "asked once a process",
    "cuEventDestroy": "ends something",
    "cuInit": "called once a process",
    "cuFuncGetParamInfo": "launches of kernels, see test_launching.py",
    "cuFuncLoad": "launches of kernels",
    "cuFuncSetAttribute": "launches of kernels",
    "cuGetErrorName": "serves a message",
    "cuGetErrorString": "serves a message",
    "cuLaunchKernelEx": "launches of kernels",
    "cuMemFreeHost": "ends something",
    "cuStreamDestroy": "ends something",
    "cuStreamWaitValue32": "not called",
    "cuStreamWriteValue32": "not called",
    "cuModuleGetFunction": "streams store words then, and a warning says so",
    "cuModuleLoadData": "likewise",
    "cuTensorMapEncodeTiled": "launches of kernels",
}


def run(folder: Path, scenario: str, double: dict[str, Any] | None = None, **words: Any) -> str:
    """Run a scenario of the worker, on a double with these settings; return what it says."""
    given = environment(folder, **{"devices": 8, **(double or {})})
    return run_worker(WORKER, scenario, given, words)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_operator_is_right(double_folder: Path, world: int, dtype: str) -> None:
    """In sizes that each dtype draws for itself."""
    run(double_folder, "operators", worlds=[world], seeds=1, dtypes=[dtype])


WRITES = {"peer_writes": "done"}


def test_streams_may_write_to_peers(double_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator and schedule with the other kind of signals."""
    monkeypatch.setenv("FICCO_SIGNALS", "write")
    run(double_folder, "operators", WRITES, worlds=[3], seeds=1, dtypes=["bfloat16"])


def test_graphs_of_writes_give_what_calls_give(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", "write")
    run(double_folder, "graphs", WRITES, world=3, replays=20, branches=False)


@pytest.mark.parametrize(
    ("double", "asked", "kind"),
    [
        ({}, "", "copy"),
        ({"peer_writes": "done"}, "", "write"),
        ({"peer_writes": "done"}, "copy", "copy"),
        ({"peer_writes": "done", "version": 13010}, "", "copy"),
        ({"peer_writes": "lost"}, "", "copy"),
        ({"peer_writes": "done", "version": 13010}, "write", "write"),
        ({"peer_writes": "done"}, "write", "write"),
    ],
)
def test_the_kind_of_signals_follows_driver_and_user(
    double_folder: Path,
    double: dict[str, Any],
    asked: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", asked)
    run(double_folder, "signals", double, world=2, kind=kind)


@pytest.mark.parametrize(
    ("double", "asked", "said"),
    [
        ({"peer_writes": "lost"}, "write", "by calls: the signal after the data did not arrive"),
        ({"peer_writes": "refused"}, "write", "could not send: cuStreamBatchMemOp answers"),
        ({"version": 13010, "copies": "lost"}, "", "the signal after the data did not arrive"),
        ({"version": 13010, "copies": "late"}, "", "the signal arrived before its data"),
    ],
)
def test_the_probe_finds_signals_that_do_not_arrive(
    double_folder: Path,
    double: dict[str, Any],
    asked: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", asked)
    run(double_folder, "signals_refused", double, world=2, said=said)


def test_a_kind_that_does_not_arrive_is_told(double_folder: Path) -> None:
    said = run(double_folder, "signals", {"peer_writes": "lost"}, world=2, kind="copy")
    assert "signals of kind 'write' are not used" in said and "did not arrive" in said


def test_a_kind_of_signal_that_there_is_not_is_refused(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", "wrote")
    run(double_folder, "signals_unknown", world=2)


def test_eight_ranks_are_right(double_folder: Path) -> None:
    """Half of the calls, at random: tests/host runs all plans of eight ranks."""
    run(double_folder, "operators", worlds=[8], seeds=1, dtypes=["bfloat16"], calls=64)


def test_late_streams_and_copies_change_nothing(double_folder: Path) -> None:
    run(double_folder, "disturbed", world=4, calls=25)


@pytest.mark.parametrize("world", [2, 4])
def test_one_hardware_queue_is_enough(
    double_folder: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver is told to have one; what needs more is then refused."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    run(
        double_folder, "operators", {"single_queue": 1},
        worlds=[world], seeds=1, dtypes=["float32"],
    )  # fmt: skip


def test_every_rank_refuses_what_one_queue_cannot_have(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    run(double_folder, "one_queue", {"single_queue": 1})


def test_results_are_the_same_again_and_again(double_folder: Path) -> None:
    run(double_folder, "again_and_again", world=4, calls=400)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("single_queue", [0, 1])
def test_graphs_give_what_calls_give(
    double_folder: Path, single_queue: int, branches: bool
) -> None:
    queues = {"single_queue": single_queue}
    run(double_folder, "graphs", queues, world=3, replays=50, branches=branches)


@pytest.mark.parametrize("refusing", [False, True])
def test_streams_store_words_where_no_kernel_can(double_folder: Path, refusing: bool) -> None:
    said = run(double_folder, "words_without_kernel", world=3, refusing=refusing)
    warned = [line for line in said.splitlines() if "store words by themselves" in line]
    assert len(warned) == 3 * refusing and all(
        "CUDA_ERROR_INVALID_PTX" in line for line in warned
    ), said


def test_a_capture_that_loses_copies_is_refused(double_folder: Path) -> None:
    run(double_folder, "lost_copies", world=3)


def test_every_refusal_of_the_driver_is_an_error(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one kind of signals, so that none takes the other's place."""
    monkeypatch.setenv("FICCO_SIGNALS", "copy")
    header = (ROOT / "native/include/ficco/cuda_api.hpp").read_text()
    functions = set(re.findall(r"X\((cu\w+),", header))
    functions.remove("cuStreamEndCapture")  # it ends a capture even where it fails; the double not
    assert len(functions) > 30 and UNREPORTED.keys() <= functions
    said = run(double_folder, "refusals", functions=sorted(functions), world=2)
    found = json.loads(said.splitlines()[-2])  # behind what is logged
    assert set().union(*found.values()) ^ (functions - UNREPORTED.keys()) == set()
    for phase in ("made", "first call", "call", "growth", "traced", "captured", "reset"):
        assert len(found[phase]) > 7, phase


def test_a_stalled_rank_is_named(double_folder: Path) -> None:
    run(double_folder, "stalled", world=3)


ABSENT = [("matmul_all_reduce", "hetero_fused_1d"), ("all_gather_matmul", "gated_1d")]


def test_an_absent_rank_is_named(double_folder: Path) -> None:
    """Launches that wait are let go long before they give up."""
    cases = [*ABSENT, ("matmul_reduce_scatter", "gated_sums_1d")]
    run(double_folder, "absent", world=3, cases=cases, within_s=2.5, apart=False)


@pytest.mark.parametrize("told, within_s", [("8", 6.0), ("1", 4.0)])
def test_an_absent_rank_is_named_where_all_streams_wait(
    double_folder: Path, told: str, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver was not told to have one queue, the watch has to find that out."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", told)
    run(
        double_folder, "absent", {"single_queue": 1},
        world=3, cases=ABSENT, within_s=within_s, apart=True,
    )  # fmt: skip


@pytest.mark.parametrize("single_queue", [0, 1])
def test_an_absent_rank_hangs_nobody_where_copies_are_held(
    double_folder: Path, single_queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if single_queue else "8")
    run(
        double_folder, "absent_while_copies_are_held", {"single_queue": single_queue},
        world=3, within_s=5.0, apart=bool(single_queue),
    )  # fmt: skip


def test_a_way_to_wait_that_is_none_is_refused(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_WAITS", "thread")
    run(double_folder, "waits_unknown", world=2)


def test_waits_are_by_kernels_on_request(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_WAITS", "kernel")
    run(double_folder, "waits_by_kernels", world=2)


KERNELS_WAIT = {"target": "waits by kernels, all else by copies of rows"}


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("disturbed", {"world": 3, "calls": 6}),
        ("graphs", {"world": 3, "replays": 20, "branches": False}),
        ("stalled", {"world": 3}),
        ("absent", {"world": 3, "cases": ABSENT, "within_s": 2.5, "apart": False}),
        ("abandoned", {"world": 3}),
    ],
)
def test_kernels_wait_as_streams_do(
    double_folder: Path, scenario: str, words: dict[str, Any]
) -> None:
    run(double_folder, scenario, **words, **KERNELS_WAIT)


def test_a_process_ends_while_a_read_stands(double_folder: Path) -> None:
    """In a process of its own, which ends as Python does."""
    given = environment(double_folder, devices=8)
    run_worker(WORKER, "ended_while_a_read_stands", given, {"world": 2}, fresh=True)


@pytest.mark.parametrize("single_queue", [0, 1])
def test_an_absent_rank_is_named_by_kernels(double_folder: Path, single_queue: int) -> None:
    run(double_folder, "absent_from_one_launch", {"single_queue": single_queue}, world=3)


def test_a_reset_frees_what_the_watch_has_left(double_folder: Path) -> None:
    run(double_folder, "reset_at_once", world=3, rounds=8)


def test_streams_that_cannot_be_let_go_are_told_of(double_folder: Path) -> None:
    said = run(double_folder, "never_let_go", {"single_queue": 1}, world=2)
    told = re.findall("^ficco: .*", said, re.MULTILINE)
    assert len(told) == 1, said
    for pattern in (
        r"rank 1: rank 1 waited [\d.]+ s for a signal", "cannot be let go",
        "cuCtxCreate answers CUDA_ERROR_OUT_OF_MEMORY", "end them and start anew",
    ):  # fmt: skip
        assert re.search(pattern, told[0]), told[0]


def test_a_watch_that_is_refused_hangs_nobody(double_folder: Path) -> None:
    functions = ["cuMemcpyDtoHAsync", "cuStreamBatchMemOp"]
    run(double_folder, "watch_refused", functions=functions, world=2)


def test_errors_of_compute_stop_all_ranks(double_folder: Path) -> None:
    run(double_folder, "compute_fails", world=3)


def test_memory_of_a_group_that_is_not_joined_is_freed(double_folder: Path) -> None:
    run(double_folder, "no_group", world=2)


def test_the_watch_is_done_with_a_call_that_was_given_up(double_folder: Path) -> None:
    run(double_folder, "abandoned", world=3)


@pytest.mark.parametrize(
    "target",
    [
        "own",
        "rows by single copies",
        "streams store all signals",
        "kernels store from one signal on",
        "no batches",
        "waits by kernels",
        "waits by kernels, all else by copies of rows",
    ],
)
def test_what_is_submitted_is_the_program(double_folder: Path, target: str) -> None:
    """Entry by entry, on programs for several targets; every result is right."""
    run(double_folder, "entries", world=3, target=target)


def test_programs_whose_signals_are_written_are_submitted_as_they_are(
    double_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FICCO_SIGNALS", "write")
    run(double_folder, "entries", WRITES, world=2, target="own")


def test_kernels_that_load_late_stop_no_rank(double_folder: Path) -> None:
    run(double_folder, "kernels_that_load", world=3)


def test_traced_calls_have_a_timeline(double_folder: Path) -> None:
    run(double_folder, "timelines", world=3)


def test_plans_made_elsewhere_run(double_folder: Path) -> None:
    run(double_folder, "plans", world=3)


@pytest.mark.parametrize(
    "double, pattern",
    [
        ({"peers": "none"}, "no peer access from device 0 to 1, 1 to 0.*nvidia-smi topo"),
        ({"devices": 1}, "opening the devices .0, 1.: 1 devices found; use fewer ranks"),
        ({"devices": 0}, "cuInit answers CUDA_ERROR_NO_DEVICE"),
        ({"version": 11080}, "the driver has no .*CUDA.*install a newer driver"),
        ({"fail": "cuGetProcAddress:3:999"}, r"has no cu\w+ \(CUDA [0-9.]+\); install a newer"),
    ],
)
def test_what_is_missing_is_said(double_folder: Path, double: dict[str, Any], pattern: str) -> None:
    run(double_folder, "no_start", double, world=2, pattern=pattern)
