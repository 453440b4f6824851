"""The checks of tests/gpu, without a GPU: their table, their scenarios, and what runs them.

Scenarios run on the test double of the driver, or on the CPU, for smaller numbers of calls. Those
that need a profiler, CuPy or NCCL are held by their parameters and their plans alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from double_control import environment
from forking import Forked, ended, run_forked

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from checks import A_RANK_A_GPU, CHECKS, MOST, Check, Stage, left_out
from pool import SERVE, Group, Pool, key_of

from ficco.core.dtypes import DTYPES
from ficco.operators import OPERATORS

SCRIPT = Path(__file__).with_name("gpu_checks_on_double.py")
LIMIT_S = 200
_FAULTS = {"timeout_s": 6.0, "late_s": 4.0}  # a rank may be slow where many processes run
SCENARIOS: list[tuple[str, dict[str, Any]]] = [
    ("fuzz", {"calls": 20}), ("replay", {"replays": 10}), ("few_rows", {"calls": 4}),
    ("capture_rules", {}), ("functions", {}),
    ("faults", _FAULTS), ("faults", {**_FAULTS, "few_rows": True}), ("aside", {}),
    ("tuned", {}), ("random", {"seed": 1, "calls": 40}),
]  # fmt: skip


def operators(world: int, count: int) -> list[Any]:
    """Return operators, each in the dtype whose turn it is."""
    dtypes = tuple(DTYPES)
    return [
        pytest.param(
            world, "operators", {"op": op, "dtype": dtypes[(world + i) % len(dtypes)]},
            id=f"{op}-{world} ranks",
        )
        for i, op in enumerate(OPERATORS[:count])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "scenario", "words"),
    [
        *operators(2, len(OPERATORS)),
        *operators(3, 3),
        *(
            pytest.param(2, name, words, id=f"{name} of few rows" if "few_rows" in words else name)
            for name, words in SCENARIOS
        ),
    ],
)
@pytest.mark.timeout(LIMIT_S + 60)
def test_scenarios_run(
    double_folder: Path, tmp_path: Path, torch: Any, world: int, scenario: str,
    words: dict[str, Any],
) -> None:  # fmt: skip
    given = environment(double_folder, devices=world, version=13000) | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    logs = [(tmp_path / f"rank{rank}.txt").open("w") for rank in range(world)]
    ranks = [
        Forked(
            [SCRIPT, "double", tmp_path / "store", rank, world, json.dumps([[scenario, words]])],
            log, subprocess.STDOUT, given,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    codes = ended(ranks, LIMIT_S)
    texts = [Path(log.name).read_text() for log in logs]
    for log in logs:
        log.close()
    said = "".join(f"---- rank {i}\n{text[-3000:]}" for i, text in enumerate(texts))
    assert codes == [0] * world, said
    for text in texts:
        made = [line for line in text.splitlines() if line.startswith(f"{scenario} {{")]
        assert made == [f"{scenario} {words}"], said


@pytest.mark.timeout(LIMIT_S + 60)
def test_ranks_serve_on_the_cpu(
    tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that tests/gpu starts, with gloo and the host engine."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = Group(2, tmp_path, {}, (sys.executable, "-P", str(SERVE), "cpu"))
    try:
        for scenario, words, right in (
            ("measured", {}, True), ("shards", {}, True), ("tuned", {}, True),
            ("functions", {"fallback": True}, False),
        ):  # fmt: skip
            ran = found.check(Check(scenario, scenario), words, LIMIT_S)
            assert bool(ran.wrong) != right, ran.wrong
        assert "---- rank 1: failed" in ran.wrong and "serve.py" in ran.wrong, ran.wrong
    finally:
        found.leave()


def test_words_fit_their_scenarios_and_calls_can_be_planned(tmp_path: Path, torch: Any) -> None:
    code, said = run_forked(SCRIPT, "table", folder=tmp_path, environment={}, timeout=200)
    assert code == 0 and said.startswith(f"{len(CHECKS)} checks, "), said


def test_the_table_has_all_that_is_promised() -> None:
    """Every operator in every dtype on a rank a GPU, and on 3 to 5 and 6 to 8 ranks."""
    assert len({check.id for check in CHECKS}) == len(CHECKS)
    made = {
        (check.words["op"], check.words["dtype"], check.world)
        for check in CHECKS
        if check.scenario == "operators" and not check.environment
    }
    for op in OPERATORS:
        assert {world for o, _, world in made if o == op} == {A_RANK_A_GPU, *range(1, MOST + 1)}
        for worlds in ((A_RANK_A_GPU,), (3, 4, 5), (6, 7, 8)):
            assert {d for o, d, world in made if o == op and world in worlds} == set(DTYPES)
    quick = [check for check in CHECKS if check.quick]
    assert {c.words["op"] for c in quick if c.scenario == "operators"} == set(OPERATORS)
    assert {"faults", "replay", "few_rows", "capture_rules", "captured"} <= {
        check.scenario for check in quick
    }
    # Kernels of many sizes are compiled; calls that are repeated are beside others.
    long = {"random", "models", "device_kernels", "tables", "pooling_at_random"}
    for check in CHECKS:
        is_long = check.scenario in long or check.stage == Stage.REPEATED
        assert check.limit_s <= (180 if is_long else 90), check.id
    for check in CHECKS:
        assert not check.ends or check.fresh, f"{check.id}: others would have no ranks"


# Speaks the protocol of serve.py, without PyTorch: what a scenario's name says happens.
SERVER = """
import faulthandler, json, os, signal, sys, time
faulthandler.register(signal.SIGUSR1)
store, rank, world, replies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def reply(right):
    os.write(replies, (json.dumps(right) + "\\n").encode())
