"""What the parts that measure GPUs work out by themselves, without one."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("bytes_out", [256 << 10, 1 << 24, 1 << 30])
def test_pieces_of_a_collective(torch: Any, world: int, bytes_out: int) -> None:
    from ficco.measure.profiling.gpu.transfers import piece_bytes

    piece = piece_bytes(bytes_out, world)
    assert piece > 0 and piece % 512 == 0
    assert 0 <= bytes_out - (world - 1) * piece < 512 * (world - 1)


def test_the_worst_of_the_larger_chunks_counts(torch: Any) -> None:
    from ficco.measure.profiling.gpu.gemms import worst

    entries = [
        {"chunk_bytes": 64e6, "gemm": 1.02, "transfer": 1.2},
        {"chunk_bytes": 4e6, "gemm": 1.05, "transfer": 1.1},
        {"chunk_bytes": 5e5, "gemm": 2.0, "transfer": 3.0},
        {"chunk_bytes": 0.0, "gemm": 1.5, "transfer": 1.7},
    ]
    assert worst(entries) == {
        "gemm_beside_copies": 1.05, "copies_beside_gemm": 1.2,
        "gemm_beside_collective": 1.5, "collective_beside_gemm": 1.7,
    }  # fmt: skip


def test_a_pool_gives_matrices_by_turns(torch: Any) -> None:
    from ficco.measure.profiling.gpu.ranks import Pool

    pool = Pool(1 << 12, torch.device("cpu"))
    first, second = pool.take(16, 100), pool.take(8, 8, torch.float32)
    assert first.shape == (16, 100) and first.dtype == torch.bfloat16
    assert second.shape == (8, 8) and second.dtype == torch.float32
    assert torch.isfinite(first).all() and torch.isfinite(second).all()
    apart = second.data_ptr() - first.data_ptr()
    assert apart >= 2 * first.numel() and apart % 256 == 0
    assert pool.take(16, 200).data_ptr() == first.data_ptr()  # the rest is too small
