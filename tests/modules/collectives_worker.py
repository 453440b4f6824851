"""A rank whose collectives without PyTorch's wrappers give the results of the wrappers.

python collectives_worker.py DEVICE STORE RANK WORLD
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from joining import join_gloo

from ficco.core.private import torch_collectives as direct
from ficco.runtime import distributed

Tensor = torch.Tensor


def compare(rank: int, world: int) -> bool:
    """Compare every collective with its wrapper; return whether all were without wrappers."""
    group, without = dist.group.WORLD, []

    def bound(name: str, public: Any) -> Any:
        function, more = getattr(direct, name)(group, public)
        without.append(not isinstance(function, partial))

        def call(*operands: Any) -> None:
            work = function(*operands, *more)
            if work is not None:
                work.wait()

        return call

    piece = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    whole, other = torch.empty(3 * world, 5), torch.empty(3 * world, 5)
    bound("all_gather", distributed.all_gather)(whole, piece)
    distributed.all_gather(other, piece)
    assert torch.equal(whole, other)

    own, expected = torch.empty(3, 5), torch.empty(3, 5)
    bound("reduce_scatter", distributed.reduce_scatter)(own, whole * (rank + 1))
    distributed.reduce_scatter(expected, whole * (rank + 1))
    assert torch.equal(own, expected)

    total, sums = piece.clone(), piece.clone()
    bound("all_reduce", dist.all_reduce)(total)
    dist.all_reduce(sums)
    assert torch.equal(total, sums) and (world == 1 or not torch.equal(total, piece))

    exchange = bound("all_to_all", dist.all_to_all_single)
    for sent, received in (([], []), ([2 * r + 1 for r in range(world)], [2 * rank + 1] * world)):
        source = torch.arange(float(sum(sent) or 2 * world)).reshape(-1, 1) + 100 * rank
        rows = sum(received) if received else len(source)
        target, expected = torch.empty(rows, 1), torch.empty(rows, 1)
        exchange(target, source, received, sent)
        dist.all_to_all_single(expected, source, received or None, sent or None)
        assert torch.equal(target, expected)
    return all(without)


def main(store: str, rank: int, world: int) -> None:
    join_gloo(store, rank, world)
    assert compare(rank, world), "a name of PyTorch is absent"
    methods, options = dict(direct._METHODS), dict(direct._OPTIONS)

    class Unset:
        """Options without `asyncOp`."""

        __slots__ = ()

    for name, names in methods.items():
        for lacking in (None, Unset):
            direct._OPTIONS[name] = lacking
            assert not compare(rank, world), name
            direct._OPTIONS[name] = options[name]
        direct._METHODS[name] = ("no_such_method",)
        assert not compare(rank, world), name
        direct._METHODS[name] = names[-1:]  # the names of earlier releases
        assert compare(rank, world), name
        direct._METHODS[name] = names
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print("right")
