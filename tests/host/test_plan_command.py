"""`ficco plan`: printing plans and programs, and proving them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calling import call

from ficco.plan.schedule import Schedule

SMALL = ["--m", "67", "--n", "29", "--k", "31"]


def test_it_prints_every_rank(capsys: Any) -> None:
    code, out, _ = call(capsys, "plan", "all_gather_matmul", "--schedule", "gated_1d")
    assert code == 0
    for words in ("rank 0", "rank 3", "lane push1", "lane compute", "window", "parts"):
        assert words in out
    code, out, _ = call(capsys, "plan", "--rank", "2")
    assert "rank 2" in out and "\nrank 1" not in out


def test_a_grain_of_world_is_as_many_chunks_as_ranks(capsys: Any) -> None:
    words = ("plan", "--ranks", "4", "--schedule", "hetero_unfused_1d")
    as_number = call(capsys, *words, "--grain", "4")
    assert as_number[0] == 0 and "grain=4" in as_number[1]
    assert call(capsys, *words, "--grain", "world") == as_number


@pytest.mark.parametrize("name", Schedule.names())
def test_what_it_prints_as_json_checks(capsys: Any, tmp_path: Path, name: str) -> None:
    code, out, _ = call(capsys, "plan", *SMALL[:6], "--schedule", name, "--json")
    file = tmp_path / "plan.json"
    file.write_text(out)
    assert code == 0
    code, out, _ = call(capsys, "plan", "--check", str(file))
    assert code == 0 and out.startswith("right:") and out.count("\n") == 1


@pytest.mark.parametrize("more", [["--m", "64"], ["matmul_all_reduce"], ["--grain", "2"]])
def test_a_file_is_checked_alone(capsys: Any, tmp_path: Path, more: list[str]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(call(capsys, "plan", *SMALL[:6], "--json")[1])
    code, out, err = call(capsys, "plan", *more, "--check", str(file))
    assert code == 2 and out == "" and f"{more[-1]} with --check" in err


def test_a_rejected_plan_is_exit_1_with_a_line_a_violation(capsys: Any, tmp_path: Path) -> None:
    _, out, _ = call(capsys, "plan", *SMALL[:6], "--json")
    plan = json.loads(out)
    steps = plan["ranks"][1]["steps"]
    steps[:] = [step for step in steps if step["id"] != "wait.step2"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    code, out, err = call(capsys, "plan", "--check", str(file))
    assert code == 1 and err == ""
    assert all(line.startswith("rank ") for line in out.splitlines())
    code, out, _ = call(capsys, "plan", "--check", str(file), "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"]
    assert set(found["violations"][0]) == {"rank", "step", "rule", "message", "mend"}


@pytest.mark.parametrize("target", ["host", "cuda", "cuda --signals copy", "hip"])
@pytest.mark.parametrize("name", ["gated_1d", "gated_sums_1d", "two_shot_sm", "shard_p2p"])
def test_it_prints_and_proves_what_runs(capsys: Any, name: str, target: str) -> None:
    words = ["plan", "matmul_all_reduce", "--ranks", "3", "--m", "96", "--n", "48", "--k", "36"]
    words += ["--schedule", name, "--program", "--target", *target.split()]
    code, out, said = call(capsys, *words)
    if (name, target) == ("two_shot_sm", "hip"):
        assert code == 1 and "kernel" in said, said
        return
    assert code == 0 and "rank 0" in out and "rank 2" in out
    whole = "one_kernel for the whole call" in out
    assert whole == (name == "two_shot_sm" and target != "host")
    assert whole or ("by copy: raises" in out) == (target.endswith("copy") or target == "hip")
    assert ("wait by kernel" in out) == (target == "hip")
    code, out, _ = call(capsys, *words, "--json")
    program = json.loads(out)
    assert code == 0 and len(program["ranks"]) == 3
    entries = {entry["entry"] for entry in program["ranks"][0]["entries"]}
    assert entries <= {"copy", "signal_write", "wait", "launch"} and "launch" in entries
    code, out, _ = call(capsys, *words, "--check")
    assert code == 0 and out.startswith("right:")


@pytest.mark.parametrize("target", ["host", "cuda"])
@pytest.mark.parametrize("op", ["dispatch_matmul", "matmul_combine"])
def test_it_prints_and_proves_programs_of_experts(capsys: Any, op: str, target: str) -> None:
    words = ["plan", op, "--ranks", "3", "--m", "12", "--n", "4", "--k", "6", "--program"]
    words += ["--target", target]
    code, out, said = call(capsys, *words)
    assert code == 0, said
    mode = "gather" if op == "dispatch_matmul" else "return"
    assert f"experts {mode} routing@2[" in out and " of rank 1" in out, out
    code, out, _ = call(capsys, *words, "--json")
    assert code == 0 and len(json.loads(out)["ranks"]) == 3
    code, out, _ = call(capsys, *words, "--check")
    assert code == 0 and out.startswith("right:")


def test_the_program_of_a_file_is_proved(capsys: Any, tmp_path: Path) -> None:
    _, out, _ = call(capsys, "plan", *SMALL[:6], "--schedule", "gated_1d", "--json")
    plan = json.loads(out)
    file = tmp_path / "plan.json"
    file.write_text(out)
    code, out, _ = call(capsys, "plan", "--check", str(file), "--program")
    assert code == 0 and out.startswith("right:")
    steps = plan["ranks"][1]["steps"]
    (gated,) = [step for step in steps if step.get("parts")]
    del next(part for part in gated["parts"] if part.get("waits"))["waits"]
    file.write_text(json.dumps(plan))
    code, out, _ = call(capsys, "plan", "--check", str(file), "--program")
    assert code == 1 and "gemm" in out


@pytest.mark.parametrize(
    "more",
    [
        "--target host",
        "--signals copy",
        "--program --target host --signals copy",
        "--rank 1 --check",
    ],
)
def test_options_of_programs_are_for_programs(capsys: Any, more: str) -> None:
    code, out, err = call(capsys, "plan", *more.split())
    assert code == 2 and out == "" and "leave" in err


def test_broken_json_is_exit_2(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"version": 1')
    code, out, err = call(capsys, "plan", "--check", str(file))
    assert code == 2 and out == "" and "not JSON" in err
    file.write_bytes(b"\xff\xfe\x00")
    code, out, err = call(capsys, "plan", "--check", str(file))
    assert code == 2 and "not a text file" in err
