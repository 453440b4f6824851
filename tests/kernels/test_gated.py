"""The gated GEMM, and parts that signal: under Triton's interpreter, and compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from forking import run_forked

from ficco.kernels.arrays import DescribedArrays
from ficco.kernels.gated_tables import prepare
from ficco.plan.tables import GatedPart
from ficco.program.tiling import TILES, UNSHARED, Shares, choose_tile, count_tiles, shared_tiles

FOLDER = Path(__file__).parent


def run_worker(subject: str, folder: Path, interpret: str, worker: str = "gated") -> None:
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": "cache"}
    code, said = run_forked(
        FOLDER / f"{worker}_worker.py", subject, folder=folder, environment=settings, timeout=280
    )
    assert code == 0 and "right" in said, said


@pytest.mark.parametrize(
    "subject",
    [
        "products", "giving_up", "late", "refusals", "warming", "release",
    ],
)  # fmt: skip
def test_it_is_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1")


@pytest.mark.parametrize("subject", ["shared", "of_two_sources", "ends_first"])
def test_split_tiles_are_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1", "split")


@pytest.mark.parametrize(
    "subject", ["products", "early", "sums", "late_terms", "giving_up", "refusals", "shared"]
)
def test_parts_that_signal_are_right(subject: str, tmp_path: Path, torch: object) -> None:
    run_worker(subject, tmp_path, "1", "signalling")


def test_what_is_compiled_loads_behind_the_fence_and_stores_in_order(
    tmp_path: Path, torch: object
) -> None:
    run_worker("assembly", tmp_path, "0")


def test_what_is_compiled_raises_words_behind_rows_and_reads_terms_behind_words(
    tmp_path: Path, torch: object
) -> None:
    run_worker("assembly", tmp_path, "0", "signalling")


@pytest.mark.parametrize("element_bytes", TILES)
def test_a_tile_is_chosen_by_rows_and_rounds(element_bytes: int) -> None:
    tiles = TILES[element_bytes]
    for rows in ([8192] * 8, [1024] * 8, [100] * 4, [64], [3, 1], []):
        for n in (64, 1280, 2560, 14336):
            tile = choose_tile(rows, [n] * len(rows), element_bytes, 132)
            smallest = min(other.rows for other in tiles)
            assert tile in tiles
            assert tile.rows == smallest or tile.rows < 2 * max(rows), (
                "a part's rows bound a tile's"
            )
    assert choose_tile([8192] * 8, [14336] * 8, element_bytes, 132) == tiles[0]
    assert choose_tile([8192] * 8, [14336] * 8, element_bytes, 132, aligned=False) == tiles[-1]
    few = choose_tile([64], [1024], element_bytes, 132)
    assert sum(count_tiles([64], [1024], few)) > sum(count_tiles([64], [1024], tiles[0]))


def test_tiles_do_not_straddle_parts() -> None:
    tile = TILES[2][0]._replace(rows=128, cols=256)
    assert count_tiles([1, 128, 129, 0], [257, 257, 257, 257], tile) == [2, 2, 4, 0]


def test_the_last_tiles_are_shared_where_half_of_the_programs_would_be_idle() -> None:
    tile = TILES[2][0]
    for tiles, k, found in (
        (320, 8192, Shares(56, 2)), (960, 8192, Shares(36, 3)), (40, 8192, Shares(40, 3)),
        (133, 8192, Shares(1, 4)), (264, 8192, UNSHARED), (331, 8192, UNSHARED),
        (320, 1024, UNSHARED), (0, 8192, UNSHARED),
    ):  # fmt: skip
        assert shared_tiles(tiles, 132, tile, k) == found, (tiles, k)
    # Then tiles of the first kind take less time than smaller ones, which fill more of the round.
    assert choose_tile([1024] * 8, [768] * 8, 2, 132, k=8192) == tile
    apart = choose_tile([1024] * 8, [768] * 8, 2, 132, k=8192, split=False)
    assert apart == choose_tile([1024] * 8, [768] * 8, 2, 132) != tile


def test_tiles_of_own_rows_are_split_where_few_tiles_run() -> None:
    """Else these would take as long as if no tile were split."""
    parts = [GatedPart("own", 0, 0, 64), GatedPart("window", 0, 64, 64, word=3)]
    table = prepare(parts, 320, 8192, "bfloat16", DescribedArrays(90, 132))
    assert table.own_tiles and table.shared.tiles == table.tiles and table.shared.among == 4
    assert table.programs == 4 * table.tiles
    parts = [parts[0]._replace(rows=1920), parts[1]]  # 150 tiles and 10, of which 132 run first
    many = prepare(parts, 2560, 8192, "bfloat16", DescribedArrays(90, 132), tile=TILES[2][0])
    assert (many.own_tiles, many.tiles, many.shared.tiles) == (150, 160, 28)


def test_programs_are_fewer_where_launches_leave_multiprocessors() -> None:
    """The tile stays, and so does the kernel; split tiles are among fewer programs, too."""
    whole = GatedPart("own", 0, 0, 2048)
    for n in (512, 2048, 2560, 14336):
        parts = [whole, GatedPart("window", 0, 2048, 2048, word=3)]
        tables = [
            prepare(parts, n, 8192, "bfloat16", DescribedArrays(90, 132), leaves=leaves)
            for leaves in (0, 4)
        ]
        most, fewer = (table.programs for table in tables)
        assert tables[0].tile == tables[1].tile and tables[0].tiles == tables[1].tiles
        assert most <= 132 * tables[0].tile.per_sm
        assert fewer <= 128 * tables[1].tile.per_sm, n
        assert fewer < most or most <= 128 * tables[0].tile.per_sm
    smallest = prepare([whole], 512, 64, "bfloat16", DescribedArrays(90, 4), leaves=4)
    assert smallest.programs == smallest.tile.per_sm, "a launch needs one multiprocessor"


def test_pushed_parts_are_made_early_where_pushes_take_longer() -> None:
    parts, n = [300] * 8, 1000
    pushed = [True] * 7 + [False]
    for element_bytes, tiles in TILES.items():
        for k in (1, 100, 1000, 10**5):
            tile = choose_tile(parts, [n] * 8, element_bytes, 132, True, pushed, k)
            assert tile in tiles
        deep = choose_tile(parts, [n] * 8, element_bytes, 132, True, pushed, 10**7)
        alone = choose_tile(parts, [n] * 8, element_bytes, 132, k=10**7)
        assert deep == alone, "pushes cost nothing then"

    # One round of the first makes all; smaller ones have made the first part in a part of that.
    rows, cols = [128] * 8, [4096] * 8
    assert choose_tile(rows, cols, 2, 132, True, pushed, 100) != choose_tile(rows, cols, 2, 132)
