"""Books: what was measured is used, on the machine that it was measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ficco import __version__
from ficco.core.errors import InputError
from ficco.core.machine import Link, Machine
from ficco.measure import selector
from ficco.measure.selector.book import Book
from ficco.operators.problem import Problem
from ficco.plan.schedule import Schedule

# 1000 GFLOP/s are 1e6 operations a us; 1 GB/s are 1e3 bytes a us.
LINK = Link("node", "port", ((1, 1.0),))
SWITCH = Machine("toy", 1, 4, "host", (LINK,), gemm_gflops=(("any", 1000.0),))
MESH = replace(SWITCH, links=(replace(LINK, per="pair"),))


def gather(m: int, n: int, k: int, world: int = 4) -> Problem:
    return Problem.chunked("all_gather_matmul", world, m, n, k, "float32")


BOOK = """
machine = "toy"
ficco = "{version}"
driver = "13.0"
date = "2026-11-21"
[[points]]
op = "all_gather_matmul"
dtype = "float32"
regime = "captured"
ranks = 4
m = 1024
n = 64
k = 512
piece_bytes = 524288
ms = 1.25
serial_ms = 2.5
[points.schedule]
name = "hetero_fused_1d"
grain = 2
route = "rotation"
order = "by_step"
start = "local_first"
compute = "per_step"
"""


class TestBook:
    def book(self, folder: Path, text: str = BOOK, version: str = __version__) -> Book:
        path = folder / "toy.toml"
        path.write_text(text.replace("{version}", version))
        return Book.named(str(path))

    def test_it_comes_before_the_simulator_in_its_neighbourhood(self, tmp_path: Path) -> None:
        book = self.book(tmp_path)
        for m in (1024, 900, 1280):
            found = selector.choose(gather(m, 256, 512), SWITCH, book=book)
            assert (found.by, found.schedule.chunks, found.predicted_ms) == ("book", 2, 1.25)
            assert [(s.name, ms) for s, ms in found.alternatives] == [("serial", 2.5)]
            assert found.reasons[0] == "2.00 times as fast as serial (2.500 ms)"
            assert "2026-11-21" in found.reasons[1]
        for other in (gather(1284, 256, 512), gather(1024, 512, 512), gather(1024, 256, 1024)):
            assert selector.choose(other, SWITCH, book=book).by == "simulator"
        assert selector.choose(gather(1024, 256, 512), SWITCH, "eager", book=book).by != "book"

    def test_a_method_alone(self, tmp_path: Path) -> None:
        book = self.book(tmp_path)
        near, far = gather(1024, 256, 512), gather(4096, 256, 512)
        for by in ("simulator", "rule"):
            assert selector.choose(near, SWITCH, book=book, by=by).by == by
        assert selector.choose(near, SWITCH, book=book, by="book").by == "book"
        with pytest.raises(InputError, match="neighbourhood"):
            selector.choose(far, SWITCH, book=book, by="book")

    @pytest.mark.parametrize(
        ("machine", "changes", "driver", "words"),
        [
            (SWITCH, {"kernels": 0}, None, "measured with kernels 0, this ficco has"),
            (replace(SWITCH, name="other"), {}, None, "of machine 'toy', not of 'other'"),
            (
                replace(SWITCH, engine="cuda"),
                {"signals": "copy"},
                None,
                "with signals='copy', here",
            ),
            (SWITCH, {}, "12.8", "driver 13.0, this is 12.8"),
        ],
    )
    def test_what_is_of_another_machine_or_kernels_is_refused(
        self, tmp_path: Path, machine: Machine, changes: Any, driver: str | None, words: str
    ) -> None:
        book = replace(self.book(tmp_path), **changes)
        with pytest.raises(InputError, match=words):
            selector.choose(gather(1024, 256, 512), machine, book=book, driver=driver)

    def test_a_shipped_one_is_passed_over_and_that_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = replace(self.book(tmp_path), kernels=0)
        monkeypatch.setattr(selector, "known", lambda _: [old])
        found = selector.choose(gather(1024, 256, 512), SWITCH)
        assert found.by == "simulator"
        assert "is not used" in found.reasons[-1] and "kernels 0" in found.reasons[-1]

    def test_another_version_of_ficco_or_of_the_driver_is_said_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        old = self.book(tmp_path, version="0.0.1")
        for _ in range(2):
            found = selector.choose(gather(1024, 256, 512), SWITCH, book=old, driver="13.2")
            assert found.by == "book" and "driver 13.0, this is 13.2" in found.reasons[2]
        assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
        assert "this is 13.2; times may differ; measure it again" in caplog.text

    def test_what_sends_nothing_can_be_written_and_read(self, tmp_path: Path) -> None:
        alone = Problem.chunked("all_gather_matmul", 1, 64, 64, 64, "float32")
        serial = Schedule.named("serial").resolve(1, SWITCH)
        point = selector.book.Point.measured(alone, "captured", 1.0, 1.0, serial)
        book = Book("one", "toy", __version__, "13.0", "2026-11-21", (point,))
        (read,) = self.book(tmp_path, book.to_toml("of one rank")).points
        assert read == point and read.piece_bytes == 0

    def test_ficco_book_names_one_for_every_choice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = gather(1024, 256, 512)
        assert selector.quick(problem, SWITCH, "captured").by == "rule"
        self.book(tmp_path)
        monkeypatch.setenv("FICCO_BOOK", str(tmp_path / "toy.toml"))
        assert selector.choose(problem, SWITCH).by == "book"
        assert selector.quick(problem, SWITCH, "captured").by == "book"
        assert selector.quick(gather(9999, 256, 512), SWITCH, "captured").by == "rule"
        monkeypatch.setenv("FICCO_BOOK", "h200x2")  # of another machine
        assert "is not used" in selector.quick(problem, SWITCH, "captured").reasons[-1]
        monkeypatch.setenv("FICCO_BOOK", "h200x99")
        with pytest.raises(InputError, match="h200x99"):
            selector.quick(problem, SWITCH, "captured")

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('driver = "13.0"\n', "", "'driver' is missing"),
            ("ms = 1.25", "ms = 0", "ms=0: a number above 0"),
            ("piece_bytes = 524288", "piece_bytes = -1", "piece_bytes=-1: 0 or more"),
            ("m = 1024", 'm = "many"', "points"),
            ("grain = 2", "grain = 999", "grain"),
            ("ranks = 4", "ranks = 4\ncolour = 3", "unknown field 'colour'"),
        ],
    )
    def test_a_broken_book(self, tmp_path: Path, old: str, new: str, words: str) -> None:
        with pytest.raises(InputError, match=words):
            self.book(tmp_path, BOOK.replace(old, new, 1))
