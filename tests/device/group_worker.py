"""Makes windows of groups of torch.distributed on the CPU, a process per rank.

TRITON_INTERPRET=1 python group_worker.py
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.with_name("kernels")), str(HERE.parents[1] / "examples")]

import torch
import torch.distributed as dist
from forked_ranks import forked
from interpreting import make_ready
from small_kernels import push_around

import ficco
from ficco import device as fd
from ficco.errors import EngineError, InputError

WORLD = 3


def goes_around(window: fd.Window, calls: int) -> None:
    """Send data around the ranks of a window, and compare what comes."""
    rank, world = window.rank, window.world
    for call in range(calls):
        source = torch.arange(90.0) + 100 * rank + call
        out = torch.full((91,), torch.nan)
        push_around[(1,)](window.tensor, window.signals, source, out, window.table, 90, call, world)
        assert torch.equal(out[:90], torch.arange(90.0) + 100 * ((rank - 1) % world) + call)
    window.check()


def refused(words: str, **changed: Any) -> None:
    """Hold that a window with these arguments is refused on this rank."""
    given = {"shape": 4, "dtype": torch.float32} | changed
    try:
        ficco.window(**given)
    except InputError as error:
        assert words in str(error), error
        return
    raise AssertionError(f"{changed} was not refused")


def other_calls(rank: int) -> None:
    """Hold that ranks which make different calls get an error, and a child that resets, too."""
    window = ficco.window(4, torch.float32)
    try:
        window.reset() if rank else ficco.window(4, torch.float32)
    except EngineError as error:
        assert "rank 0 came to make a window and rank 1 to reset a window" in str(error), error
    else:
        raise AssertionError("different calls were not refused")
    window.reset()
    if (pid := os.fork()) == 0:
        try:
            window.reset()
        except EngineError as error:
            os._exit(0 if "was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    window.close()


def on_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    with ficco.window((9, 10), torch.float32, signals=2) as window:
        assert (window.rank, window.world) == (rank, WORLD)
        assert not window.tensor.any() and not window.signals.any()
        dist.barrier()  # peers may store from now on
        goes_around(window, 5)
        window.reset()
        assert not window.tensor.any() and not window.signals.any()
        dist.barrier()  # peers may store from now on
        goes_around(window, 5)

    refused("rank 1: shape=0", shape=0 if rank == 1 else 4)  # all ranks get its error
    refused("rank 0 makes a window with shape=(4,), dtype=torch.float32, signals=0,", signals=rank)
    for shape in ((2**40, 2**40), 10**15):
        refused(" free; smaller sizes or fewer ranks need less", shape=shape)
    refused("mailbox='x'", mailbox="x")
    refused("device=meta", device="meta")
    if not torch.cuda.is_available():
        refused("PyTorch finds no GPU", device="cuda")

    refused("rank 2: device='no'", device="no" if rank == 2 else "cpu")  # all ranks get its error
    other_calls(rank)

    pair = dist.new_group([0, 2])
    if rank != 1:
        with ficco.window(90, torch.float32, signals=2, group=pair) as window:
            assert (window.rank, window.world) == (rank // 2, 2)
            goes_around(window, 3)
    else:
        refused("this process, rank 1 of all, is not one of its ranks", group=pair)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    make_ready()
    with tempfile.TemporaryDirectory() as folder:
        forked(WORLD, lambda rank: on_rank(rank, f"{folder}/store"))
    print("right")
