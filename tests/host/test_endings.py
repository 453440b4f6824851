"""How commands end from outside: a rank that dies, SIGTERM, full disks, no driver; and forks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import ficco
from ficco.core import data, files

COMMAND = [sys.executable, "-P", "-m", "ficco"]
SMALL = ["--m", "67", "--n", "29", "--k", "31", "--engine", "host"]
RANKS = 3


def ranks_of(parent: int) -> list[int]:
    """Return a process's children."""
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(number) for number in path.read_text().split()]


def left_of(session: int) -> list[str]:
    """Return processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(path.parent.name)
    return found


def until(true: Callable[[], Any], seconds: float) -> Any:
    """Return the first result that is true, or the last one."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


class TestRanks:
    """`--processes`, whose ranks run for long."""

    def start(self, folder: Path, started: int = RANKS) -> tuple[subprocess.Popen[str], list[int]]:
        """Start it; return its ranks, too, once there are so many."""
        run = subprocess.Popen(
            [*COMMAND, "run", *SMALL, "--ranks", str(RANKS), "--iters", "100000", "--processes"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        ranks = until(lambda: found if len(found := ranks_of(run.pid)) >= started else [], 60)
        assert len(ranks) >= started
        return run, ranks

    @pytest.mark.parametrize("victim", [0, RANKS - 1])
    def test_a_rank_that_dies_as_it_starts_ends_the_others(
        self, torch: Any, tmp_path: Path, victim: int
    ) -> None:
        run, ranks = self.start(tmp_path)
        os.kill(ranks[victim], signal.SIGKILL)
        try:
            _, told = run.communicate(timeout=60)
        finally:
            os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
        assert run.returncode == 1 and f"rank {victim} was ended by signal 9" in told, told
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("started", [1, RANKS])
    def test_sigterm_ends_them(self, torch: Any, tmp_path: Path, started: int) -> None:
        """Also while they are started."""
        run, ranks = self.start(tmp_path, started)
        run.send_signal(signal.SIGTERM)
        try:
            run.communicate(timeout=60)
        finally:
            os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
        assert run.returncode == 128 + signal.SIGTERM
        assert until(lambda: not left_of(run.pid), 5), left_of(run.pid)
        # A process that has ended stays in /proc until its new parent has read its status.
        assert until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 20)
        assert not list(tmp_path.iterdir())

    def test_they_end_with_a_command_that_is_killed(self, torch: Any, tmp_path: Path) -> None:
        run, ranks = self.start(tmp_path, RANKS)
        until(lambda: all(worked_s(rank) > 1.5 for rank in ranks), 60)  # they have begun
        run.kill()
        try:
            run.communicate(timeout=60)
            alive = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
            assert until(lambda: not left_of(run.pid), 10), alive
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        assert run.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["run", *SMALL, "--iters", "1", "--trace", "/dev/full"], 2, "not a regular file"),
        (["explain", "--machine", "cuda"], 2, "libcuda.so.1"),
        (["plan", "--schedule", "auto", "--machine", "cuda"], 2, "libcuda.so.1"),
        (["run", "--machine", "host", "--m", f"{10**24}"], 2, "from 1 to 2147483647"),
    ],
)
def test_one_line_says_what_was_wrong(args: list[str], code: int, words: str) -> None:
    if "cuda" in args and not _no_driver():
        pytest.skip("there is a driver")
    done = subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert words in done.stderr, done.stderr


def _no_driver() -> bool:
    from ficco.engine import cuda

    try:
        cuda.served_version()
    except cuda.GpuError:
        return True
    return False


