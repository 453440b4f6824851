"""A rank that holds pooled tables and updates against TorchRec and FBGEMM on the CPU.

python torchrec_worker.py STORE RANK WORLD
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from joining import join_gloo
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import ficco

HEIGHTS, DIM, BATCH = (11, 23, 7, 40), 8, 9
NAMES = [f"feature{i}" for i in range(len(HEIGHTS))]
Tensor = torch.Tensor


def lookups() -> tuple[Tensor, Tensor]:
    """Return the indices of all features, and lengths [features x batch]; some bags are empty."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(5, (len(HEIGHTS), BATCH), generator=generator)
    indices = [
        torch.randint(height, (int(row.sum()),), generator=generator)
        for height, row in zip(HEIGHTS, lengths, strict=True)
    ]
    return torch.cat(indices), lengths


class Mine:
    """This rank's tables, of which each rank has equally many, and their lookups."""

    def __init__(self, rank: int, world: int, weights: list[Tensor]) -> None:
        indices, lengths = lookups()
        count = len(HEIGHTS) // world
        self.places = range(rank * count, (rank + 1) * count)
        per_table = indices.split(lengths.sum(1).tolist())
        self.tables = [weights[i].clone().requires_grad_() for i in self.places]
        self.indices = [per_table[i] for i in self.places]
        self.starts = [lengths[i].cumsum(0) - lengths[i] for i in self.places]
        self.options: dict[str, Any] = {
            "tables_per_rank": [count] * world, "dimension": DIM, "batch": BATCH
        }  # fmt: skip

    def pooled(self, **more: Any) -> Tensor:
        return ficco.embedding_all_to_all(
            self.tables, self.indices, self.starts, **self.options, **more
        )


def collection(rank: int, world: int) -> None:
    """An EmbeddingBagCollection has the same results and gradients."""
    configs = [
        EmbeddingBagConfig(name=f"table{i}", embedding_dim=DIM, num_embeddings=height,
                           feature_names=[NAMES[i]])
        for i, height in enumerate(HEIGHTS)
    ]  # fmt: skip
    torch.manual_seed(0)
    whole = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    weights = [bag.weight for bag in whole.embedding_bags.values()]
    indices, lengths = lookups()
    features = KeyedJaggedTensor(keys=NAMES, values=indices, lengths=lengths.flatten())
    wanted = whole(features).values()
    (wanted**2).sum().backward()
    mine = Mine(rank, world, [weight.detach() for weight in weights])
    y = mine.pooled()
    torch.testing.assert_close(y, wanted.detach().chunk(world)[rank])
    (y**2).sum().backward()
    for i, table in zip(mine.places, mine.tables, strict=True):
        torch.testing.assert_close(table.grad, weights[i].grad)


def fused(rank: int, world: int) -> None:
    """FBGEMM's optimizers of the same definition update tables alike."""
    for kind, make in (
        (EmbOptimType.EXACT_SGD, ficco.FusedSGD),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, ficco.FusedRowWiseAdagrad),
    ):
        torch.manual_seed(0)
        theirs = SplitTableBatchedEmbeddingBagsCodegen(
            [(height, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for height in HEIGHTS],
            optimizer=kind, learning_rate=0.1, eps=1e-4, stochastic_rounding=False,
        )  # fmt: skip
        weights = theirs.split_embedding_weights()
        for weight in weights:
            weight.normal_()
        mine = Mine(rank, world, weights)
        more = {} if kind == EmbOptimType.EXACT_SGD else {"eps": 1e-4}
        optimizer = make(mine.tables, 0.1, **more)
        indices, lengths = lookups()
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        for _ in range(3):
            (theirs(indices, edges) ** 2).sum().backward()
            (mine.pooled(optimizer=optimizer) ** 2).sum().backward()
        for i, table in zip(mine.places, mine.tables, strict=True):
            torch.testing.assert_close(table.detach(), weights[i], atol=1e-5, rtol=1e-4)


def main(store: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    join_gloo(store, rank, world)
    collection(rank, world)
    fused(rank, world)
    ficco.close()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
