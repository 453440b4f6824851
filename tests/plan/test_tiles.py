"""Tiles against a plain array of elements."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ficco.verifier.tiles import Box, Tiles

SIDE = 9


def a_box(rng: random.Random) -> Box:
    rows, cols = (sorted(rng.sample(range(SIDE + 1), 2)) for _ in range(2))
    return Box(*rows, *cols)


@pytest.mark.parametrize("seed", range(60))
def test_tiles_hold_what_an_array_holds(seed: int) -> None:
    rng = random.Random(seed)
    tiles: Tiles[int] = Tiles()
    plain = np.zeros((SIDE, SIDE), np.int64)  # 0: no value
    for _ in range(30):
        box, value = a_box(rng), rng.randint(1, 3)
        tiles.write(box, value)
        plain[box.r0 : box.r1, box.c0 : box.c1] = value
        seen = a_box(rng)
        found = np.zeros_like(plain)
        for part, held in tiles.read(seen):
            here = found[part.r0 : part.r1, part.c0 : part.c1]
            assert not here.any(), "parts overlap"
            here[:] = held
        wanted = np.zeros_like(plain)
        inside = slice(seen.r0, seen.r1), slice(seen.c0, seen.c1)
        wanted[inside] = plain[inside]
        assert (found == wanted).all()


def test_what_is_read_does_not_depend_on_the_order_of_writes() -> None:
    boxes = [Box(i, i + 1, j, j + 1) for i in range(SIDE) for j in range(SIDE)]
    for seed in range(10):
        random.Random(seed).shuffle(boxes)
        tiles: Tiles[str] = Tiles()
        for box in boxes:
            tiles.write(box, "left" if box.c0 < 4 else "right")
        whole = tiles.read(Box(0, SIDE, 0, SIDE))
        assert whole == [(Box(0, SIDE, 0, 4), "left"), (Box(0, SIDE, 4, SIDE), "right")]
