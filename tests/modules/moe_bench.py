"""Parts of bench/moe.py, in Triton's interpreter: routings, and rows pushed to peers.

python moe_bench.py BENCH
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from ficco.core.private.triton_interpreter import let_comparisons_mask, let_loops_count

WORLD, E, TOPK, TOKENS, D = 3, 2, 2, 7, 24


def routings_are_drawn() -> None:
    """Experts of a token differ; Zipf's law is uneven; a capacity has room."""
    from experts_compared import routing

    found = {}
    for name in ("uniform", "zipf"):
        ids, gates = routing.draw(500, 16, 4, name, torch.Generator().manual_seed(1))
        assert all(len(set(row)) == 4 for row in ids.tolist())
        torch.testing.assert_close(gates.sum(1), torch.ones(500))
        rows = routing.counts(ids, 16)
        assert int(rows.sum()) == 2000
        found[name] = routing.imbalance(rows, 2)
    assert found["uniform"]["experts"] < 1.3 < found["zipf"]["experts"]
    assert found["zipf"]["experts"] >= found["zipf"]["ranks"] >= 1
    assert routing.capacity_of(1000) == 1280 and routing.capacity_of(0) == 128


def rows_reach_their_peers() -> None:
    """Rows pushed by all ranks stand by expert, and return to their slots."""
    from experts_compared import kernels, pieces
    from experts_compared.by_symmetric import origins, targets

    def addresses(buffers: list[Any]) -> Any:
        return torch.tensor([each.data_ptr() for each in buffers])

    torch.manual_seed(2)
    xs = [torch.randn(TOKENS, D) for _ in range(WORLD)]
    ids = [torch.rand(TOKENS, WORLD * E).topk(TOPK, 1).indices for _ in range(WORLD)]
    sorted_ = [pieces.sorted_slots(each.view(-1), WORLD * E) for each in ids]
    counts = torch.stack([torch.diff(ends, prepend=ends.new_zeros(1)) for _, ends in sorted_])
    arrived = [torch.full((WORLD * TOKENS * TOPK, D), torch.nan) for _ in range(WORLD)]
    back = [torch.full((TOKENS * TOPK, D), torch.nan) for _ in range(WORLD)]
    for rank, (order, ends) in enumerate(sorted_):
        experts = ids[rank].view(-1)[order]
        peers, places = targets(counts, experts, rank, E)
        kernels.push(xs[rank], order // TOPK, peers, places, addresses(arrived), ends[-1:])
    for rank in range(WORLD):
        size = len(arrived[rank])
        owners, places, ends = origins(counts, rank, E, size)
        expert = torch.searchsorted(ends.long(), torch.arange(int(ends[-1])), right=True)
        rows = arrived[rank].clone()
        rows[: int(ends[-1])] *= (expert + rank * E + 1).unsqueeze(1)  # what an expert does
        at = torch.arange(size)
        kernels.push(rows, at, owners, places, addresses(back), ends[-1:])
    for rank, (order, _) in enumerate(sorted_):
        gates = torch.rand(TOKENS, TOPK)
        y = kernels.slot_sums(back[rank], pieces.inverse(order).view(-1, TOPK), gates)
        torch.testing.assert_close(y, xs[rank] * ((ids[rank] + 1) * gates).sum(1, keepdim=True))


def activations_are_right() -> None:
    """Of the rows below the count, activation and gradient are those of PyTorch."""
    from experts_compared import kernels

    z = torch.randn(5, 2 * D)
    h = kernels.silu_mul(z, torch.tensor([4]))
    gate, up = z[:4].chunk(2, 1)
    torch.testing.assert_close(h[:4], torch.nn.functional.silu(gate) * up)
    dh, leaf = torch.randn(5, D), z.clone().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    (wanted,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, leaf, dh)
    dz = kernels.silu_mul_gradient(z, dh, torch.tensor([4]))
    torch.testing.assert_close(dz[:4], wanted[:4])


def sums_are_alike() -> None:
    """PyTorch's ways to sum slots agree, with and without slots that have no row here."""
    from experts_compared import pieces
    from experts_compared.by_nccl import gathered_places

    shape = SimpleNamespace(topk=TOPK)
    ids = torch.rand(TOKENS, WORLD * E).topk(TOPK, 1).indices
    whole = (0, 1, 128)  # a rank with all experts, which has no row to spare
    for rank, world, capacity in (*((rank, WORLD, 13) for rank in range(WORLD)), whole):
        e = E * WORLD // world
        layer: Any = SimpleNamespace(shape=shape, e=e, rank=rank, world=world)
        places, ends = gathered_places(layer, ids, capacity)
        rows, gates = torch.randn(len(places.token), D), torch.rand(TOKENS, TOPK)
        wanted = torch.zeros(TOKENS, D)
        for row, slot in enumerate(places.slot[: int(ends[-1])].tolist()):
            wanted[slot // TOPK] += rows[row] * gates.flatten()[slot]
        for way in pieces.Sums.ways.values():
            torch.testing.assert_close(way(rows.clone(), places, gates), wanted)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(1)
    let_comparisons_mask()
    let_loops_count()
    for subject in (
        routings_are_drawn, rows_reach_their_peers, activations_are_right, sums_are_alike
    ):  # fmt: skip
        subject()
    print("right")
