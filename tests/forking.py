"""Programs that begin with PyTorch imported: to import it takes longer than most of what they do.

Each runs in a process of its own, forked from one (the fork server of multiprocessing) that has
imported PyTorch, and modules of ficco that do not import it. Triton is not among it: it reads
TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any
from unittest import mock

_CONTEXT: Any = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor.parallel", "ficco.engines.gpu"])
_DRIVERS = ("libcuda.so.1", "libamdhip64.so.7")


def collect_seldom() -> None:
    """Let Python look for cycles less often, and not among what there is now: that stays."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def fork_from_here() -> None:
    """Let this process, which has PyTorch imported and no threads, be the one that is forked."""
    global _CONTEXT  # noqa: PLW0603
    _CONTEXT = multiprocessing.get_context("fork")


def _start_server() -> None:
    """Start the fork server, which imports the installed ficco: not that of the current folder."""
    with mock.patch.dict(os.environ, {"PYTHONSAFEPATH": "1"}):
        forkserver.ensure_running()


class Forked:
    """What `subprocess.Popen([python, options..., SCRIPT, arguments...])` gives, so far as needed.

    Args:
        command: the script's name is the first that ends in ".py". The options are not looked at;
            the process has those of this one, and "-X faulthandler".
        stdout: a file on disk, for what it says. None is this process's own, and needs
            `fork_from_here`.
        stderr: the same, or subprocess.STDOUT.
        env: its whole environment, once PyTorch is there. From the folders of LD_LIBRARY_PATH it
            takes the drivers (or their test doubles), and no other library.
        folder: where it runs; this process's folder unless given.
    """

    def __init__(
        self, command: Sequence[object], stdout: IO[str] | None, stderr: IO[str] | int | None,
        env: dict[str, str], folder: Path | None = None,
    ) -> None:  # fmt: skip
        words = [str(word) for word in command]
        first = next(i for i, word in enumerate(words) if word.endswith(".py"))
        told = stdout if isinstance(stderr, int) else stderr
        files = [Path(file.name).absolute() if file else None for file in (stdout, told)]
        assert None not in files or _CONTEXT.get_start_method() == "fork"
        self._process = _CONTEXT.Process(
            target=_be, args=(words[first:], folder or Path.cwd(), env, files)
        )
        if _CONTEXT.get_start_method() == "forkserver":
            _start_server()
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raise TimeoutExpired where it does not come in time."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def forked_rank(command: list[str], stdout: IO[str], stderr: int, env: dict[str, str]) -> Forked:
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
    script: Path, *arguments: object, folder: Path, environment: dict[str, str], timeout: float
) -> tuple[int, str]:
    """Run `python SCRIPT [arguments...]`, and end what it leaves behind.

    Args:
        script: run as the program; modules beside it can be imported.
        arguments: behind the script's name.
        folder: where it runs; a file of what it says is left there.
        environment: set in addition to this process's, once PyTorch is there.
        timeout: seconds; then it is killed.

    Returns:
        The exit code (negative: of a signal; that of a kill after the timeout) and what it said.
    """
    with (folder / "said.txt").open("w+") as said:
        process = Forked(
            [script, *arguments], said, subprocess.STDOUT, os.environ | environment, folder
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
    timeout: float,
) -> list[str]:  # fmt: skip
    """Run `python SCRIPT [arguments...]` on all ranks, with what torchrun sets; each must end well.

    Args:
        world: number of ranks.
        script: see `run_forked`.
        arguments: behind the script's name.
        folder: where all run; a file of what each rank says is left there.
        environment: set in addition to this process's.
        timeout: seconds; then all are killed.

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
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    codes = ended(ranks, timeout)
    for file in files:
        file.close()
    said = [Path(file.name).read_text() for file in files]
    assert codes == [0] * world, f"{codes}\n" + "\n".join(said)
    return said


def _be(
    words: list[str], folder: Path, environment: dict[str, str], files: list[Path | None]
) -> None:
    os.setpgid(0, 0)
    for descriptor, path in enumerate(files, 1):
        if path is not None:
            with path.open("a") as file:
                os.dup2(file.fileno(), descriptor)
    faulthandler.enable()
    collect_seldom()
    searched = os.environ.get("LD_LIBRARY_PATH", "")
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("LD_LIBRARY_PATH", "") != searched:
        _load_drivers(environment["LD_LIBRARY_PATH"].split(os.pathsep))
    os.chdir(folder)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _load_drivers(folders: Sequence[str]) -> None:
    """Load each driver from the first folder that has it; its name stands for that one from now on.

    The dynamic linker reads LD_LIBRARY_PATH only when a process begins.
    """
    for name in _DRIVERS:
        found = next((path for path in (Path(f, name) for f in folders) if path.exists()), None)
        if found is not None:
            assert name not in Path("/proc/self/maps").read_text(), f"{name} is loaded already"
            ctypes.CDLL(str(found))
