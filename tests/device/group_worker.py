"""Makes windows of groups of torch.distributed on the CPU, a process per rank.

TRITON_INTERPRET=1 python group_worker.py [apart]

With "apart", each rank has a PID namespace of its own, as in a container.
"""

# ruff: noqa: E402 (the path comes before what is found by it)

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import sys
import tempfile
import traceback
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
from ficco.core.errors import EngineError, InputError

WORLD = 3
_NEW_PID = 0x20000000  # CLONE_NEWPID


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
        assert "came to reset a window, rank 0 to make a window" in str(error), error
    else:
        raise AssertionError("different calls were not refused")
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        try:
            copies(window)
        except InputError as error:
            assert "a window cannot be pickled or copied" in str(error), error
        else:
            raise AssertionError("a window was copied")
    window.reset()
    if (pid := os.fork()) == 0:
        try:
            window.reset()
        except EngineError as error:
            os._exit(0 if "was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    window.close()


def first_calls_differ(rank: int) -> None:
    """Hold that both ranks get an error if one makes a window, and the other the first call."""
    x, w, pair = torch.ones(2, 4), torch.ones(4, 3), dist.new_group([0, 1])
    if rank == 2:
        return
    for opened in (False, True):
        try:
            if rank == 1:
                ficco.window(4, torch.float32, group=pair)
            else:
                schedule = "auto" if opened else "serial"
                ficco.all_gather_matmul(x, w, group=pair, schedule=schedule)
        except EngineError as error:
            assert "rank 1 came to make a window, rank 0 to " in str(error), error
        else:
            raise AssertionError("different calls were not refused")
        ficco.reset(pair) if opened else ficco.prepare(pair)
    with ficco.window(90, torch.float32, signals=2, group=pair) as window:
        goes_around(window, 2)  # on the connection of the open group
    ficco.close(pair)


def in_namespace(rank: int, store: str) -> None:
    """Be a rank with a PID namespace of its own: its process has number 1, as all others have."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_PID) != 0:
        print(f"not permitted: {os.strerror(ctypes.get_errno())}")
        return
    if (pid := os.fork()) == 0:
        try:
            assert os.getpid() == 1
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            with ficco.window((9, 10), torch.float32, signals=2) as window:
                window.tensor.fill_(rank)
                dist.barrier()
                base = window._memory.bases[1 - rank]  # type: ignore[union-attr]
                assert ctypes.c_float.from_address(base).value == 1 - rank
                window.reset()
                goes_around(window, 5)
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


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
    first_calls_differ(rank)

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
    world, body = (2, in_namespace) if "apart" in sys.argv else (WORLD, on_rank)
    with tempfile.TemporaryDirectory() as folder:
        forked(world, lambda rank: body(rank, f"{folder}/store"))
    print("right")
