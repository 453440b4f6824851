"""Commands that cannot be served: one line on stderr, an exit code, no traceback."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import call

from ficco.cli import launch
from ficco.core import data

COMMAND = [sys.executable, "-P", "-m", "ficco"]
RUN = ["run", "--m", "64", "--n", "32", "--k", "32", "--iters", "1", "--schedule", "serial"]
RUN += ["--engine", "host"]


def ficco(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which $FICCO is the command."""
    given = os.environ | {"FICCO": " ".join(COMMAND), "RUN": " ".join(RUN)} | environment
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False, env=given
    )


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH without PyTorch: `ficco doctor` takes a second to import it."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "torch.py").write_text("raise ModuleNotFoundError('hidden', name='torch')\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines on stderr, without those of progress, which a busy host has."""
    lines = done.stderr.splitlines()
    return [line for line in lines if not re.fullmatch(r"ficco \w+: .*, \d+ s", line)]


def refused(capsys: Any, words: str, *args: str) -> None:
    """Hold a command against what the rules say of one that is refused."""
    code, out, err = call(capsys, *args)
    assert code == 2 and out == "", (args, out)
    assert words in err and err.count("\n") == 1, (args, err)


class TestStreams:
    @pytest.mark.parametrize("command", ["doctor", "$RUN", "plan", "plan --json"])
    def test_a_closed_stdout(self, command: str, no_torch: str) -> None:
        done = ficco(f"$FICCO {command} >&-", PYTHONPATH=no_torch)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.count("\n") == 1 and "standard output, which receives" in done.stderr

    def test_a_closed_stderr_and_stdin(self) -> None:
        done = ficco("$FICCO $RUN 2>&- <&-")
        assert done.returncode == 0 and "serial" in done.stdout
        done = ficco("$FICCO plan --check - <&-")
        assert done.returncode == 2 and "stdin is not JSON" in done.stderr

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            ("run --help", "standard output cannot be written: No space left on device"),
            ("$RUN", "standard output cannot be written: No space left on device"),
            ("$RUN --json", "standard output cannot be written: No space left on device"),
            ("plan", "standard output cannot be written: No space left on device"),
            ("plan --json", "standard output cannot be written: No space left on device"),
        ],
    )
    def test_a_full_device(self, command: str, words: str) -> None:
        done = ficco(f"$FICCO {command} >/dev/full", PYTHONUNBUFFERED="")
        assert done.returncode == 1 and words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr

    @pytest.mark.parametrize(
        "command", ["doctor", "run --help", "plan --ranks 16 --json", "$RUN", "list"]
    )
    def test_a_reader_that_leaves(self, command: str, no_torch: str) -> None:
        for reader, unbuffered in (("head -1 | cut -c 1-9", ""), ("true", ""), ("true", "1")):
            line = f"$FICCO {command} | {reader}; echo ${{PIPESTATUS[0]}}"
            done = ficco(line, PYTHONPATH=no_torch, PYTHONUNBUFFERED=unbuffered)
            assert done.stdout.splitlines()[-1] == "0" and told(done) == []

    def test_a_reader_that_leaves_before_a_verdict(self, tmp_path: Path) -> None:
        """The exit code is still that of the verdict."""
        plan, wrong = tmp_path / "plan.json", tmp_path / "wrong.json"
        assert ficco(f"$FICCO plan --m 64 --ranks 2 --json > {plan}").returncode == 0
        table = json.loads(plan.read_text())
        steps = table["ranks"][0]["steps"]
        table["ranks"][0]["steps"] = [step for step in steps if step["kind"] != "wait"]
        wrong.write_text(json.dumps(table))
        for file, code in ((plan, "0"), (wrong, "1")):
            done = ficco(f"$FICCO plan --check {file} | true; echo ${{PIPESTATUS[0]}}")
            assert done.stdout.splitlines()[-1] == code and told(done) == [], done.stderr

    @pytest.mark.parametrize(
        "environment",
        [
            {"PYTHONIOENCODING": "ascii"},
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        ],
    )
    def test_a_stdout_of_ascii(self, tmp_path: Path, environment: dict[str, str]) -> None:
        mine = tmp_path / "mine.toml"
        text = Path("schedules/machines/mesh4.toml")
        text = Path(__file__).resolve().parents[2] / text
        lines = [
            'about = "ein Ger\u00e4t"' if line.startswith("about") else line
            for line in text.read_text().splitlines()
        ]
        mine.write_text("\n".join(lines), encoding="utf-8")
        done = ficco(f"$FICCO $RUN --machine {mine}", **environment)
        assert done.returncode == 0 and told(done) == []
        assert "ein Ger\\xe4t" in done.stdout and ". waiting" in done.stdout
        assert done.stdout.isascii()
        pictured = [line for line in done.stdout.splitlines() if line.endswith("|")]
        assert len({len(line) for line in pictured}) == 1  # columns stand below one another


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    deep, long = "[" * 5000, "1" * 5000
    for name, text, words in (
        ("deep.toml", f"x = {deep}{']' * 5000}\n", "nested too deeply"),
        ("long.toml", f"x = {long}\n", "a number at line 1 has more than 4300 digits"),
        ("empty.toml", "", "is empty"),
        ("cut.toml", "x = [1, ", "not valid TOML"),
        ("null.toml", "x = 1\0", "not valid TOML"),
    ):
        (folder / name).write_text(text)
        yield folder / name, words
    (folder / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    yield folder / "bytes.toml", "not a text in UTF-8 (byte 0xff at position 0)"
    (folder / "folder.toml").mkdir()
    yield folder / "folder.toml", "Is a directory"
    yield folder / "none.toml", "No such file"


def test_files_of_toml(capsys: Any, tmp_path: Path) -> None:
    for file, words in _files(tmp_path):
        named = str(file)
        refused(capsys, words, "explain", "--machine", named)
        refused(capsys, words, "run", "--machine", named)
        refused(capsys, words, "explain", "--machine", "h100x2", "--book", named)
        refused(capsys, words, "plan", "--schedule", named)
        refused(capsys, words, "sweep", named, "--out", str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_a_schedule_of_axes_that_do_not_fit(capsys: Any, tmp_path: Path) -> None:
    """The message names the file, too, where each field of it is right by itself."""
    file = tmp_path / "mine.toml"
    file.write_text('transport = "sm"\ncut = "rows"\nstart = "local_first"\n')
    refused(capsys, f"{file}: transport='sm' with", "plan", "--schedule", str(file))
    refused(capsys, f"{file}: transport='sm' with", "run", "--schedule", str(file))


def test_files_of_json(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text, words in (
        ("[" * 5000, "nested too deeply"), ("1" * 5000, "than 4300 digits"), ("", "it is empty"),
        ("\ufeff", "it is empty"),
        ('\ufeff{"version": NaN}', "version"), ('{"version": Infinity}', "version"),
    ):  # fmt: skip
        file.write_text(text)
        refused(capsys, words, "plan", "--check", str(file))
    refused(capsys, "Is a directory", "plan", "--check", str(tmp_path))
    _, plan, _ = call(capsys, "plan", "--m", "64", "--json")
    table = json.loads(plan)
    for field in ("world", "k"):
        table["problem"][field] = float("nan")
        file.write_text(json.dumps(table))
        refused(capsys, "nan", "plan", "--check", str(file))
    for name in ("sweep.json", "results.jsonl"):
        folder = tmp_path / f"sweep of {name}"
        folder.mkdir()
        head = {"version": 1, "grid": "g", "how": "simulated", "machine": {}, "ficco": "0"}
        (folder / "sweep.json").write_text(json.dumps(head))
        (folder / name).write_text('{"a": ' * 5000 + "\n")
        refused(capsys, "nested too deeply", "sweep", "--report", str(folder))


BOOK = """
machine = "h100x2"
ficco = "0.1.0"
driver = "13.0"
date = "2026-11-21"

