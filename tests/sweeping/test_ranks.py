"""Sweeps on GPUs, with ranks whose GPUs are this machine's memory: see rank_double.py."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folders import lines, outline
from forking import forked_rank

from ficco.cli.sweeping.gpu import session
from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.running import Outcome, SweepRequest, run
from ficco.core.errors import EngineError
from ficco.core.machine import Machine
from ficco.measure import launching

DOUBLE = Path(__file__).with_name("rank_double.py")
OPERATORS = [
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul",
    "matmul_all_to_all", "embedding_all_to_all",
]  # fmt: skip
CASES = {
    "op": OPERATORS, "shapes": [[24, 10, 14]], "dtypes": ["float32"],
    "regimes": ["captured", "synchronized"], "grains": [1, 2],
    "schedules": ["shard_p2p", "hetero_fused_1d", "gated_1d", "auto"],
}  # fmt: skip
ONE = {**CASES, "op": "all_gather_matmul", "grains": [2], "regimes": ["eager"]}

STARTING = SimpleNamespace(Popen=forked_rank, STDOUT=subprocess.STDOUT)


@pytest.fixture(autouse=True)
def _double(torch: Any, monkeypatch: Any) -> None:
    _as_double(monkeypatch)


def _as_double(patch: pytest.MonkeyPatch) -> None:
    """Let ranks be doubles, of which most are forked, for to import PyTorch takes the longest."""
    patch.setattr(session, "RANK", ("-P", str(DOUBLE)))
    patch.setattr(launching, "GRACE_S", 1.0)
    patch.setattr(launching, "subprocess", STARTING)


def swept(folder: Path, cases: dict[str, Any], seconds: float = math.inf) -> Outcome:
    table = {"rounds": 3, "screening": 2, "keep": 1, "cases": [cases]}
    grid = Grid.from_toml(table, "g")
    machine, profile = Machine.named("cuda"), Machine.named("h200x2")
    asked = SweepRequest(
        grid, folder, machine, 2, False, profile, "h200x2", "13.0", None, seconds, 10.0
    )
    return run(asked)


def test_all_operators_are_measured_and_checked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DOUBLE_WRONG", "shard_p2p")  # which auto does not take
    outcome = swept(tmp_path, CASES)
    assert (outcome.left, outcome.book) == (0, True)
    found = lines(tmp_path / "results.jsonl")
    bad = [line for line in found if line["kind"] == "bad"]
    bags = [line for line in bad if line["shape"].startswith("embedding")]
    wrong = [line for line in bad if line not in bags]
    assert all("bags are not swept on GPUs" in line["reason"] for line in bags)
    assert {line["name"] for line in wrong} == {"shard_p2p"} and len(wrong) == 5 * 2
    assert all("relative error" in line["reason"] for line in wrong)
    points = [line for line in found if line["kind"] == "point"]
    kept = Counter((line["shape"], line["regime"]) for line in points if not line["screened"])
    assert set(kept.values()) == {3} and len(kept) == 10  # serial, auto, and the best
    for line in points:
        assert line["runs"] == (2 if line["screened"] else 3)
        assert line["max_rel_error"] < 1e-5 and line["predicted_ms"] > 0
    for line in found:
        if line["kind"] == "shape" and not line["shape"].startswith("embedding"):
            assert line["gemm_ms"] > 0 and line["transfer_ms"] > 0
    assert any(line["kind"] == "timeline" for line in found)
    cut = [line for line in points if not line["screened"] and line["name"] == "hetero_fused_1d"]
    assert cut, "no point of cuBLAS's was kept"
    assert all(line["dil"] > 0 and line["cil"] > 0 for line in cut)


@pytest.fixture(scope="module")
def died(tmp_path_factory: Any) -> tuple[Path, Outcome]:
    """A sweep of which one point ended its ranks."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("died")
    with pytest.MonkeyPatch.context() as patch:
        _as_double(patch)
        patch.setenv("DOUBLE_DIES", "hetero_fused_1d")
        return folder, swept(folder, ONE)


