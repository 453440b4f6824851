"""One kernel that sums rows of this rank's tables, and stores each sum at the rank that needs it.

torchrun --standalone --nproc-per-node 2 examples/embedding_all_to_all.py
TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 examples/embedding_all_to_all.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import ficco
from ficco import device as fd


@triton.jit
def embedding_all_to_all(  # noqa: PLR0913
    tables, indices, result, signals, window, rows, bags, lookups, dim, TABLES: tl.constexpr,
    WORLD: tl.constexpr, BAGS: tl.constexpr, LOOKUPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store the sums of bags [peer * bags, (peer + 1) * bags) of all tables in peer's result.

    Signals: of each rank, how many of its programs have stored; whether it has entered this call,
    and the call before.
    """
    call, rank, program = fd.begin_call(window), fd.my_pe(window), tl.program_id(0)
    entered, entered_before = signals + WORLD * (1 + (call & 1)), signals + WORLD * (2 - (call & 1))
    if program == 0:  # this rank's result may be overwritten from now on
        for other in tl.static_range(WORLD):
            tl.store(entered_before + other, 0)
        for turn in tl.static_range(1, WORLD + 1):
            live = (call >= 0).to(tl.int32)  # 0: an earlier call has failed
            fd.signal(entered + rank, live, "set", (rank + turn) % WORLD, window)
    col = tl.arange(0, COLS)[None, :]
    for turn in tl.static_range(1, WORLD + 1):  # the own part last
        peer = (rank + turn) % WORLD
        free = fd.wait(entered + peer, "eq", 1, window)
        target = fd.remote_ptr(result, peer, window)
        for item in tl.range(program, TABLES * tl.cdiv(bags, BAGS), tl.num_programs(0)):
            table, bag = item % TABLES, (item // TABLES) * BAGS + tl.arange(0, BAGS)
            at = indices + tl.cast(table * WORLD + peer, tl.int64) * bags * lookups + bag * lookups
            source = tables + tl.cast(table, tl.int64) * rows * dim + col
            in_bag = bag < bags
            inside = in_bag[:, None] & (col < dim)
            total = tl.zeros((BAGS, COLS), tl.float32)
            for begin in tl.range(0, lookups, LOOKUPS):
                for i in tl.static_range(LOOKUPS):  # these loads are in flight at the same time
                    known = begin + i < lookups
                    row = tl.load(at + begin + i, in_bag & known, 0).to(tl.int64)
                    found = tl.load(source + row[:, None] * dim, inside & known, 0)
                    total += found.to(tl.float32)
            place = (bag.to(tl.int64)[:, None] * WORLD + rank) * TABLES + table
            wanted = inside & (free != 0)
            tl.store(target + place * dim + col, total.to(result.dtype.element_ty), wanted)
        fd.signal(signals + rank, free, "add", peer, window)
    fd.end_call(call, window)
    if program == tl.num_programs(0) - 1:  # no program waits for a later one, which may not run yet
        came = call >= 0
        for other in tl.static_range(WORLD):
            came &= fd.wait(signals + other, "eq", tl.num_programs(0), window) != 0
            tl.store(signals + other, 0)
        if came == 0:  # a rank did not come: this is no result
            size = bags * WORLD * TABLES * dim
            for begin in tl.range(0, size, 1024):
                at = begin + tl.arange(0, 1024)
                nothing = tl.full((1024,), float("nan"), tl.float32)
                tl.store(result + at, nothing.to(result.dtype.element_ty), at < size)


def steps(rank: int, program: int, world: int, programs: int) -> Iterator[fd.Raise | fd.Wait]:
    """Yield what a program raises and waits for in the first call, for `fd.check`."""
    if program == 0:
        yield from [fd.Raise((rank + turn) % world, world + rank) for turn in range(1, world + 1)]
    for turn in range(1, world + 1):
        peer = (rank + turn) % world
        yield fd.Wait(world + peer)
        yield fd.Raise(peer, rank)
    if program == programs - 1:
        yield from [fd.Wait(peer, programs) for peer in range(world)]


def result_window(bags: int, tables: int, dim: int, dtype: torch.dtype) -> fd.Window:
    """Return a window for the result of each rank's bags."""
    world = dist.get_world_size()
    return ficco.window((bags, world, tables, dim), dtype, signals=3 * world)


def lookup_and_exchange(tables: Tensor, indices: Tensor, window: fd.Window) -> Tensor:
    """Enqueue one call, and return this rank's result, which the next call overwrites.

    Args:
        tables: [tables, rows, dim] of this rank; all ranks have equally many.
        indices: [tables, world * bags, lookups], rows for the bags of all ranks.
        window: from `result_window`.

    Returns:
        [bags, world * tables * dim]: sums of the tables of rank 0, then of rank 1, and so on.
    """
    (count, rows, dim), (_, batch, lookups) = tables.shape, indices.shape
    bags, cols = batch // window.world, triton.next_power_of_2(dim)
    block = max(1, min(16, 1024 // cols))
    most = 3
    if tables.is_cuda:  # as many programs as are resident at the same time
        most = 8 * torch.cuda.get_device_properties(tables.device).multi_processor_count
    programs = min(most, count * triton.cdiv(bags, block))
    embedding_all_to_all[programs,](
        tables, indices, window.tensor, window.signals, window.table, rows, bags, lookups, dim,
        count, window.world, block, min(4, triton.next_power_of_2(lookups)), cols,
    )  # fmt: skip
    return window.tensor.view(bags, -1)


def main() -> None:
    """Compare calls with PyTorch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = bool(fd.on_gpu) and torch.cuda.device_count() >= world
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)  # all ranks know all tables and indices, to compare
    count, rows, dim, bags, lookups = (8, 100_000, 128, 1024, 32) if gpu else (2, 50, 12, 5, 9)
    draw = {"device": "cuda" if gpu else "cpu"}
    every = torch.randn(world, count, rows, dim, dtype=torch.bfloat16, **draw)
    indices = torch.randint(rows, (world, count, world * bags, lookups), **draw)
    window = result_window(bags, count, dim, every.dtype)
    for _ in range(3):
        window.tensor.fill_(torch.nan)
        dist.barrier()  # no peer stores before that
        y = lookup_and_exchange(every[rank], indices[rank], window)
        window.check()  # raises if a rank did not come
        own = indices[:, :, rank * bags : (rank + 1) * bags]
        parts = [
            torch.nn.functional.embedding_bag(own[r, t], every[r, t].float(), mode="sum")
            for r in range(world)
            for t in range(count)
        ]
        want = torch.cat(parts, 1)
        error = float((y - want).abs().max() / want.abs().max())
        assert error < 0.01, f"rank {rank}: error {error}"
    unmet = fd.check(
        lambda *place: steps(*place, world, 9), world=world, programs=9, resident=1,
        signals=3 * world,
    )  # fmt: skip
    assert not unmet, unmet
    if rank == 0:
        print(f"{world} ranks, {count} tables each, {bags} bags: right, error {error:.1e}")
    dist.barrier()
    window.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