[[points]]
op = "all_gather_matmul"
dtype = "bfloat16"
regime = "captured"
ranks = 2
m = 8192
n = 4096
k = 8192
piece_bytes = 1
ms = 0.497
serial_ms = 0.803
schedule = { name = "serial", grain = 1, route = "all_peers", transport = "collective" }
"""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ms", "nan"), ("ms", "inf"), ("ms", "-1"), ("ms", "0"), ("ms", '"fast"'), ("ms", "true"),
        ("serial_ms", "nan"), ("serial_ms", "-inf"), ("m", "nan"), ("m", "1.5"), ("m", "true"),
        ("m", '"8"'), ("ranks", "0"), ("piece_bytes", "-1"), ("machine", "[]"), ("ficco", "1"),
    ],
)  # fmt: skip
def test_books(capsys: Any, tmp_path: Path, field: str, value: str) -> None:
    file = tmp_path / "book.toml"
    asked = ("explain", "--machine", "h100x2", "--book", str(file))
    file.write_text(BOOK)
    assert call(capsys, *asked)[0] == 0
    rows = [f"{field} = {value}" if row.split(" = ")[0] == field else row
            for row in BOOK.splitlines()]  # fmt: skip
    file.write_text("\n".join(rows))
    refused(capsys, f"tuning table '{file}'", *asked)


class TestEnvironment:
    @pytest.mark.parametrize("name", ["FICCO_MACHINE", "FICCO_BOOK"])
    @pytest.mark.parametrize("value", ["nope", "/no/such.toml", "DEEP"])
    def test_what_names_nothing(
        self, capsys: Any, tmp_path: Path, monkeypatch: Any, name: str, value: str
    ) -> None:
        """In commands and functions, whether it would be taken or not."""
        import numpy as np

        import ficco as package

        files = dict(_files(tmp_path))
        monkeypatch.setenv(name, str(next(iter(files))) if value == "DEEP" else value)
        words = f": {name}: "
        machine = ("--machine", "h100x2")
        refused(capsys, words, "explain", *machine)
        refused(capsys, words, "explain", *machine, "--by", "rule")
        refused(capsys, words, "run", "--simulate", *machine, "--schedule", "auto")
        refused(capsys, words, *RUN[:-3], "auto", "--engine", "host")
        with package.Node(2, machine="mesh4", schedule="auto") as node:
            xs, ws = [np.ones((2, 2), np.float32)] * 2, [np.ones((2, 2), np.float32)] * 2
            with pytest.raises(package.InputError, match=f"^{name}: "):
                node.all_gather_matmul(xs, ws)

    @pytest.mark.parametrize("value", ["inf", "2", "yes", "nan"])
    def test_switches_and_levels(self, capsys: Any, monkeypatch: Any, value: str) -> None:
        import ficco as package
        from ficco.kernels import pack

        monkeypatch.setenv("FICCO_LOG", value)
        refused(capsys, f"FICCO_LOG='{value}' is not a level", *RUN)
        with pytest.raises(package.InputError, match="FICCO_LOG"):
            package.Node(1)
        monkeypatch.setenv("FICCO_LOG", "")
        monkeypatch.setenv("FICCO_PACK", value)
        with pytest.raises(package.InputError, match=f"FICCO_PACK='{value}'"):
            pack.why_not(90)

    @pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "many"}, {"WORLD_SIZE": "4"}])
    def test_ranks_of_nobody(
        self, torch: Any, capsys: Any, monkeypatch: Any, given: dict[str, str]
    ) -> None:
        for name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"TORCHELASTIC_RUN_ID": "x"} | given).items():
            monkeypatch.setenv(name, value)
        refused(capsys, "which torchrun sets", *RUN)


def test_timeouts(capsys: Any, tmp_path: Path) -> None:
    for value in ("0", "-1", "nan", "inf", "1e300"):
        refused(capsys, "--timeout=", *RUN, "--timeout", value)
        sweep = ("sweep", data.names("sweeps")[0], "--out", str(tmp_path / "out"))
        refused(capsys, "--timeout=", *sweep, "--timeout", value)


@pytest.mark.parametrize("more", [[], ["--simulate", "--machine", "mesh4"]])
def test_traces_that_cannot_be_written(capsys: Any, tmp_path: Path, more: list[str]) -> None:
    args = [arg for arg in RUN if arg not in ("--engine", "host")] + more
    for name in ("", str(tmp_path), "a\0b"):
        refused(capsys, f"--trace {name!r}: ", *args, "--trace", name)
    mine = tmp_path / "mine.json"
    mine.write_text("{}")
    refused(capsys, "ficco has not written it", *args, "--trace", str(mine))
    refused(capsys, "'/dev/full': it is not a regular file", *args, "--trace", "/dev/full")


class TestLogs:
    def test_commands_log(self) -> None:
        done = ficco("$FICCO $RUN", FICCO_LOG="info")
        lines = told(done)
        assert done.returncode == 0 and all(line.startswith("ficco info: ") for line in lines)
        assert "begins" in lines[0] and "ends with exit code 0" in lines[-1]
        assert any("engine host, machine mesh4, schedules serial" in line for line in lines)
        assert told(ficco("$FICCO $RUN", FICCO_LOG="")) == []

    def test_lines_have_the_rank(self, torch: Any) -> None:
        done = ficco("$FICCO $RUN --processes --ranks 2", FICCO_LOG="INFO")
        assert done.returncode == 0
        for rank in range(2):
            assert f"ficco [rank {rank}] info: engine host" in done.stderr
            assert f"ficco info: rank {rank} is process " in done.stderr


class TestFoldersOfKilledRuns:
    """By their locks: the kernel releases one when the last process that holds it ends."""

    @pytest.fixture
    def shared(self, tmp_path: Path, monkeypatch: Any) -> Path:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return tmp_path

    def test_those_of_the_dead_are_removed_alone(self, shared: Path) -> None:
        left, held, bare, old, other = (shared / f"ficco-run-{n}" for n in "abcde")
        for folder in (left, held, bare, old):
            folder.mkdir()
        for folder in (left, held):
            (folder / "lock").touch()
            (folder / "store").touch()
        os.utime(old, (0, 0))  # of a release that had no locks
        other.symlink_to(shared / "target")
        (shared / "target").mkdir()
        (shared / "target" / "lock").touch()
        (shared / "ficco-run-file").touch()
        with (held / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with (
                launch.rendezvous_folder() as mine,
                launch.rendezvous_folder() as second,
            ):
                assert mine.path.is_dir() and second.path.is_dir() and mine.path != second.path
                assert not left.exists() and not old.exists()
                assert (held / "store").exists() and bare.exists()
        assert not mine.path.exists() and not second.path.exists()
        assert (shared / "target" / "lock").exists() and (shared / "ficco-run-file").exists()
        with launch.rendezvous_folder():
            assert not held.exists()

    def test_those_of_other_users_stay(self, shared: Path, monkeypatch: Any) -> None:
        left = shared / "ficco-run-a"
        left.mkdir()
        (left / "lock").touch()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with launch.rendezvous_folder():
            assert left.exists()

    def test_a_run_that_is_killed(self, torch: Any, tmp_path: Path) -> None:
        given = os.environ | {"TMPDIR": str(tmp_path)}
        slow = [*COMMAND, *RUN, "--iters", "1000000", "--processes", "--ranks", "2"]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            slow, env=given, start_new_session=True, stdout=null, stderr=null
        )
        try:
            while not (found := [*tmp_path.glob("ficco-run-*/store")]):
                assert process.poll() is None
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.wait()
        assert found[0].parent.exists()
        deadline = time.monotonic() + 60
        while found[0].parent.exists() and time.monotonic() < deadline:  # ranks may end later
            again = ficco("$FICCO $RUN --processes --ranks 1", TMPDIR=str(tmp_path))
            assert again.returncode == 0, again.stderr
        assert not [*tmp_path.glob("*ficco-run-*")]
