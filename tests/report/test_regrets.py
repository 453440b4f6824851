"""bench/regret.py: shapes are equal for a seed and fit, and a verdict is what its bar says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    for name in [each for each in sys.modules if each.split(".")[0] == "comparing"]:
        monkeypatch.delitem(sys.modules, name)


def row(median: float, iqr: float = 0.0) -> dict[str, float]:
    return {"median": median, "iqr": iqr, "runs": 15}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_shapes_are_equal_for_a_seed_and_fit(world: int) -> None:
    from comparing.random_shapes import MOST_FLOPS, OPERATORS, drawn

    for op in OPERATORS:
        found = drawn(op, world, 40, 7)
        assert found == drawn(op, world, 40, 7)
        assert found != drawn(op, world, 40, 8)
        assert found[:10] == drawn(op, world, 10, 7)
        assert all(layout.flops <= MOST_FLOPS for layout in found)
        if op != "matmul_all_reduce" and world != 3:  # 128 columns do not split over 3
            assert not [layout.unfit for layout in found if layout.unfit]
    rows = [layout.m for layout in drawn("matmul_all_reduce", world, 40, 1)]
    assert min(rows) < 8
    assert max(rows) > 4096


@pytest.mark.parametrize(
    ("auto", "peers", "regime", "best", "within"),
    [
        (row(1.02), {"serial": row(1.0), "torch_fused": row(1.5)}, "eager", "serial", True),
        (row(1.04), {"serial": row(1.0), "torch_fused": row(1.5)}, "eager", "serial", False),
        (row(1.04), {"serial": row(1.5), "torch_fused": row(1.0, 0.05)}, "eager", "torch_fused",
         True),
        (row(0.0118), {"serial": row(0.0100)}, "captured", "serial", True),
        (row(0.0122), {"serial": row(0.0100)}, "captured", "serial", False),
        (row(0.0149), {"one_shot": row(0.0100)}, "synchronized", "one_shot", True),
        (row(0.0151), {"one_shot": row(0.0100)}, "synchronized", "one_shot", False),
        (row(1.04), {"serial": row(1.02), "ficco gated_1d g2": row(0.5)}, "captured", "serial",
         True),
    ],
)  # fmt: skip
def test_a_verdict_is_what_its_bar_says(
    auto: dict[str, float], peers: dict[str, Any], regime: str, best: str, within: bool
) -> None:
    from comparing.regrets import judged

    found = judged({"auto": auto} | peers, regime)
    assert found is not None
    assert (found["best"], found["within"]) == (best, within)


def test_ways_whose_results_are_new_memory_have_a_verdict_of_their_own() -> None:
    from comparing.regrets import judged, lines, summed_up

    figures = {"auto": row(1.0), "serial": row(0.8), "two_shot": row(0.7), "serial_new": row(0.99)}
    found = judged(figures, "eager")
    assert found is not None and not found["within"] and found["within_new"]
    found = judged(figures | {"torch_fused": row(0.9)}, "eager")
    assert found is not None and not found["within_new"] and found["best"] == "two_shot"
    found = judged(figures | {"one_shot": row(0.9)}, "eager")  # it returns a new tensor
    assert found is not None and not found["within_new"]
    assert "within_new" not in (judged({"auto": row(1.0), "serial": row(0.8)}, "eager") or {})
    case = {"case": "op 1", "op": "op", "refused": {}, "auto": {"eager": "serial g1"}}
    cases = [case | {"ms": {"eager": figures}, "verdicts": {"eager": judged(figures, "eager")}}]
    summary = summed_up(cases)
    assert (summary["op"]["eager"]["within"], summary["op"]["eager"]["within_new"]) == (0, 1)
    text = lines({"summary": summary, "cases": cases, "left_out": []})
    assert "0 of   1 within (1 against new results)" in text[0]


def test_a_shape_without_auto_or_others_has_no_verdict() -> None:
    from comparing.regrets import judged

    assert judged({"serial": row(1.0)}, "eager") is None
    assert judged({"auto": row(1.0), "ficco serial g1": row(1.0)}, "eager") is None


def test_sums_count_shapes_by_operator_and_regime() -> None:
    from comparing.regrets import judged, lines, summed_up

    cases = [
        {
            "case": f"op {number}", "op": "op", "refused": {},
            "auto": {"eager": "serial g1", "captured": "serial g1"},
            "ms": {"eager": {"auto": row(auto), "serial": row(1.0)}},
            "verdicts": {"eager": judged({"auto": row(auto), "serial": row(1.0)}, "eager")},
        }
        for number, auto in enumerate((0.5, 1.0, 2.0))
    ]  # fmt: skip
    found = summed_up(cases)
    assert found == {
        "op": {
            "eager": {
                "shapes": 3, "within": 2,
                "times_faster": {"least": 0.5, "median": 1.0, "most": 2.0},
            }
        }
    }  # fmt: skip
    text = lines({"summary": found, "cases": cases, "left_out": []})
    assert len(text) == 2
    assert "op 2 eager: auto is serial g1; auto 2.0000, serial 1.0000" in text[1]
