"""Sweeps that are killed or interrupted at any moment: nothing is lost, nothing is done twice."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from folders import MANY, SIMULATED, grown, lines, outline, start, write

KILLS = 10


def test_a_sweep_killed_ten_times_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    grid = write(tmp_path, MANY)
    whole = tmp_path / "whole"
    process = start(grid, "--out", whole)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    size = (whole / "runs.jsonl").stat().st_size
    points = [line for line in lines(whole / "results.jsonl") if line["kind"] == "point"]
    assert len(points) >= 190

    killed = tmp_path / "killed"
    draw = random.Random(20261121)
    moments = sorted(draw.randrange(size) for _ in range(KILLS))
    hits = 0
    for moment in moments:
        process = start(grid, "--out", killed)
        hits += grown(process, killed / "runs.jsonl", moment)
        process.kill()
        process.communicate(timeout=60)
    assert hits >= KILLS // 2, "the kills came too late to mean anything"
    process = start(grid, "--out", killed)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said

    assert outline(killed) == outline(whole)
    made = Counter(
        (line["id"], line["run"]) for line in lines(killed / "runs.jsonl") if "run" in line
        and "id" in line
    )  # fmt: skip
    assert set(made.values()) == {1}, "a run was made twice"
    assert len(made) == 3 * len(points)


def test_a_killed_simulation_ends_with_the_same_bytes(tmp_path: Path) -> None:
    grid = write(tmp_path, SIMULATED)
    for name, moments in (("whole", []), ("killed", [1, 20_000])):
        for moment in moments:
            process = start(grid, "--out", tmp_path / name)
            grown(process, tmp_path / name / "runs.jsonl", moment)
            process.kill()
            process.communicate(timeout=60)
        process = start(grid, "--out", tmp_path / name)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    cut, journal = tmp_path / "cut", tmp_path / "whole" / "runs.jsonl"
    shutil.copytree(tmp_path / "whole", cut)  # killed between what is worked out and its run
    first = journal.read_bytes().splitlines(keepends=True)
    assert b'"dil"' in first[2] and b'"run"' in first[3]
    (cut / "runs.jsonl").write_bytes(b"".join(first[:3]) + first[3][:20])
    process = start(grid, "--out", cut)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    for name in ("killed", "cut"):
        for file in ("results.jsonl", "results.csv", "runs.jsonl", "sweep.json"):
            found, wanted = tmp_path / name / file, tmp_path / "whole" / file
            assert found.read_bytes() == wanted.read_bytes(), f"{name}/{file}"
    assert not (tmp_path / "whole" / "book.toml").exists()  # nothing was measured


def test_ctrl_c_leaves_results_and_says_how_to_go_on(tmp_path: Path) -> None:
    grid, out = write(tmp_path, MANY), tmp_path / "out"
    process = start(grid, "--out", out, "--ranks", "2", report=True)
    assert grown(process, out / "runs.jsonl", 10_000)
    process.send_signal(signal.SIGINT)
    told, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    if find_spec("matplotlib") and find_spec("jinja2"):
        assert f"report: {out / 'report.html'}" in told
        assert (out / "report.html").stat().st_size > 1000
    else:
        assert "no report" in said and "ficco[report]" in said
    assert f"to continue: ficco sweep {grid} --out {out} --ranks 2" in said
    assert "Traceback" not in said
    kinds = {line["kind"] for line in lines(out / "results.jsonl")}
    assert {"shape", "point"} <= kinds
    process = start(grid, "--out", out)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "continues: " in said
