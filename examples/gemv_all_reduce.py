"""One kernel that multiplies a few rows by a weight and sums the products of all ranks.

torchrun --standalone --nproc-per-node 2 examples/gemv_all_reduce.py
TRITON_INTERPRET=1 torchrun --standalone --nproc-per-node 2 examples/gemv_all_reduce.py  # no GPU
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

import ficco
from ficco import device as fd


@triton.jit
def gemv_all_reduce(  # noqa: PLR0913
    x, w, y, box, window, m, n, k, width, WORLD: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, DEEP: tl.constexpr, STAGES: tl.constexpr, TAKE_ROWS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Store the sum over ranks of x [m, k] times w [n, k] transposed in y [m, n]."""
    if CHAINED:
        fd.after_previous_launch()
    call, rank = fd.begin_call(window), fd.my_pe(window)
    box += (call & 1) * WORLD * m * n  # calls use the two copies in turn
    begin = tl.program_id(0) * width
    end = tl.minimum(begin + width, n)
    row, deep = tl.arange(0, ROWS), tl.arange(0, DEEP)
    for left in tl.range(begin, end, COLS):
        col = left + tl.arange(0, COLS)
        w_rows = w + col.to(tl.int64)[:, None] * k
        if ROWS == 1:
            sums = tl.zeros((COLS, DEEP), tl.float32)
            for at in tl.range(0, k, DEEP, num_stages=STAGES):
                x_row = tl.load(x + at + deep, deep < k - at, 0)
                inside = (col < end)[:, None] & (deep < k - at)[None, :]
                w_tile = tl.load(w_rows + (at + deep)[None, :], inside, 0)
                sums += w_tile.to(tl.float32) * x_row.to(tl.float32)[None, :]
            part = tl.sum(sums, 1)[None, :]
        else:
            part = tl.zeros((ROWS, COLS), tl.float32)
            for at in tl.range(0, k, DEEP, num_stages=STAGES):
                in_k = (deep < k - at)[None, :]
                x_tile = tl.load(x + row[:, None] * k + (at + deep), (row < m)[:, None] & in_k, 0)
                w_tile = tl.load(w_rows + (at + deep)[None, :], (col < end)[:, None] & in_k, 0)
                if not fd.on_gpu:  # the interpreter multiplies float32 alone
                    x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
                part = tl.dot(x_tile, w_tile.T, part, input_precision="ieee")
        slot = box + rank * m * n + row[:, None] * n + col[None, :]
        inside = (row < m)[:, None] & (col < end)[None, :]
        for turn in tl.static_range(1, WORLD + 1):  # the own mailbox last
            fd.mailbox.put(slot, part, (rank + turn) % WORLD, call, window, inside)
    fd.end_call(call, window)
    row = tl.arange(0, TAKE_ROWS)
    for left in tl.range(begin, end, COLS):
        col = left + tl.arange(0, COLS)
        for top in tl.range(0, m, TAKE_ROWS):
            at = (top + row)[:, None] * n + col[None, :]
            inside = (top + row < m)[:, None] & (col < end)[None, :]
            total, _ = fd.mailbox.take_sum(box + at, m * n, call, window, inside, WORLD)
            tl.store(y + at, total.to(y.dtype.element_ty), inside)  # NaN if a rank did not come


def mailbox(m: int, n: int, dtype: torch.dtype) -> fd.Window:
    """Return a window for calls of this size: two copies of a product of every rank."""
    return ficco.window((2, dist.get_world_size(), m, n), dtype, mailbox=True)


def matmul_all_reduce(x: Tensor, w: Tensor, window: fd.Window, y: Tensor) -> Tensor:
    """Enqueue one call: y = the sum over ranks of x [m, k] times w [n, k] transposed."""
    (m, k), n, gpu = x.shape, w.shape[0], x.is_cuda
    most = torch.cuda.get_device_properties(x.device).multi_processor_count if gpu else 3
    width = 16 * triton.cdiv(n, 16 * most)  # columns of a program
    cols = min(triton.next_power_of_2(width), 128)
    rows = 1 if m == 1 else max(16, triton.next_power_of_2(m))
    item = x.element_size()
    deep = (256 if cols <= 32 else 128 if rows == 1 or cols == 64 else 64) * 2 // item
    stages = 4 if rows == 1 or cols <= 32 else 6
    stages = min(stages, 140_000 // ((rows + cols) * deep * item))  # steps in shared memory
    warps = 4 if cols <= 32 or (rows > 1 and cols == 64) else 8
    take_rows = max(min(triton.next_power_of_2(m), 2048 // cols), 32 * warps // cols)
    chained = gpu and torch.cuda.get_device_capability(x.device) >= (9, 0)
    options = {"num_warps": warps} | ({"launch_pdl": True} if chained else {})
    gemv_all_reduce[triton.cdiv(n, width),](
        x, w, y, window.tensor, window.table, m, n, k, width, window.world, rows, cols, deep,
        stages, take_rows, CHAINED=chained, **options,
    )  # fmt: skip
    return y


def main() -> None:
    """Compare calls with PyTorch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = bool(fd.on_gpu) and torch.cuda.device_count() >= world
    if gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpu else "gloo")
    sizes = [(1, 4096, 4096), (5, 8192, 4096)] if gpu else [(1, 100, 77), (3, 90, 50)]
    for m, n, k in sizes:
        torch.manual_seed(rank)
        draw = {"device": "cuda" if gpu else "cpu", "dtype": torch.bfloat16}
        x, w, y = torch.randn(m, k, **draw), torch.randn(n, k, **draw), torch.empty(m, n, **draw)
        window = mailbox(m, n, y.dtype)
        for _ in range(3):
            matmul_all_reduce(x, w, window, y.fill_(torch.nan))
        window.check()  # raises if a rank did not come
        want = x.float() @ w.float().t()
        dist.all_reduce(want)
        of_rank_0 = y.clone()
        dist.broadcast(of_rank_0, 0)
        error = float((y - want).abs().max() / want.abs().max())
        assert error < 0.01 and torch.equal(y, of_rank_0), f"rank {rank}: error {error}"
        if rank == 0:
            print(f"{world} ranks, {m} x {n} x {k}: right, equal on all ranks, error {error:.1e}")
        window.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
