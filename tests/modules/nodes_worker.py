"""Ranks on several nodes, which FICCO_NODE names: calls run torch.distributed, and are right.

python nodes_worker.py cpu NODES STORE RANK WORLD CHECK...; NODES: the node of each rank, as "aab"
"""

from __future__ import annotations

import os
import sys
import time

import gradient_worker
import torch
import torch.distributed as dist
import values_worker
from joining import join_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from values_worker import close, draw

import ficco

WITHIN_S = 2.0


def right(rank: int, world: int, nodes: str) -> None:
    """Every function and gradient; no windows are made."""
    for check in (
        values_worker.gathering, values_worker.reducing, values_worker.exchanging,
        values_worker.pooling, values_worker.nothing, gradient_worker.gathering,
        gradient_worker.reducing, gradient_worker.exchanging, gradient_worker.pooling,
    ):  # fmt: skip
        check(rank, world)
    assert ficco.window_bytes() == 0
    reason = ficco.fallback_reason()
    assert reason is not None, "nothing was said"
    for name in set(nodes):
        ranks = [each for each, node in enumerate(nodes) if node == name]
        assert f"'{name}': ranks {ranks}" in reason, reason
    ficco.synchronize()
    ficco.reset()
    ficco.close()
    assert ficco.fallback_reason() is None
    values_worker.gathering(rank, world)  # opens the group again


def models(rank: int, world: int, nodes: str) -> None:
    """A model runs as before `overlap`, eager and compiled, and `explain` says why."""
    torch.manual_seed(rank)
    shard = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6, bias=False))
    x = draw(99, 5, 6)
    whole = torch.nn.functional.linear(shard[0](x), shard[1].weight).detach()
    dist.all_reduce(whole)
    plan = {"0": "colwise", "1": "rowwise"}
    ficco.overlap(shard, plan=plan, schedule={"*": "hetero_fused_1d"})
    y = shard(x)
    close(y.detach(), whole.double(), "a model")
    y.sum().backward()
    said = str(ficco.explain(shard))
    assert "2 in plain torch.distributed" in said and "nothing overlaps" in said, said
    close(torch.compile(shard, backend="aot_eager")(x).detach(), whole.double(), "compiled")
    ficco.reserve(shard, 64)
    assert ficco.window_bytes() == 0
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4 * world), torch.nn.Linear(4 * world, 6))
    want = net(x).detach().double()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    close(ficco.overlap(net)(x).detach(), want, "a model of DTensors")


def inside(rank: int, world: int, nodes: str) -> None:
    """A group of ranks of one node overlaps, beside the group of all."""
    values_worker.gathering(rank, world)
    by_node = {}
    for name in sorted(set(nodes)):
        members = [each for each, node in enumerate(nodes) if node == name]
        by_node[name] = dist.new_group(members), members
    group, members = by_node[nodes[rank]]
    x, w = draw(rank, 4, 6), draw(50, 6, 3)
    y = ficco.all_gather_matmul(x, w, group=group, schedule="shard_p2p")
    close(y, torch.cat([draw(each, 4, 6) for each in members]).double() @ w.double(), "one node")
    assert (ficco.window_bytes(group) > 0) == (len(members) > 1)
    assert ficco.fallback_reason(group) is None
    ficco.close(group)


def late(rank: int, world: int, nodes: str) -> None:
    """A rank that comes late is told, as are those that wait for it."""
    if rank == world - 2:
        time.sleep(3.0)
    begin = time.monotonic()
    values_worker.gathering(rank, world)
    if rank == world - 2:
        assert time.monotonic() < begin + WITHIN_S


def versions(rank: int, world: int, nodes: str) -> None:
    """Other releases are refused on all ranks, also on one that comes late."""
    if rank == world - 1:
        ficco.__version__ = "0.0.9"
    if rank == 1:
        time.sleep(2.0)
    begin = time.monotonic()
    try:
        ficco.all_gather_matmul(draw(rank, 4, 6), draw(50, 6, 3))
    except ficco.EngineError as error:
        assert "0.0.9" in str(error) and f"rank {world - 1}" in str(error), error
    else:
        raise AssertionError("other releases were not refused")
    assert time.monotonic() < begin + WITHIN_S + 2.0 * (rank != 1)


def options(rank: int, world: int, nodes: str) -> None:
    """Another limit of windows is refused on all ranks, also on a late one of another node."""
    if rank == 1:
        ficco.limit_windows(1 << 20)
    if rank == world - 1:
        time.sleep(2.0)
    try:
        ficco.all_gather_matmul(draw(rank, 4, 6), draw(50, 6, 3))
    except ficco.EngineError as error:
        assert "rank 1 requests window_limit=1048576" in str(error), error
    else:
        raise AssertionError("another limit was not refused")


def absent(rank: int, world: int, nodes: str) -> None:
    """A rank that raises an error instead of a call is named, on all others."""
    if rank == world - 1:
        values_worker.refused(lambda: ficco.all_gather_matmul(torch.ones(2), torch.ones(2)), "is")
        return
    try:
        ficco.all_gather_matmul(draw(rank, 4, 6), draw(50, 6, 3))
    except ficco.EngineError as error:
        assert f"rank {world - 1}" in str(error) and "InputError" in str(error), error
    else:
        raise AssertionError("the call of a rank that raised was made")


_ALL = (right, models, inside, late, versions, options, absent)
CHECKS = {each.__name__: each for each in _ALL}


def main(nodes: str, store: str, rank: int, world: int, check: str) -> None:
    torch.set_num_threads(1)
    if "NODES_ARE_HOSTS" not in os.environ:
        os.environ["FICCO_NODE"] = nodes[rank]
    join_gloo(store, rank, world)
    CHECKS[check](rank, world, nodes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[2:4], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    print("right")