def test_a_forked_process_ends_and_makes_a_node_of_its_own() -> None:
    code = (
        "import os, signal, sys, numpy as np, ficco\n"
        "xs = [np.ones((4, 4), np.float32)] * 2\n"
        "node = ficco.Node(2)\n"
        "node.all_gather_matmul(xs, xs)\n"
        "if os.fork() == 0:\n"
        "    signal.alarm(20)\n"
        "    try:\n"
        "        node.all_gather_matmul(xs, xs)\n"
        "    except ficco.EngineError as error:\n"
        "        assert 'was forked' in str(error), error\n"
        "    node.close()\n"
        "    with ficco.Node(2) as other:\n"
        "        other.all_gather_matmul(xs, xs)\n"
        "    del node\n"
        "    sys.exit(7)\n"
        "_, status = os.wait()\n"
        "assert os.waitstatus_to_exitcode(status) == 7, status\n"
        "node.all_gather_matmul(xs, xs)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_a_closed_node_has_no_timeline() -> None:
    with ficco.Node(2) as node:
        node.all_gather_matmul([np.ones((2, 2), np.float32)] * 2, [np.eye(2, dtype="f4")] * 2)
        assert node.timeline().spans
    with pytest.raises(ficco.EngineError, match="closed"):
        node.timeline()


def worked_s(process: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def ended(command: list[str], folder: Path, begun: Callable[[int], Any]) -> tuple[int, float]:
    """Start a command, send it SIGTERM once it has begun; return its code, and how long it took."""
    run = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    try:
        until(lambda: run.poll() is not None or begun(run.pid), 120)
        assert run.poll() is None, run.communicate()[1]
        begin = time.monotonic()
        run.send_signal(signal.SIGTERM)
        code = run.wait(60)
        lasted = time.monotonic() - begin
    finally:
        os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
    assert until(lambda: not left_of(run.pid), 10), left_of(run.pid)
    return code, lasted


LARGE = ["--m", "4096", "--n", "4096", "--k", "4096", "--machine", "host"]


@pytest.mark.parametrize(
    "args",
    [
        ["run", *LARGE, "--ranks", "4", "--iters", "100000"],
        ["run", "--machine", "mesh4", "--m", "8192", "--n", "8192", "--k", "8192"],
        ["sweep", "laptop", "--machine", "mesh4"],
        ["explain", "--machine", "PROFILE", "--ranks", "64", "--m", "65601"],
    ],
)
def test_sigterm_ends_a_command_at_work(args: list[str], tmp_path: Path) -> None:
    """Each would work on for long; the bound is far above a second, for a busy machine."""
    profile, temporary = tmp_path / "large.toml", tmp_path / "temporary"
    temporary.mkdir()
    shipped = data.text("machines", "h200x8", "machine", ficco.MachineError)
    profile.write_text(shipped.replace("devices = 8", "devices = 64"))
    args = [str(profile) if word == "PROFILE" else word for word in args]
    args += ["--out", str(tmp_path / "swept")] if args[0] == "sweep" else []
    code, lasted = ended([*COMMAND, *args], temporary, lambda process: worked_s(process) > 2)
    assert code == 128 + signal.SIGTERM and lasted < 15
    assert not list(temporary.iterdir())


IN_A_NATIVE_CALL = """
import hashlib, pathlib, subprocess, sys
from ficco.core import files
from ficco.cli.streams import ending
with ending(), files.folder("ficco-test-"):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    pathlib.Path(sys.argv[1]).touch()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # minutes, in which no handler runs
"""


def test_sigterm_ends_a_native_call_with_its_children_and_folders(tmp_path: Path) -> None:
    begun, temporary = tmp_path / "begun", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", IN_A_NATIVE_CALL, str(begun)]
    code, lasted = ended(command, temporary, lambda process: begun.exists())
    assert code == 128 + signal.SIGTERM and lasted < 15
    assert not list(temporary.iterdir())


def test_ctrl_c_during_imports_is_one_line() -> None:
    """The command's modules take a tenth of a second to import."""
    code = """
import runpy, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "ficco.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
runpy.run_module("ficco", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ficco: interrupted\n")


def test_python_ends_while_daemon_threads_make_calls() -> None:
    """They end between two calls, not in native code, which would abort the process."""
    code = """
import threading, time
import numpy as np
import ficco
node = ficco.Node(2)
xs, ws = [np.ones((40, 16), np.float32)] * 2, [np.ones((16, 8), np.float32)] * 2
def call():
    while True:
        node.all_gather_matmul(xs, ws, schedule="hetero_fused_1d")
for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.3)
"""
    runs = [
        subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    ended = [(run.communicate(timeout=60)[1], run.returncode) for run in runs]
    assert ended == [("", 0)] * 6


def test_a_child_forked_during_calls_makes_a_node_of_its_own() -> None:
    """Whenever the fork comes; BLAS has its threads again."""
    node, stop = ficco.Node(2), threading.Event()
    xs, ws = [np.ones((4, 4), np.float32)] * 2, [np.ones((4, 2), np.float32)] * 2
    node.all_gather_matmul(xs, ws)  # NumPy imports modules at its first call
    before = threads_of_blas()

    def call() -> None:
        while not stop.is_set():
            node.all_gather_matmul(xs, ws)

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(30):
        time.sleep(0.002)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends a child that waits
            right = threads_of_blas() == before
            with ficco.Node(2) as own:
                right &= bool((own.all_gather_matmul(xs, ws)[0] == 4).all())
            os._exit(0 if right and threads_of_blas() == before else 1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    thread.join()
    node.close()


def threads_of_blas() -> list[int]:
    """Return how many threads the BLAS libraries of this process use."""
    found = threadpoolctl.threadpool_info()
    return [each["num_threads"] for each in found if each["user_api"] == "blas"]


def test_an_exception_of_a_handler_is_no_unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler often raises TimeoutError, which is an OSError."""

    def handle(*_: object) -> None:
        raise TimeoutError("time is up")

    monkeypatch.setattr(files, "read", lambda *_: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            data.text("machines", "h200x8", "machine", ficco.MachineError)
    finally:
        signal.signal(signal.SIGUSR1, before)
