"""Train a small mixture of experts, whose experts are spread over the ranks: on a laptop, or GPUs.

torchrun --standalone --nproc-per-node 2 examples/moe.py

Each rank has its own tokens and some of the experts. The router is the same on all ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import ficco

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 96, 16, 32, 8, 2


class Mixture(nn.Module):
    """A router, and this rank's experts."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # all ranks draw the same
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        w_in = torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / WIDTH**0.5
        w_out = torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5
        own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        self.w_in, self.w_out = nn.Parameter(w_in[own].clone()), nn.Parameter(w_out[own].clone())

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, and their gates."""
        gates, ids = self.router(x).softmax(-1).topk(CHOSEN)
        return ids, gates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return this rank's tokens [tokens, width]."""
        ids, gates = self.route(x)
        return ficco.moe(x, ids, gates, self.w_in, self.w_out, activation="swiglu")


def gathered(part: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks, one below the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts)


def plain(model: Mixture, x: torch.Tensor) -> torch.Tensor:
    """Return the same as forward, with all experts on this rank, one after another."""
    ids, gates = model.route(x)
    result = torch.zeros_like(x)
    for expert, (w_in, w_out) in enumerate(
        zip(gathered(model.w_in), gathered(model.w_out), strict=True)
    ):
        gate, up = (x @ w_in).chunk(2, dim=-1)
        share = (gates * (ids == expert)).sum(-1, keepdim=True)
        result += share * ((nn.functional.silu(gate) * up) @ w_out)
    return result


def main() -> None:
    """Fit the model to one batch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    model = Mixture(rank, world).to(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # each rank has other tokens
    x = torch.randn(TOKENS, WIDTH, device=kind)
    wanted = x.roll(1, dims=1).sin()
    for step in range(101):
        loss = (model(x) - wanted).square().mean() / world  # ranks add up their losses
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(model.router.weight.grad)  # gradients of experts are whole already
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {total.item():.4f}")
    with torch.no_grad():
        gap = (model(x) - plain(model, x)).abs().max()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest difference from all experts on one rank: {gap.item():.1e}")
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
