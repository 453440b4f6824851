"""Train a small tensor-parallel model, overlapped by ficco: on a laptop, or on GPUs.

torchrun --standalone --nproc-per-node 2 examples/train.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ficco

BATCH, LENGTH, WIDTH, HIDDEN = 2, 16, 32, 96


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return [batch, this rank's part of the sequence, width]."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def main() -> None:
    """Fit the model to one batch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(kind, (world,))
    torch.manual_seed(0)
    sequence = Shard(1)  # activations are split along the sequence between layers
    model = parallelize_module(
        Mlp().to(kind),
        mesh,
        {
            "gate": ColwiseParallel(input_layouts=sequence),
            "up": ColwiseParallel(input_layouts=sequence),
            "down": RowwiseParallel(output_layouts=sequence),
        },
    )
    ficco.overlap(model)  # the one line

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, wanted = torch.randn(2, BATCH, LENGTH, WIDTH, device=kind).chunk(world, 2)[rank]
    for step in range(101):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {mean.item():.3f}")
    if rank == 0:
        print(ficco.explain(model))
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
