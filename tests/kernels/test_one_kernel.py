"""The one-kernel kernels, from tables of real plans: under Triton's interpreter, and compiled."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from forking import run_forked

from ficco.operators import registry

SUBJECTS = ("products", "giving_up")
SENDING = [
    name
    for name in registry.names()
    if "push_sm" in registry.get(name).schedules and not registry.get(name).flow.routes
]
MOVING = [name for name in registry.names() if "whole_sm" in registry.get(name).schedules]


@pytest.mark.parametrize(
    ("worker", "subject"),
    [
        *(("all_reduce", subject) for subject in ("products", "odd_values", "shares")),
        *((worker, "sums") for worker in ("pool", "pull")),
        ("gather", "products"),
        *(product(("all_reduce", "gather", "pool", "pull"), ("giving_up", "refusals", "assembly"))),
        ("sending", "described"),
        *product(("sending",), [f"{subject}.{op}" for subject in SUBJECTS for op in SENDING]),
        *product(
            ("sending",), [f"{each}.{op}" for each in ("moved", "left_alone") for op in MOVING]
        ),
    ],
)
def test_it_is_right(worker: str, subject: str, tmp_path: Path, torch: object) -> None:
    interpret = "0" if subject in ("assembly", "shares", "described") else "1"
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(
        Path(__file__).with_name(f"{worker}_worker.py"), subject,
        folder=tmp_path, environment=settings, timeout=200,
    )  # fmt: skip
    assert code == 0 and "right" in said, said


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("m", [1, 2, 16, 33, 64, 100, 512])
def test_a_tile_covers_its_chunk_and_leaves_room(m: int, item: int, torch: object) -> None:
    from ficco.kernels.one_kernel_all_reduce import choose_tile

    for width in (1, 16, 32, 40, 64, 112, 128, 1000):
        for k in (1, 64, 1000, 13312):
            tile = choose_tile(m, width, k, item)
            assert all(size & (size - 1) == 0 for size in tile[:3])
            assert (tile.rows == 1) == (m == 1) and tile.cols <= max(16, 2 * width)
            assert tile.warps in (4, 8) and tile.stages >= 2
            held = (tile.rows + tile.cols) * tile.deep * tile.stages * item
            assert held <= 140_000 + (m == 1) * 8192, "no other kernel fits beside"


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(
    ("columns", "k"), [((3584, 3584), 8192), ((1024, 128, 128), 4096), ((5,), 40), ((16032,), 1)]
)
def test_a_gather_shares_out_its_work(
    m: int, columns: tuple[int, ...], k: int, torch: object
) -> None:
    from ficco.kernels.one_kernel_gather import choose

    workers = 131
    tile, splits = choose(m, columns, k, 2, workers)
    tiles = sum(-(-n // tile.cols) for n in columns) * -(-m // tile.rows)
    assert 1 <= splits <= max(1, k // tile.deep)
    assert tiles * splits <= workers or splits == 1, "parts of tiles wait for their turn"
    if sum(columns) == 1280:
        assert tiles * splits > workers // 3, "most of a GPU is idle"


@pytest.mark.parametrize(
    ("op", "rows", "n", "k", "dtype", "expected"),
    [
        ("all_gather_matmul", 4096, 8192, 8192, "bfloat16", 8),  # the product is long
        ("all_gather_matmul", 4096, 2048, 8192, "bfloat16", 32),
        ("all_gather_matmul", 4096, 512, 8192, "bfloat16", 64),  # the link bounds the call
        ("all_gather_matmul", 4096, 512, 8192, "float32", 16),
        ("all_gather_matmul", 4096, 2, 8192, "bfloat16", 64),
        ("matmul_all_to_all", 4096, 8192, 8192, "bfloat16", 0),  # products are sent by tiles
    ],
)
def test_no_more_programs_copy_than_the_product_hides(
    op: str, rows: int, n: int, k: int, dtype: str, expected: int, torch: object
) -> None:
    from ficco.kernels.sending import _senders
    from ficco.lowering import lower_rank
    from ficco.operators.problem import Problem
    from ficco.plan.schedule import Schedule
    from ficco.program.passes.one_kernel_tables import table_of

    problem = Problem.chunked(op, 2, rows, n, k, dtype)
    plan = lower_rank(problem, Schedule.named("push_sm"), 0)
    assert _senders(table_of(plan), 132) == expected
