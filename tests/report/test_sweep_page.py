"""The page of a sweep: its figures are those of the results, it is sound, it takes any folder."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sweep_folders
from markup import Element, parse, rows

from ficco.cli.report import sweep as sweep_page
from ficco.cli.report.sweep import judging, reading
from ficco.core.errors import EngineError, InputError
from ficco.core.machine import Machine
from ficco.operators.problem import Problem

CASE = {
    "serial, ms": "serial_ms", "GEMM alone, ms": "gemm_ms", "transfer alone, ms": "transfer_ms",
    "ideal, ms": "ideal_ms", "floor, ms": "floor_ms", "operations per byte": "op_to_byte",
}  # fmt: skip
POINT = {
    "ms": "ms", "IQR, ms": "iqr_ms", "runs": "runs", "times serial": "speedup",
    "of ideal": "efficiency", "predicted, ms": "predicted_ms", "DIL": "dil", "CIL": "cil",
    "largest error": "max_rel_error",
}  # fmt: skip

Lines = list[dict[str, Any]]


def agrees(text: str, value: float | None) -> bool:
    """Whether a text is a value, rounded to the digits that it has."""
    if value is None:
        return text == "-"
    if "e" in text:
        return text == f"{value:.1e}"
    if text.endswith("%"):
        text, value = text[:-1], value * 100
    places = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5 * 10**-places * (1 + 1e-9)


def results(folder: Path, kind: str) -> Lines:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def page(report: Path) -> Element:
    return parse(report.read_text())


def section(page: Element, ident: str) -> Element:
    return page.one("section", id=ident)


def bests(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the fastest of ficco's right points, case by case."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for point in results(folder, "point"):
        key = (point["shape"], point["regime"])
        known = found.get(key, {"ms": math.inf})
        if point["ok"] and point["name"] not in ("serial", "auto") and point["ms"] < known["ms"]:
            found[key] = point
    return found


def test_agreement_is_exact() -> None:
    assert agrees("1.235", 1.2349)
    assert agrees("62.5%", 0.62519)
    assert not agrees("1.235", 1.2361)
    assert not agrees("62.5%", 0.6262)
    assert not agrees("1.235", None)


def test_every_point_stands_with_its_figures(page: Element, folder: Path) -> None:
    shown = {
        row.attributes["data-point"]: cells
        for table in section(page, "grains").all("table")
        for row, cells in rows(table)
    }
    points = {point["id"]: point for point in results(folder, "point")}
    assert set(shown) == set(points)
    assert len(points) > 40
    for ident, cells in shown.items():
        point = points[ident]
        assert cells["point"].startswith(point["name"])
        for title, name in POINT.items():
            assert agrees(cells[title], point[name]), (ident, title, cells[title], point[name])


def test_every_case_stands_with_its_figures(page: Element, folder: Path) -> None:
    best = bests(folder)
    cases = {(c["shape"], c["regime"]): c for c in results(folder, "shape")}
    (table,) = [t for t in section(page, "speed").all("table") if "All cases" in t.text]
    shown = {(r.attributes["data-shape"], r.attributes["data-regime"]): c for r, c in rows(table)}
    assert set(shown) == set(cases)
    for key, cells in shown.items():
        point, case = best[key], cases[key]
        assert cells["best"] == f"{point['name']} g{point['grain']}"
        for title, name in CASE.items():
            assert agrees(cells[title], case[name]), (key, title)
        for title in ("ms", "IQR, ms", "times serial", "of ideal"):
            assert agrees(cells[title], point[POINT[title]]), (key, title)
    order = [float(cells["times serial"]) for _, cells in rows(table)]
    assert order == sorted(order)


def test_losing_shapes_stand_first(page: Element, folder: Path) -> None:
    titles = [s.attributes["id"] for s in page.all("section")]
    assert titles.index("losing") < titles.index("speed") < titles.index("grains")
    lost = {k: p["speedup"] for k, p in bests(folder).items() if p["speedup"] < 1}
    assert lost
    shown = [
        (r.attributes["data-shape"], r.attributes["data-regime"])
        for r, _ in rows(section(page, "losing").all("table")[0])
    ]
    assert shown == sorted(lost, key=lost.__getitem__)


def test_the_summary_counts(page: Element, folder: Path) -> None:
    gains = [point["speedup"] for point in bests(folder).values()]
    text = " ".join(section(page, "summary").all("p")[0].text.split())
    faster = sum(gain >= 1 for gain in gains)
    assert f"faster than serial in {faster} of {len(gains)} cases" in text
    assert f"slower in {len(gains) - faster}" in text
    figures = re.findall(r"[a-z] (\d+\.\d{3})", text)
    for shown, value in zip(
        figures, (statistics.geometric_mean(gains), min(gains), max(gains)), strict=True
    ):
        assert agrees(shown, value)


def test_predictions_stand_against_measurements(page: Element, folder: Path) -> None:
    tables = {t.one("caption").text: t for t in section(page, "foresight").all("table")}
    errors = [abs(p["predicted_ms"] / p["ms"] - 1) for p in results(folder, "point")]
    first = rows(tables["Figures of the plot: errors of predictions"])[0][1]
    assert first["count"] == str(len(errors))
    assert agrees(first["median error"], statistics.median(errors))
    assert agrees(first["most"], max(errors))
    chosen = {
        cells["chosen by"].split(":")[0]: cells for _, cells in rows(tables["Cost of choosing"])
    }
    assert set(chosen) == {"simulator", "rule"}


def test_timelines_say_what_lanes_did(page: Element, folder: Path) -> None:
    cards = section(page, "timelines").all("article")
    assert len(cards) == len(results(folder, "shape"))
    lines = results(folder, "timeline")
    for line in lines:
        spans = line["timeline"]["spans"]
        last = max(spans, key=lambda span: span["end_us"])
        assert any(
            agrees(cells["last end, ms"], last["end_us"] / 1e3)
            and (cells["lane"], cells["kind"]) == (last["lane"], last["kind"])
            for card in cards
            for table in card.all("table")
            for _, cells in rows(table)
        ), line["id"]


def check_sound(text: str) -> Element:
    """Check that a page is well formed, needs nothing else, and can be read by all."""
    assert text.lower().startswith("<!doctype html>")
    for foreign in ("http", "//", "@import", "<script", "<img", "<iframe", "javascript:"):
        assert foreign not in text, foreign
    assert not re.findall(r"url\((?!#)", text)
    page = parse(text)
    everything = page.all(*{e.tag for e in _all(page)})
    idents = [e.attributes["id"] for e in everything if "id" in e.attributes]
    assert len(idents) == len(set(idents))
    targets = [e.attributes["href"] for e in page.all("a", "use")]
    targets += [
        f"#{i}" for e in everything for i in e.attributes.get("aria-labelledby", "").split()
    ]
    for value in (value for e in everything for value in e.attributes.values()):
        targets += re.findall(r"url\((#[^)]*)\)", value)
    assert {target[1:] for target in targets} <= set(idents)
    levels = [int(e.tag[1]) for e in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    for table in page.all("table"):
        assert table.one("caption").text
        assert all(cell.attributes.get("scope") in ("row", "col") for cell in table.all("th"))
    for plot in page.all("svg"):
        assert plot.attributes["role"] == "img"
        assert plot.all("title")[0].text
        assert plot.all("desc")[0].text
    assert all(d.children and d.all("summary") for d in page.all("details"))
    assert page.one("html").attributes["lang"] == "en"
    assert len(page.all("main")) == 1
    return page


def _all(element: Element) -> list[Element]:
    found = [child for child in element.children if isinstance(child, Element)]
    return found + [below for child in found for below in _all(child)]


def test_the_page_is_sound(report: Path) -> None:
    page = check_sound(report.read_text())
    plots, folded = page.all("figure"), page.all("details")
    assert len(plots) > 8
    assert len(folded) >= len(plots)  # every plot has a table of its figures


def one_case() -> Lines:
    """A case with serial and two points, by hand."""
    key = {"shape": "s", "regime": "captured"}
    problem = Problem.chunked("all_gather_matmul", 4, 4096, 4096, 4096, "bfloat16")
    machine = Machine.named("h200x4")
    from ficco.plan.schedule import Schedule

    points = []
    for name, ms, predicted in (
        ("serial", 1.0, 1.0), ("gated_1d", 1.2, 0.7), ("shard_p2p", 0.8, 0.9),
    ):  # fmt: skip
        schedule = Schedule.named(name).resolve(problem.world, machine)
        points.append({
            "kind": "point", "id": name, **key, "name": name, "grain": schedule.chunks,
            "schedule": schedule.to_json(), "ms": ms, "iqr_ms": 0.01, "runs": 20,
            "screened": False, "ok": True, "max_rel_error": None, "predicted_ms": predicted,
            "speedup": 1.0 / ms, "efficiency": 0.7 / ms, "dil": None, "cil": None,
        })  # fmt: skip
    head = {
        "kind": "shape", **key, "op": problem.op, "dtype": "bfloat16", "world": 4, "m": 4096,
        "n": 4096, "k": 4096, "gemm_ms": 0.7, "transfer_ms": 0.3, "ideal_ms": 0.7,
        "floor_ms": 0.2, "flops": 3e10, "bytes_out": 25e6, "op_to_byte": 1200.0, "serial_ms": 1.0,
    }  # fmt: skip
    return [head, *points]


def made(folder: Path, lines: Lines, **head: Any) -> Element:
    sweep_folders.write(folder, "h200x4", lines, executed=True)
    if head:
        found = json.loads((folder / "sweep.json").read_text())
        (folder / "sweep.json").write_text(json.dumps(found | head))
    return check_sound(sweep_page.write(folder).read_text())


def test_the_best_point_is_one_of_all_rounds_where_there_is_one(tmp_path: Path) -> None:
    made(tmp_path, [line | {"screened": line.get("id") == "shard_p2p"} for line in one_case()])
    (case,) = reading.read(tmp_path).cases
    assert [point.name for point in judging.best_of_each(case)] == ["gated_1d", "shard_p2p"]
    found = judging.best(case)
    assert found is not None and found.name == "gated_1d"


def test_choosing_by_a_wrong_prediction_is_shown(tmp_path: Path) -> None:
    tables = section(made(tmp_path, one_case()), "foresight").all("table")
    (costs,) = [rows(t) for t in tables if t.one("caption").text == "Cost of choosing"]
    by = {cells["chosen by"].split(":")[0]: cells for _, cells in costs}["simulator"]
    assert (by["cases"], by["right within 3%"], by["slower than serial by 3%"]) == (
        "1", "0 (0.0%)", "1",
    )  # fmt: skip
    assert by["lost, most"] == "50.0%"  # 1.2 ms are taken for 0.8
    assert by["times serial, geometric mean"] == "0.833"
    assert by["the same of fastest points"] == "1.250"
    (most,) = [rows(t) for t in tables if "lose most" in t.one("caption").text]
    cells = next(cells for _, cells in most if cells["chosen by"] == "simulator")
    assert (cells["took"], cells["lost"], cells["within 3%"]) == ("gated_1d g4", "50.0%", "wrong")


def edited(lines: Lines, kind: str, **changes: Any) -> Lines:
    return [line | changes if line["kind"] == kind else line for line in lines]


def bad(reason: str, regime: str | None = "captured") -> Mapping[str, Any]:
    point = {"id": "b", "shape": "t", "regime": regime, "name": "gated_1d", "grain": 2}
    return {"kind": "bad", **point, "reason": reason}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no results"),
        ([bad("no memory <left> & more", None)], "no memory <left> & more"),
        (one_case()[:1], "None has both serial"),
        (one_case()[:2], "nothing to compare"),
        (edited(edited(one_case(), "point", speedup=None, efficiency=None, predicted_ms=None),
                "shape", serial_ms=None, ideal_ms=None, op_to_byte=None, gemm_ms=None),
         "nothing to compare"),
        (edited(one_case(), "point", ok=False, max_rel_error=math.inf), "WRONG"),
        (edited(one_case(), "point", name="auto", chosen={"schedule": "gated_1d"}),
         "auto: gated_1d g4"),
        ([*one_case(), bad("it hung")], "it hung"),
    ],
    ids=["nothing", "bad", "begun", "serial", "alone", "wrong", "auto", "reason"],
)  # fmt: skip
def test_it_takes_any_folder(tmp_path: Path, lines: Lines, said: str) -> None:
    assert said in made(tmp_path, lines).text


def test_it_says_how_figures_came_to_be(tmp_path: Path) -> None:
    assert "EMULATED" in made(tmp_path, [], paced=True).text
    assert "SIMULATED. Nothing ran" in made(tmp_path, [], how="simulated").text
    assert "UNFINISHED: 3 of 9 points" in made(tmp_path, one_case(), points=9).text
    assert "UNFINISHED" not in made(tmp_path, one_case(), points=3).text
    ended = [line | {"ended": True} if line["kind"] == "shape" else line for line in one_case()]
    begun = [line | {"ended": False} if line["kind"] == "shape" else line for line in one_case()]
    assert "UNFINISHED" not in made(tmp_path, ended, points=3).text
    assert "UNFINISHED: 3 of 3 points" in made(tmp_path, begun, points=3).text
    page = made(tmp_path, one_case(), profile="nowhere.toml")
    assert "nowhere.toml" in section(page, "foresight").text
    stamps = [s.one("h2").text for s in page.all("section") if s.attributes["id"] != "method"]
    assert sum("measured" in stamp for stamp in stamps) >= len(stamps) - 1


def test_many_shapes_stay_small(tmp_path: Path) -> None:
    lines: Lines = []
    for number in range(200):
        for line in one_case():
            line["shape"] = f"s{number}"
            if line["kind"] == "shape":
                line |= {"m": 64 * (number + 1), "bytes_out": 1e5 * (number + 1)}
                lines.append(line)
                continue
            grains = (1, 2, 4, 8, 16) if line["name"] == "gated_1d" else (1,)
            lines += [
                line | {"id": f"{number} {line['id']} {grain}", "grain": grain} for grain in grains
            ]
    page = made(tmp_path, lines)
    assert (tmp_path / "report.html").stat().st_size < 5e6
    text = " ".join(page.text.split())
    assert "24 of 200 curves are shown" in text
    assert "40 of 200 cases (captured)" in text
    assert len(page.all("svg")) < 40
    (table,) = [t for t in page.all("table") if "All cases" in t.text]
    assert len(rows(table)) == 200


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a sweep's folder"):
        sweep_page.write(tmp_path)
    sweep_folders.write(tmp_path, None, one_case(), executed=True)
    results_file = tmp_path / "results.jsonl"
    whole = results_file.read_text()
    results_file.write_text(whole + '{"kind": "po')
    with pytest.raises(InputError, match=r"line 5 .* is not JSON"):
        sweep_page.write(tmp_path)
    results_file.write_text(whole.replace('"ms": 0.8', '"ms": "fast"'))
    with pytest.raises(InputError, match=r"line 4: ms='fast': a finite number"):
        sweep_page.write(tmp_path)
    results_file.write_text("\n".join(whole.splitlines()[1:]))
    with pytest.raises(InputError, match="no line describes shape 's'"):
        sweep_page.write(tmp_path)
    (tmp_path / "sweep.json").write_text('{"version": 2}')
    with pytest.raises(InputError, match="version 2 found"):
        sweep_page.write(tmp_path)
    (tmp_path / "sweep.json").write_text("[1]")
    with pytest.raises(InputError, match="version None"):
        sweep_page.write(tmp_path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    sweep_folders.write(tmp_path, None, [], executed=True)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        sweep_page.write(tmp_path)


def test_a_missing_extra_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_folders.write(tmp_path, None, [], executed=True)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "ficco.cli.report.sweep.page", raising=False)
    with pytest.raises(EngineError, match=r"needs jinja2.*ficco\[report\]"):
        sweep_page.write(tmp_path)
    assert not (tmp_path / "report.html").exists()
