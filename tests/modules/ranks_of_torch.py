"""Ranks as processes that are forked from one which has imported PyTorch and its compiler.

To import them takes longer than most of what ranks check. `run` starts that one:
python ranks_of_torch.py FOLDER WORLD WORKER ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forking import collect_seldom, run_forked

DEADLINE_S = 240


class Output(NamedTuple):
    """What ranks wrote, and the process that forked them.

    Attributes:
        code: the exit code of that process; not 0 if it was killed after DEADLINE_S.
        said: what it wrote: each rank's exit code.
        ranks: what each rank wrote.
    """

    code: int
    said: str
    ranks: list[str]

    def ended_well(self, rank: int) -> bool:
        """Return whether a rank wrote "right" and returned 0."""
        return f"rank {rank}: 0\n" in self.said and "right" in self.ranks[rank]


def run(
    worker: str, world: int, folder: Path, *before: str, checks: Sequence[str] = (),
    kind: str = "",
) -> None:  # fmt: skip
    """Run a worker as `output_of`. Each rank must end well and say that all was right."""
    output = output_of(worker, world, folder, *before, checks=checks, kind=kind)
    assert output.code == 0, output.said
    for rank, words in enumerate(output.ranks):
        assert output.ended_well(rank), f"rank {rank}: {words}{output.said}"


def output_of(
    worker: str, world: int, folder: Path, *before: str, checks: Sequence[str] = (),
    kind: str = "",
) -> Output:  # fmt: skip
    """Run `python WORKER [before...] STORE RANK WORLD [checks...]` on every rank of a world.

    Args:
        worker: a file beside this one, or an absolute path.
        world: ranks.
        folder: where the ranks run and meet; what they say goes to files in it.
        before: arguments in front of the store's name.
        checks: arguments behind the number of ranks.
        kind: what ranks begin with, see `forking.Forked`.
    """
    code, said = run_forked(
        Path(__file__), folder, world, Path(__file__).parent / worker,
        *before, "STORE", "RANK", world, *checks,
        folder=folder, environment={"GLOO_SOCKET_IFNAME": "lo"}, timeout=DEADLINE_S, kind=kind,
    )  # fmt: skip
    files = [folder / f"rank{rank}.txt" for rank in range(world)]
    return Output(code, said, [file.read_text() if file.exists() else "" for file in files])


def _fork(folder: Path, world: int, worker: str, arguments: list[str]) -> None:
    """Be every rank in a child process, and print how each has ended."""
    import torch

    assert not torch.distributed.is_initialized()
    collect_seldom()
    children = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            with (folder / f"rank{rank}.txt").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os._exit(_be(worker, [{"STORE": str(folder / "store"), "RANK": str(rank)}.get(a, a)
                                  for a in arguments]))  # fmt: skip
        children[child] = rank
    while children:
        child, status = os.wait()
        print(f"rank {children.pop(child)}: {os.waitstatus_to_exitcode(status)}", flush=True)


def _be(worker: str, arguments: list[str]) -> int:
    """Run a worker's file as the program, and return its exit code."""
    sys.argv, sys.path[0] = [worker, *arguments], str(Path(worker).parent)
    code = 1
    try:
        runpy.run_path(worker, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    _fork(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
