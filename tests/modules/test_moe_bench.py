"""bench/moe.py on a CPU: its ways give right results; its order of points; tables and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forking import run_forked

BENCH = Path(__file__).parents[2] / "bench"


def test_every_way_is_right(tmp_path: Path, torch: Any) -> None:
    """All ways but that of symmetric memory, which needs GPUs, give what float64 gives."""
    code, said = run_forked(
        BENCH / "moe.py", "--gpus", 2, "--check", "--budget", 100, "--out", tmp_path,
        folder=tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo", "FICCO_MEASURE": "0"},
        timeout=120,
    )  # fmt: skip
    assert code == 0, said
    result = json.loads((tmp_path / "moe_hostx2.json").read_text())
    assert [point["kind"] for point in result["points"]] == ["forward", "training"] * 2
    for point in result["points"]:
        trains = point["kind"] == "training"
        assert set(point["refused"]) == {"symmetric"} | ({"gemms", "floor"} if trains else set())
        ways = {"auto", "auto_cap", "waves", "serial", "all_to_all", "all_gather"}
        assert set(point["errors"]) == ways
        assert max(point["errors"].values()) < 1e-5
        assert point["imbalance"]["experts"] >= point["imbalance"]["ranks"] >= 1


def test_parts(tmp_path: Path, torch: Any) -> None:
    pytest.importorskip("triton")
    code, said = run_forked(
        Path(__file__).with_name("moe_bench.py"), BENCH,
        folder=tmp_path, environment={"TRITON_INTERPRET": "1"}, timeout=100,
    )  # fmt: skip
    assert code == 0 and said.endswith("right\n"), said


def test_the_most_important_points_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from experts_compared import foresight, points

    shapes = list(points.SHAPES.values())
    found = points.points(shapes, points.TOKENS, points.ROUTINGS, points.PASSES)
    assert len(set(found)) == len(found) == 4 * 6 * 2 * 2
    assert {each.tokens for each in found[:8]} == {1024, 4096}
    assert {(each.kind, each.routing) for each in found[:8]} == {("forward", "uniform")}
    assert [each.shape for each in found[:4]] == shapes
    for row in foresight.predictions(found[:1], 2):
        assert row["only_simulated"] == (row["world"] != 2)
        assert all(ms > 0 for ms in row["captured"].values())


def test_the_page_tells_what_won_and_what_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without results there is no page."""
    monkeypatch.syspath_prepend(str(BENCH))
    from pages.experts import experts
    from tables.sources import Page

    assert experts(Page(tmp_path, ".")) == ""

    def point(shape: str, **ms: float) -> dict[str, Any]:
        return {
            "point": f"forward {shape} 4096 uniform", "shape": shape, "title": shape.title(),
            "tokens": 4096, "routing": "uniform", "kind": "forward",
            "imbalance": {"ranks": 1.01, "experts": 1.1, "most_rows": 9},
            "refused": {"serial": "no"},
            "ms": {"captured": {way: {"median": each} for way, each in ms.items()}},
        }  # fmt: skip

    gpu = {"name": "NVIDIA H200", "driver_version": "1", "power.limit": "700 W"}
    predicted = {
        "shape": "a", "tokens": 4096, "world": 4, "only_simulated": True,
        "captured": {"matmul_combine push_sm": 1.5},
    }  # fmt: skip
    document = {
        "gpus": [gpu] * 2, "world": 2, "date": "2026-11-30", "commit": "0123456789", "cpu": "C",
        "cores": 2, "versions": {"torch": "2.11"}, "left_out": [], "predicted": [predicted],
        "points": [
            point("a", auto_cap=1.0, waves=0.9, all_to_all=2.0, all_gather=1.2, floor=0.8),
            point("b", auto_cap=1.0, all_gather=0.9),
        ],
    }  # fmt: skip
    (tmp_path / "moe_h200x2.json").write_text(json.dumps(document))
    page = experts(Page(tmp_path, "."))
    assert "## 2 NVIDIA H200s" in page
    about = "4096 | 1.01, 1.10 |"
    assert f"| A | {about} 1000 | **900** | 2000 | 1200 | 800 | 1.20x | 2.00x | 0.80x |" in page
    assert f"| B | {about} 1000 | - | - | **900** | - | 0.90x | - | - |" in page
    assert "| Forward | captured | uniform | 1024 and more | 2 | 1.04x | 0.90x | 1 |" in page
    assert "| a | 4096 | 4 | 1500 | simulated only |" in page
    assert "`serial`: no (2 points" in page and "Commit `01234567`" in page
