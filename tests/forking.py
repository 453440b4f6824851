"""Programs that begin with PyTorch imported: to import it takes longer than most of what they do.

Each runs in a process of its own, forked from one that has imported PyTorch and nothing else of
note (the fork server of multiprocessing). Triton is not among it: it reads TRITON_INTERPRET when it
is imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor.parallel"])


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
    said = folder / "said.txt"
    words = [str(argument) for argument in arguments]
    given = os.environ | environment
    process = _CONTEXT.Process(target=_be, args=(script, words, folder, given, said))
    process.start()
    assert process.pid is not None
    try:
        process.join(timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    assert process.exitcode is not None
    return process.exitcode, said.read_text() if said.exists() else ""


def _be(
    script: Path, arguments: list[str], folder: Path, environment: dict[str, str], said: Path
) -> None:
    os.setpgid(0, 0)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