reply(True)
for line in sys.stdin:
    order = json.loads(line)
    name, last = order["scenario"], rank == world - 1
    print(name, order["words"], flush=True)
    if name == "hangs" and last:
        time.sleep(600)
    if name == "ends":
        print("right", flush=True)
        os._exit(0)
    if name == "dies" and last:
        os._exit(7)
    if name == "slow":
        time.sleep(0.3)
    reply(name != "fails" or not last)
"""
COMMAND = (sys.executable, "-c", SERVER)


def group(folder: Path, world: int = 2) -> Group:
    return Group(world, folder, {}, COMMAND)


def test_a_group_makes_one_check_after_another(tmp_path: Path) -> None:
    found = group(tmp_path)
    for turn in range(3):
        ran = found.check(Check("right", "right"), {"turn": turn}, 20)
        assert not ran.wrong and found.usable
    found.leave()
    assert not found.usable
    assert "right {'turn': 2}" in (tmp_path / "rank1.txt").read_text()


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("fails", "rank 1: failed"),
        ("dies", "rank 1: its process ended with exit code 7"),
        ("hangs", "rank 1: not done after 1 s"),
    ],
)
def test_what_goes_wrong_is_told_by_rank(tmp_path: Path, scenario: str, words: str) -> None:
    found, begin = group(tmp_path), time.monotonic()
    assert not found.check(Check("first", "right"), {}, 20).wrong
    ran = found.check(Check("second", scenario), {}, 1 if scenario == "hangs" else 20)
    assert words in ran.wrong and "check second-a rank a GPU, 2 ranks" in ran.wrong, ran.wrong
    assert "rank 0: right" in ran.wrong and not found.usable
    assert scenario != "hangs" or "most recent call first" in ran.wrong, ran.wrong  # its stack
    assert time.monotonic() - begin < 30


def test_a_check_may_end_its_processes(tmp_path: Path) -> None:
    found = group(tmp_path)
    assert not found.check(Check("last", "ends", ends=True), {}, 20).wrong
    assert not found.usable


def test_a_pool_runs_all_checks_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group.__init__, "__defaults__", (COMMAND,))
    checks = [
        *(Check(f"slow {i}", "slow", world=2 + i % 2) for i in range(9)),
        Check("fails", "fails", world=2), Check("behind", "right", world=2),
        Check("sleeping", "right", stage=Stage.SLEEPING),
        Check("ends", "ends", ends=True, fresh=True, stage=Stage.SLEEPING),
        Check("repeated", "right", words={"calls": 5}, repeats="calls", stage=Stage.REPEATED),
        Check("alone", "right", stage=Stage.ALONE),
    ]  # fmt: skip
    pool = Pool(checks, 2, tmp_path, 50, lanes=3)
    try:
        found = {check.name: pool.result(check) for check in checks}
    finally:
        pool.close()
    assert [name for name, ran in found.items() if ran.wrong] == ["fails"], found
    said = "".join(path.read_text() for path in tmp_path.glob("*/rank0.txt"))
    assert "right {'calls': 50}" in said


def test_a_pool_that_is_closed_early_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group.__init__, "__defaults__", (COMMAND,))
    checks = [Check(f"slow {i}", "slow", world=2 + i) for i in range(6)]
    pool = Pool(checks, 2, tmp_path, None, lanes=2)
    assert not pool.result(checks[0]).wrong
    pool.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for child in children:
        assert str(tmp_path) not in Path(f"/proc/{child}/cmdline").read_text(), child


def test_on_two_gpus_nothing_but_repetitions_is_left_out() -> None:
    out = {check.id: left_out(check, 2) for check in CHECKS if left_out(check, 2)}
    assert "models-4 ranks" in out and "models-2 ranks" not in out
    assert len(out) == 1 + len(OPERATORS), out
    assert all("2 ranks" in name for name in out if name.startswith("operators")), out
    assert not [check.id for check in CHECKS if check.quick and left_out(check, 2)]


def test_checks_of_a_rank_a_gpu_share_processes_with_as_many_ranks() -> None:
    one, two = Check("one", "right"), Check("two", "right", world=2)
    assert key_of(one, 2) == key_of(two, 2) != key_of(one, 4)
    assert key_of(one._replace(fresh=True), 2) != key_of(one, 2)
