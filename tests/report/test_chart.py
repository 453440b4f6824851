"""README's figure: the same data give the same bytes, and a figure of other data is stale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    for name in [each for each in sys.modules if each.split(".")[0] in ("comparing", "tables")]:
        monkeypatch.delitem(sys.modules, name)
    from tables import chart

    return chart


def document(auto_ms: float) -> dict[str, Any]:
    ms = {"auto": {"median": auto_ms}, "serial": {"median": 1.0}, "torch_fused": {"median": 0.5}}
    case = {"op": "all_gather_matmul", "ms": {"captured": ms, "eager": ms}}
    return {"world": 2, "gpus": [{"name": "NVIDIA H100"}], "cases": [case, case]}


def test_the_same_data_give_the_same_file(tmp_path: Path, chart: Any) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        chart.draw(document(0.8), path)
    text = first.read_text()
    assert first.read_bytes() == second.read_bytes()
    assert "<dc:date>" not in text
    assert "all_gather_matmul" in text
    assert chart.fresh(document(0.8), first)
    assert not chart.fresh(document(0.7), first)


def test_speed_ups_are_over_nccl_and_over_the_best(chart: Any) -> None:
    case = document(0.8)["cases"][0]
    assert chart.auto.gain(case, "eager", chart.auto.NCCL) == pytest.approx(1.25)
    assert chart.auto.gain(case, "eager", chart.auto.BEST) == pytest.approx(0.625)
