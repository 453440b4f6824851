"""Programs that begin with PyTorch imported: to import it takes longer than most of what they do.

Each runs in a process of its own, forked from one of the servers of the run (`fork_server`), which
conftest.py starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fork_server import KINDS, Request, collect_seldom, run_request

__all__ = [
    "Forked", "Servers", "collect_seldom", "ended", "fork_from_here", "forked_rank", "run_forked",
    "run_ranks",
]  # fmt: skip

_FOLDER = "FICCO_TEST_FORK_SERVERS"  # the environment variable of the servers' sockets
_here = False


class Servers:
    """The servers of this run. They end when `close` is called, or when this process ends."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ficco-forks")
        os.environ[_FOLDER] = self._folder
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in KINDS]
            for kind, listening in zip(KINDS, sockets, strict=True):
                listening.bind(str(Path(self._folder, kind)))
                listening.listen(64)
            numbers = [listening.fileno() for listening in sockets]
            # -P: the installed ficco is imported, not that of the current folder.
            command = [sys.executable, "-P", Path(__file__).with_name("fork_server.py"), *numbers]
            self._process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.PIPE, pass_fds=numbers,
                start_new_session=True,
            )  # fmt: skip

    @staticmethod
    def are_there() -> bool:
        """Return whether this process was started by one that has servers."""
        return _FOLDER in os.environ

    def close(self) -> None:
        """End the servers."""
        del os.environ[_FOLDER]
        self._process.communicate()
        shutil.rmtree(self._folder)


def fork_from_here() -> None:
    """Let this process, which has PyTorch imported and no threads, be the one that is forked."""
    global _here  # noqa: PLW0603
    _here = True


def _requested(request: Request, kind: str) -> socket.socket:
    """Send a request to a server, and return the connection."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(Path(os.environ[_FOLDER], kind)))
    server.sendall(json.dumps(request._asdict()).encode() + b"\n")
    return server


class Forked:
    """What `subprocess.Popen([python, options..., SCRIPT, arguments...])` gives, so far as needed.

    Args:
        command: the script's name is the first that ends in ".py". The options are not looked at;
            the process has those of the server, and "-X faulthandler".
        stdout: a file on disk, for what it says. None is this process's own, and needs
            `fork_from_here`.
        stderr: the same, or subprocess.STDOUT.
        env: its whole environment, once PyTorch is there. From the folders of LD_LIBRARY_PATH it
            takes the drivers (or their test doubles), and no other library.
        folder: where it runs; this process's folder unless given.
        kind: one of `fork_server.KINDS`: which modules are imported already. "" is "functions", or
            "torch" if TRITON_INTERPRET is in `env`, because Triton reads it when it is imported.
    """

    def __init__(
        self, command: Sequence[object], stdout: IO[str] | None, stderr: IO[str] | int | None,
        env: dict[str, str], folder: Path | None = None, kind: str = "",
    ) -> None:  # fmt: skip
        words = [str(word) for word in command]
        first = next(i for i, word in enumerate(words) if word.endswith(".py"))
        told = stdout if isinstance(stderr, int) else stderr
        files = [str(Path(file.name).absolute()) if file else None for file in (stdout, told)]
        request = Request(words[first:], str(folder or Path.cwd()), env, files, sys.path)
        self._code: int | None = None
        if _here:
            self._server = None
            self.pid = os.fork()
            if self.pid == 0:
                run_request(request)
            self._ends = os.pidfd_open(self.pid)
            return
        assert None not in files
        kind = kind or ("torch" if "TRITON_INTERPRET" in env else "functions")
        self._server = _requested(request, kind)
        self._lines = b""
        self.pid = self._answer(None) or 0
        assert self.pid

    def _answer(self, timeout: float | None) -> int | None:
        """Return the number in the server's next line, or None if it does not come in time."""
        assert self._server
        while b"\n" not in self._lines:
            if not select.select([self._server], [], [], timeout)[0]:
                return None
            found = self._server.recv(64)
            assert found, "the fork server has ended"
            self._lines += found
        line, _, self._lines = self._lines.partition(b"\n")
        return int(line)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._code is None and self._server:
            self._code = self._answer(0)
        elif self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._ends)
        return self._code

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise TimeoutExpired where it does not come in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            if self._server:
                self._code = self._answer(left)
            else:
                select.select([self._ends], [], [], left)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """Kill the process if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def forked_rank(
    command: list[str], stdout: IO[str], stderr: int, env: dict[str, str], pass_fds: Any
) -> Forked:
    """Start a rank of a measurement, which looks after its parent: what forks it is the parent."""
    own = {name: value for name, value in env.items() if name != "FICCO_PARENT"}
    return Forked(command, stdout, stderr, own)


def ended(ranks: Sequence[Any], limit_s: float) -> list[int | None]:
    """Wait until all ranks have ended, or one has failed; kill the others; return exit codes.

    Args:
        ranks: processes, as subprocess.Popen or Forked.
        limit_s: then all are killed. A rank that was killed has None.
    """
    end = time.monotonic() + limit_s
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):
                break  # the others would wait for it
            time.sleep(0.05)
    finally:
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
    return codes


def run_forked(
    script: Path, *arguments: object, folder: Path, environment: dict[str, str], timeout: float,
    kind: str = "",
) -> tuple[int, str]:  # fmt: skip
    """Run `python SCRIPT [arguments...]`, and end what it leaves behind.

    Args:
        script: run as the program; modules beside it can be imported.
        arguments: behind the script's name.
        folder: where it runs; a file of what it says is left there.
        environment: set in addition to this process's, once PyTorch is there.
        timeout: seconds; then it is killed.
        kind: see `Forked`.

    Returns:
        The exit code (negative: of a signal; that of a kill after the timeout) and what it said.
    """
    with (folder / "said.txt").open("w+") as said:
        process = Forked(
            [script, *arguments], said, subprocess.STDOUT, os.environ | environment, folder, kind
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return code, said.read()


def run_ranks(
    world: int, script: Path, *arguments: object, folder: Path, environment: dict[str, str],
    timeout: float, kind: str = "",
) -> list[str]:  # fmt: skip
    """Run `python SCRIPT [arguments...]` on all ranks, with what torchrun sets; each must end well.

    Args:
        world: number of ranks.
        script: see `run_forked`.
        arguments: behind the script's name.
        folder: where all run; a file of what each rank says is left there.
        environment: set in addition to this process's.
        timeout: seconds; then all are killed.
        kind: see `Forked`.

    Returns:
        What each rank said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    files = [(folder / f"rank{rank}.txt").open("w") for rank in range(world)]
    ranks = [
        Forked(
            [script, *arguments], file, subprocess.STDOUT,
            os.environ | meet | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, folder,
            kind,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    codes = ended(ranks, timeout)
    for file in files:
        file.close()
    said = [Path(file.name).read_text() for file in files]
    assert codes == [0] * world, f"{codes}\n" + "\n".join(said)
    return said
