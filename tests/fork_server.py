"""Starts programs as forks of processes that have imported what they need: see `forking`.

    python fork_server.py DESCRIPTOR...

The descriptors are listening sockets, one for each of KINDS. When a program begins, the modules of
its kind, and of the kinds above it, are imported already. PyTorch's compiler and ficco's functions
import Triton, which reads TRITON_INTERPRET at that time. The server imports nothing before the
first request. It ends at the end of its standard input.

A request is a line of JSON (see `Request`). The answers are two lines: the process's number, and,
when it has ended, its exit code, negative for a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

__all__ = ["KINDS", "Request", "collect_seldom", "run_request"]

_DRIVERS = ("libcuda.so.1", "libamdhip64.so.7")
KINDS = {  # modules that each kind of fork begins with, beside those of the kinds above
    "numpy": ("ficco.operators.oracle", "ficco.runtime.engine"),
    "torch": ("torch.distributed.tensor.parallel",),
    "compiler": (
        "torch._dynamo.backends.debugging", "torch._inductor.pattern_matcher",
        "functorch.compile",
    ),
    "functions": ("ficco.api.functions",),
}  # fmt: skip


class Request(NamedTuple):
    """What to run.

    Attributes:
        words: the script and its arguments.
        folder: where it runs.
        environment: its whole environment.
        files: to append standard output and standard error to; None: those of the forked process.
        path: sys.path.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    files: list[str | None]
    path: list[str]


def collect_seldom() -> None:
    """Let Python look for cycles less often, and not among what there is now: that stays."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def run_request(request: Request) -> NoReturn:
    """Run the script of a request in this process, and end the process."""
    code = 1
    try:
        _prepare(request)
        runpy.run_path(request.words[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _prepare(request: Request) -> None:
    """Give this process the request's files, environment, folder and arguments."""
    os.setpgid(0, 0)
    for descriptor, path in enumerate(request.files, 1):
        if path is not None:
            with open(path, "a") as file:
                os.dup2(file.fileno(), descriptor)
    faulthandler.enable()
    collect_seldom()
    searched = os.environ.get("LD_LIBRARY_PATH", "")
    os.environ.clear()
    os.environ.update(request.environment)
    if request.environment.get("LD_LIBRARY_PATH", "") != searched:
        _load_drivers(request.environment["LD_LIBRARY_PATH"].split(os.pathsep))
    os.chdir(request.folder)
    sys.argv = request.words
    sys.path[:] = [str(Path(request.words[0]).parent), *request.path]


def _load_drivers(folders: Sequence[str]) -> None:
    """Load each driver from the first folder that has it; its name stands for that one from now on.

    The dynamic linker reads LD_LIBRARY_PATH only when a process begins.
    """
    for name in _DRIVERS:
        found = next((path for path in (Path(f, name) for f in folders) if path.exists()), None)
        if found is not None:
            assert name not in Path("/proc/self/maps").read_text(), f"{name} is loaded already"
            ctypes.CDLL(str(found))


def _fill_caches(kind: str) -> None:
    """Read files that most programs need and that ficco caches: shipped profiles, the pack."""
    if kind == "numpy":
        from ficco.measure.selector import profiles

        profiles.shipped_for("NVIDIA H200", 2)
    elif kind == "torch":
        from ficco.kernels import pack, sources

        sources.digest()
        pack.opened(90)


class _Server:
    """Accepts requests of one kind, and leaves those of the kinds below to a fork of itself.

    Args:
        sockets: that listen, by the kind, in the order of KINDS.
    """

    def __init__(self, sockets: dict[str, socket.socket]) -> None:
        (self._kind, self._own), *others = sockets.items()
        self._others = {listening: kind for kind, listening in others}
        self._clients = dict[int, socket.socket]()  # by the process's number
        self._imported = False
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for source in (sys.stdin, self._woken, self._own, *self._others):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if sys.stdin in ready:
                    return
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._tell_of_ends()
                if self._own in ready:
                    self._import()
                    self._start()
                if not ready.isdisjoint(self._others):
                    self._import()
                    for other in self._others:
                        selector.unregister(other)
                    self._pass_on()

    def _import(self) -> None:
        if not self._imported:
            for module in KINDS[self._kind]:
                importlib.import_module(module)
            _fill_caches(self._kind)
            self._imported = True
            collect_seldom()

    def _pass_on(self) -> None:
        """Let a fork of this process serve the other kinds."""
        if os.fork() == 0:
            for mine in (self._own, *self._clients.values()):
                mine.close()
            _Server({kind: listening for listening, kind in self._others.items()}).run()
            os._exit(0)
        for listening in self._others:
            listening.close()
        self._others.clear()

    def _start(self) -> None:
        client, _ = self._own.accept()
        with client.makefile() as lines:
            request = Request(**json.loads(lines.readline()))
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            for mine in (nothing, self._woken):
                os.close(mine)
            for other in (client, self._own, *self._others, *self._clients.values()):
                other.close()
            run_request(request)
        self._clients[pid] = client
        client.sendall(f"{pid}\n".encode())

    def _tell_of_ends(self) -> None:
        """Collect children that have ended, and send their exit codes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid not in self._clients:
                continue  # a server
            with self._clients.pop(pid) as client, contextlib.suppress(OSError):
                # Who requested it may have ended.
                client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    descriptors = [int(word) for word in sys.argv[1:]]
    pairs = zip(KINDS, descriptors, strict=True)
    _Server({kind: socket.socket(fileno=descriptor) for kind, descriptor in pairs}).run()