def test_a_point_that_ends_its_ranks_is_bad_and_others_go_on(died: tuple[Path, Outcome]) -> None:
    folder, outcome = died
    assert outcome.bad == {"failed": 1} and outcome.left == 0
    found = lines(folder / "results.jsonl")
    (bad,) = [line for line in found if line["kind"] == "bad"]
    assert bad["name"] == "hetero_fused_1d" and "rank 1 ended with 3" in bad["reason"]
    assert {line["name"] for line in found if line["kind"] == "point"} == {
        "serial", "shard_p2p", "gated_1d", "auto",
    }  # fmt: skip


def test_ranks_go_on_with_the_runs_that_are_missing(died: tuple[Path, Outcome]) -> None:
    folder, _ = died
    whole, journal = outline(folder), folder / "runs.jsonl"
    rows = journal.read_bytes().splitlines(keepends=True)
    timed = [i for i, row in enumerate(rows) if b'"run":' in row]
    assert not any(b'"checked"' in row for row in rows[: timed[-1]])
    journal.write_bytes(b"".join(rows[: timed[-2]]) + b'{"shape')
    assert swept(folder, ONE).left == 0
    assert outline(folder) == whole
    made = Counter(
        (line.get("id", line.get("part")), line.get("run"), line.get("screen"))
        for line in lines(journal)
        if "ms" in line
    )
    assert set(made.values()) == {1}
    # Points that had all their runs are held against float64 once more, too.
    checked = [line["id"] for line in lines(journal) if "checked" in line]
    full = [line for line in lines(folder / "results.jsonl") if line.get("runs") == 3]
    assert sorted(checked) == sorted(line["id"] for line in full)


CUT = {**ONE, "schedules": ["hetero_fused_1d"]}


def lacking(folder: Path) -> dict[str, str]:
    """What of the one shape is not to be had, but for what there is no double of."""
    (shape,) = [line for line in lines(folder / "results.jsonl") if line["kind"] == "shape"]
    found: dict[str, str] = shape["lacking"]
    return {part: found[part] for part in found if part != "transfer push"}


def test_pieces_that_end_their_ranks_are_given_up_and_a_bad_end_does_no_harm(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.setenv("DOUBLE_ENDS", "pieces leave")
    outcome = swept(tmp_path, CUT)
    assert (outcome.left, outcome.bad) == (0, {})
    ((part, reason),) = lacking(tmp_path).items()
    assert part.startswith("pieces of hetero_fused_1d") and "rank 1 ended with 3" in reason
    points = [line for line in lines(tmp_path / "results.jsonl") if line["kind"] == "point"]
    assert [(line["runs"], line["dil"]) for line in points] == [(3, None)] * 2
    assert "the ranks failed after all measurements were done" in capfd.readouterr().err


def test_traces_that_end_their_ranks_are_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DOUBLE_FAILS", "pieces")
    monkeypatch.setenv("DOUBLE_ENDS", "trace")
    outcome = swept(tmp_path, CUT)
    assert (outcome.left, outcome.bad) == (0, {})
    pieces, trace = sorted(lacking(tmp_path).items())
    assert pieces[1] == "failed on ranks [1]"
    assert trace[0].startswith("trace of") and "rank 1 ended with 3" in trace[1]
    found = lines(tmp_path / "results.jsonl")
    assert [line["runs"] for line in found if line["kind"] == "point"] == [3, 3]
    assert not [line for line in found if line["kind"] == "timeline"]


def test_ranks_that_cannot_begin_end_the_sweep(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(launching, "subprocess", subprocess)
    monkeypatch.setattr(session, "RANK", ("-P", "-c", "raise SystemExit('no GPU')"))
    with pytest.raises(EngineError, match=r"before they tried a point: rank 0.*no GPU"):
        swept(tmp_path, ONE)


def test_shapes_that_do_not_split_evenly_say_so(tmp_path: Path) -> None:
    outcome = swept(tmp_path, {**ONE, "shapes": [[25, 10, 14]]})
    assert outcome.bad == {"impossible": outcome.points}
    reasons = {line.get("reason") for line in lines(tmp_path / "results.jsonl")}
    assert any("m=25 not divisible by 2" in str(reason) for reason in reasons)


def test_time_that_is_up_ends_the_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    """Ranks that are started as a sweep starts them, too."""
    monkeypatch.setattr(launching, "subprocess", subprocess)
    outcome = swept(tmp_path, {**ONE, "shapes": [[24, 10, 14], [26, 10, 14]]}, seconds=0.5)
    assert outcome.left > 0 and not outcome.bad
