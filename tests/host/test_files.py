"""Files of other people, and damaged files: nothing waits, and nothing is lost."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ficco
from ficco.cli.main import main
from ficco.cli.report import sweep as sweep_page
from ficco.cli.report.sweep.reading import read as read_sweep
from ficco.cli.sweeping.folder import read_head, replaced
from ficco.cli.sweeping.grid import Grid
from ficco.cli.sweeping.journal import Journal
from ficco.core import data, files, logs, reading
from ficco.core.cache import Kept
from ficco.core.errors import FiccoError, InputError
from ficco.core.machine import Machine
from ficco.engine import probe_record
from ficco.kernels import pack
from ficco.measure.profiling.writing import write_profile
from ficco.measure.selector import Book

PLAN = ficco.lower(ficco.Problem.chunked("matmul_all_reduce", 2, 8, 4, 4), "gated_1d")
HEAD = {
    "version": 1, "grid": "g", "how": "simulated", "ficco": "0", "date": "2026-11-29",
    "machine": {"name": "mesh4"},
}  # fmt: skip


def sweep_of(path: Path) -> Any:
    """Read a sweep whose results are this file."""
    (path.parent / "sweep.json").write_text(json.dumps(HEAD))
    return read_sweep(path.parent)


# What reads a file, by the file's name. A reader that returns None measures again.
READERS: dict[str, Callable[[Path], Any]] = {
    "machine.toml": lambda path: Machine.named(str(path)),
    "schedule.toml": lambda path: ficco.Schedule.named(str(path)),
    "book.toml": lambda path: Book.named(str(path)),
    "grid.toml": lambda path: Grid.named(str(path)),
    "plan.json": ficco.load_plan,
    "sweep.json": lambda path: read_head(path.parent),
    "results.jsonl": sweep_of,
    "runs.jsonl": Journal,
    "probes.json": lambda path: Kept(path).read(probe_record._parsed, probe_record._damaged),
    "sm_90.zip": pack.Pack,
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_not_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for kind in ("a FIFO", "a link to a device", "a folder"):
        if kind == "a FIFO":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        begin = time.monotonic()
        try:
            assert READERS[name](path) is None, kind
        except FiccoError as error:
            assert any(w in str(error) for w in ("not a regular", "Is a directory", "a link")), (
                error
            )
        assert time.monotonic() - begin < 5, kind
        path.unlink() if kind != "a folder" else path.rmdir()


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("junk", [b"", b"\0" * 64, b"\xff\xfe", b"[]", b'"a"', b"{}", b"[[", b"1"])
def test_junk_is_an_error_of_ficco(name: str, junk: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(junk)
    try:
        found = READERS[name](path)
    except FiccoError:
        return
    assert found is None or not junk, "nothing is in the file"


def test_large_files_are_not_read(tmp_path: Path) -> None:
    for name, mib in (("machine.toml", 1), ("sweep.json", 1), ("plan.json", 64)):
        path = tmp_path / name
        path.touch()
        os.truncate(path, (mib << 20) + 1)
        with pytest.raises(InputError, match=f"larger than {mib} MiB"):
            READERS[name](path)
    assert len(files.read(path, None)) == (64 << 20) + 1


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 32_000) + " = 1",
        ".".join(['"="'] * 16_000) + " = 1",
        f"[{'.'.join('a' * 4_000)}]\n" + "\n".join(f"k{i} = 1" for i in range(80_000)),
        "\n".join(f"b{i}.{'.'.join('a' * 150)} = 1" for i in range(3_000)),
    ],
    ids=["key", "quoted", "header", "lines"],
)
def test_keys_that_take_the_parser_minutes_are_refused(text: str) -> None:
    begin = time.monotonic()
    with pytest.raises(InputError, match=r"line \d+ has \d+ dots; break the line"):
        reading.parsed_toml(text, "this")
    assert time.monotonic() - begin < 2


def test_fields_that_are_there_twice_are_refused() -> None:
    with pytest.raises(InputError, match="the field 'b' is there twice"):
        reading.parsed_json('{"a": [{"b": 1, "b": 2}]}', "this")
    rows = Path(data._root() / "tuned" / "h200x2.toml").read_text().partition("[[points]]")
    one = rows[1] + rows[2].partition("[[points]]")[0]
    text = rows[0] + one + one.replace("\nms = ", "\nms = 9")
    (point,) = Book.from_toml(reading.parsed_toml(text, "this"), "this").points
    assert point == Book.named("h200x2").points[0]


@pytest.mark.parametrize("field", ["name", "about", "source"])
def test_control_characters_are_no_part_of_a_machine(field: str) -> None:
    table = data.load("machines", "mesh4", "machine", InputError) | {field: "mesh4\n\x1b[2Jroot"}
    with pytest.raises(InputError, match=r"a text without control characters") as error:
        Machine.from_toml(table, "mine.toml")
    assert str(error.value).isprintable()


def test_text_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    with caplog.at_level(logging.INFO, "ficco"):
        logs.log.info("%s is not valid", "a\nficco error: b\x1b[31m\r\u202e")
    assert caplog.messages == ["a\\nficco error: b\\x1b[31m\\r\\u202e is not valid"]
    assert main(["run", "--machine", "a\x1b[31m.toml"]) == 2
    assert "\x1b" not in capsys.readouterr().err


HEADS = {
    "machine": [3, None, {"name": 3}], "how": [3, None], "grid": [[], None], "gpus": [3, [3], [{}]],
    "date": [{}, "a\nb"], "assumptions": [3], "paced": ["x"], "world": ["x"], "points": ["x"],
    "version": [2, None, {}], "profile": [3], "driver": [[]],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, each in HEADS.items() for v in each])
def test_wrong_heads_of_sweeps(field: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(HEAD | {field: value}))
    with pytest.raises(InputError):
        read_sweep(tmp_path)


RECORDS = [
    '{"shape":3}', '{"shape":["a"],"ended":true}', '{"id":"a","run":0,"ms":1.0}', "[]", "3", "null",
    '{"shape":"a","timeline":{},"regime":"eager","which":"best"}',
    '{"shape":"a","id":"b","run":"c"}',
    '{"shape":"a","id":"b","dil":"c"}', '{"shape":"a","id":{},"bad":"c","kind":"failed"}',
    '{"shape":"a","id":"b","run":0,"run":0,"ms":1.0}', '{"shape":"a","id":"b","run":0}',
    '{"shape":"a","id":"b","error":"c"}', '{"shape":"a","id":"b","run":0,"ms":1e999}',
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_wrong_records_of_sweeps(record: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(record + "\n")
    with pytest.raises(InputError, match="line 1 is not a record of a sweep"):
        Journal(path)
    assert path.read_text() == record + "\n"


def _profile() -> dict[str, Any]:
    return data.load("machines", "mesh4", "machine", InputError)


def _report(path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    (path.parent / "sweep.json").write_text(json.dumps(HEAD))
    sweep_page.write(path.parent)


def _trace(path: Path) -> None:
    asked = ["run", "--simulate", "--machine", "mesh4", "--schedule", "gated_1d", "--m", "64"]
    if main([*asked, "--n", "64", "--k", "64", "--trace", str(path)]):
        raise InputError("the command said why")


# What writes a file, by the file's name.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": lambda path: ficco.save_plan(PLAN, path),
    "results.jsonl": lambda path: replaced(path, '{"kind": "shape", "shape": "a"}\n'),
    "results.csv": lambda path: replaced(path, "op,m,n,k,dtype,world,regime,name,grain,ms,\n"),
    "book.toml": lambda path: replaced(path, "# Written by ficco sweep.\n"),
    "report.html": _report,
    "trace.json": _trace,
    "machine.toml": lambda path: write_profile(path, _profile(), again=True),
    "runs.jsonl": lambda path: Journal(path).close(),
}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """Return a folder of this user."""
    folder = tmp_path / "own"
    folder.mkdir()
    yield folder


@pytest.mark.parametrize("name", WRITERS)
class TestWriting:
    def test_a_file_of_ficco_is_replaced_whole(self, name: str, own: Path) -> None:
        path, write = own / name, WRITERS[name]
        path.touch(mode=0o600)  # as mktemp makes it
        for _ in range(2):
            write(path)
            assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_bytes() or name == "runs.jsonl"
        assert {each.name for each in own.iterdir()} <= {name, "sweep.json"}

    @pytest.mark.parametrize("mine", ["mine", '{"version": 1, "name": "mine"}', "op,m\n1,2\n"])
    def test_what_ficco_has_not_written_stays(self, name: str, mine: str, own: Path) -> None:
        path = own / name
        path.write_text(mine)
        with pytest.raises(InputError):
            WRITERS[name](path)
        assert path.read_text() == mine

    def test_no_link_is_followed(self, name: str, own: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        for contents in ("precious", None):
            other.write_text(contents) if contents else other.unlink()
            for link in (name, f".{name}.part", f"{name}.part"):  # names of earlier versions
                (own / link).unlink(missing_ok=True)
                (own / link).symlink_to(other)
                try:
                    WRITERS[name](own / name)
                except InputError:
                    assert link == name
                else:
                    assert link != name
                    (own / name).unlink()
                (own / link).unlink()
                assert (other.read_text() if contents else other.exists()) == (contents or False)

    def test_a_folder_of_another_user_is_refused(
        self, name: str, own: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if os.geteuid() == 0:
            os.chown(own, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(InputError):
            WRITERS[name](own / name)
        assert {each.name for each in own.iterdir()} <= {"sweep.json"}


def test_folders_and_links_of_others(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make files of other users")
    own, other, link = tmp_path / "own", tmp_path / "other", tmp_path / "link"
    own.mkdir()
    other.mkdir()
    link.symlink_to(own)
    files.write(link / "mine", "a")
    os.chown(link, 12345, -1, follow_symlinks=False)
    os.chown(other, 12345, -1)
    for folder, said in ((link, "is a link of user 12345"), (other, "belongs to user 12345, who")):
        for use in (files.make_folder, files.check_writable):
            with pytest.raises(OSError, match=said):
                use(folder / "new" if use is files.make_folder else folder / "file")
    assert list(other.iterdir()) == []
    (own / "file").write_text("a")
    os.chown(own / "file", 12345, -1)
    with pytest.raises(OSError, match="the file belongs to user 12345"):
        files.write(own / "file", "b", "a")
    assert (own / "file").read_text() == "a"
    shared = tmp_path / "shared"  # as /tmp
    shared.mkdir()
    shared.chmod(0o1777)
    files.write(shared / "file", "a")
    with pytest.raises(OSError, match="the file exists; remove it"):
        files.write(shared / "file", "b")


def test_foreign_journals_stay(tmp_path: Path) -> None:
    """A file of this name is no sweep's; its end is dropped only if a sweep began to write it."""
    path = tmp_path / "runs.jsonl"
    for foreign in ("notes without an end of line", '{"mine": 1}', '{"shape": "a"}'):
        path.write_text(foreign)
        with pytest.raises(InputError, match="not the beginning of a record"):
            Journal(path)
        assert path.read_text() == foreign
    for torn in ("{", '{"sha', '{"shape":"a","id":"b'):
        path.write_text('{"shape":"a","ended":true}\n' + torn)
        with Journal(path) as journal:
            assert set(journal.ended) == {"a"}
        assert path.read_text() == '{"shape":"a","ended":true}\n'
