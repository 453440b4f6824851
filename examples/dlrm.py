"""Train a small DLRM with sharded embedding tables by ficco: on a laptop, or on GPUs.

torchrun --standalone --nproc-per-node 2 examples/dlrm.py
"""

from __future__ import annotations

import copy
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import ficco

DENSE, DIM, BATCH, STEPS = 13, 16, 256, 101
RATE, TABLE_RATE = 0.2, 10.0  # a row is in few bags of a batch, so its gradient is small
ROWS = (2000, 50, 300, 20, 1200, 100, 10)  # of each table
LOOKUPS = (1, 8, 3, 1, 12, 2, 1)  # of each table, in a bag on average


def plan_tables(costs: list[float], world: int) -> list[list[int]]:
    """Return the tables of each rank: the most costly first, each to the rank with the least."""
    plan: list[list[int]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for table in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        plan[rank].append(table)
        loads[rank] += costs[table]
    return plan


class Batch(NamedTuple):
    """A batch of all ranks: features [batch, DENSE], bags by table, labels [batch]."""

    features: torch.Tensor
    indices: list[torch.Tensor]
    starts: list[torch.Tensor]
    labels: torch.Tensor


def draw(step: int, device: str) -> Batch:
    """Return a batch, which every rank draws alike. A loader would read only what its rank needs.

    A rank needs its slice of features and labels, and the bags of its tables of the whole batch.
    """
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, DENSE, generator=generator)
    score, indices, starts = features[:, 0], [], []
    for height, count in zip(ROWS, LOOKUPS, strict=True):
        lengths = torch.randint(2 * count + 1, (BATCH,), generator=generator)  # 0: an empty bag
        ends = lengths.cumsum(0)
        index = torch.randint(height, (int(ends[-1]),), generator=generator)
        bag = torch.repeat_interleave(lengths)
        score = score.index_add(0, bag, torch.sin(7.0 * index) / count)  # what the model learns
        indices.append(index.to(device))
        starts.append((ends - lengths).to(device))
    return Batch(features.to(device), indices, starts, (score > 0).float().to(device))


class Mlps(nn.Module):
    """The dense part: every rank has a copy."""

    def __init__(self) -> None:
        super().__init__()
        vectors = len(ROWS) + 1
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.top = nn.Sequential(
            nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))

    def forward(self, features: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return scores [b] from features [b, DENSE] and pooled tables [b, tables x DIM]."""
        dense = self.bottom(features)
        vectors = torch.cat([dense, pooled], dim=1).view(-1, len(ROWS) + 1, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interaction = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, interaction], dim=1)).squeeze(1)


class PlainDlrm(nn.Module):
    """The whole model in one process, for comparison."""

    def __init__(self, mlps: Mlps, tables: list[torch.Tensor]) -> None:
        super().__init__()
        self.mlps = copy.deepcopy(mlps)
        self.tables = nn.ParameterList(table.clone() for table in tables)

    def forward(self, batch: Batch, order: list[int]) -> torch.Tensor:
        """Return the scores of the whole batch; tables are in the order of the plan."""
        pooled = [
            nn.functional.embedding_bag(
                batch.indices[i], self.tables[i], batch.starts[i], mode="sum"
            )
            for i in order
        ]
        return self.mlps(batch.features, torch.cat(pooled, dim=1))


class ShardedTables(nn.Module):
    """This rank's tables, with an optimizer that updates them in backward."""

    def __init__(self, tables: list[torch.Tensor], plan: list[list[int]], rank: int) -> None:
        super().__init__()
        self.mine, self.counts = plan[rank], [len(tables) for tables in plan]
        self.tables = nn.ParameterList(tables[i].clone() for i in self.mine)
        self.optimizer = ficco.FusedSGD(self.tables, lr=TABLE_RATE)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return this rank's slice of the batch [b, tables x DIM], of the tables of all ranks."""
        return ficco.embedding_all_to_all(
            self.tables,
            [batch.indices[i] for i in self.mine],
            [batch.starts[i] for i in self.mine],
            tables_per_rank=self.counts,
            dimension=DIM,
            batch=BATCH,
            device=batch.features.device,
            optimizer=self.optimizer,
        )


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the loss; the parts add up to the mean of the batch."""
    total = nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
    return total / BATCH


def add_up_gradients(module: nn.Module) -> None:
    """Add up the gradients of parameters of which every rank has a copy."""
    gradients = [p.grad for p in module.parameters()]
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined)
    for gradient, part in zip(gradients, joined.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def main() -> None:
    """Train the sharded model and the plain model with the same batches."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.manual_seed(0)
    mlps = Mlps().to(kind)
    tables = [0.1 * torch.randn(height, DIM, device=kind) for height in ROWS]
    plan = plan_tables([DIM * count for count in LOOKUPS], world)
    order = [table for tables_of_rank in plan for table in tables_of_rank]
    plain = PlainDlrm(mlps, tables)
    sharded = ShardedTables(tables, plan, rank)
    optimizer = torch.optim.SGD(mlps.parameters(), lr=RATE)
    plain_optimizer = torch.optim.SGD(
        [
            {"params": plain.mlps.parameters(), "lr": RATE},
            {"params": plain.tables.parameters(), "lr": TABLE_RATE},
        ]
    )
    if rank == 0:
        print(f"tables by rank: {plan}")
    for step in range(STEPS):
        batch = draw(step, kind)
        features, labels = (each.chunk(world)[rank] for each in (batch.features, batch.labels))
        loss = loss_of(mlps(features, sharded(batch)), labels)
        optimizer.zero_grad()
        loss.backward()  # updates the tables
        add_up_gradients(mlps)
        optimizer.step()

        plain_loss = loss_of(plain(batch, order), batch.labels)
        plain_optimizer.zero_grad()
        plain_loss.backward()
        plain_optimizer.step()

        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {whole.item():.4f}, plain {plain_loss.item():.4f}")
    gaps = [
        (table - plain.tables[i]).abs().max()
        for i, table in zip(sharded.mine, sharded.tables, strict=True)
    ]
    gap = torch.stack([*gaps, torch.zeros((), device=kind)]).max().detach()
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest difference of an entry of a table: {gap.item():.1e}")
    ficco.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
