"""Ranks as forked processes, for kernels under Triton's interpreter."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

__all__ = ["forked"]


def forked(world: int, rank_calls: Callable[[int], object]) -> None:
    """Run a function on every rank, in a process each."""
    found = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                rank_calls(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        found.append(child)
    codes = [os.waitpid(child, 0)[1] for child in found]
    assert codes == [0] * len(codes), f"ranks went wrong: {codes}"
