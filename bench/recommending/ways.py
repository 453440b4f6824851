"""Ways to pool sharded tables and to update them: by PyTorch's calls, and by ficco."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

import ficco
from recommending.shapes import Batch, Shape

__all__ = ["WAYS", "ByFicco", "ByTorch", "Way"]

WAYS = {
    "torch_dense": "embedding_bag for each table, one packed all_to_all_single each way, in flight "
    "beside the bottom MLP; dense gradients, torch.optim.SGD",
    "torch_sparse": "the same with sparse gradients, added to the tables by index_add_",
    "ficco_dense": "ficco.embedding_all_to_all, dense gradients, torch.optim.SGD",
    "ficco_sparse": "the same with sparse gradients, added to the tables by index_add_",
    "ficco_fused": "the same with ficco.FusedSGD",
    "ficco_adagrad": "the same with ficco.FusedRowWiseAdagrad, which PyTorch does not have",
}
Tensor = torch.Tensor


class Way:
    """A way to look up this rank's tables.

    Args:
        shape: of the model.
        counts: tables by rank.
        rank: this rank.
        tables: this rank's tables, which all ways share.
        batch: this rank's part of the batch.
        kind: the second part of the way's name.
        rate: the learning rate, a tensor of one element.
    """

    def __init__(
        self, shape: Shape, counts: list[int], rank: int, tables: list[Tensor], batch: Batch,
        kind: str, rate: Tensor,
    ) -> None:  # fmt: skip
        self.shape, self.counts, self.rank, self.world = shape, counts, rank, len(counts)
        self.tables, self.batch, self.kind, self.rate = tables, batch, kind, rate
        self.own = shape.batch // self.world
        self.optimizer: Any = None
        if kind == "dense" and tables:
            self.optimizer = torch.optim.SGD(tables, lr=0.0)

    def begin(self) -> Any:
        """Begin to pool the tables; return what `end` takes."""
        raise NotImplementedError

    def end(self, begun: Any) -> list[Tensor]:
        """Return this rank's slice of all tables, in blocks [b, tables, dim]."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop the gradients of the tables."""
        for table in self.tables:
            table.grad = None

    def step(self) -> None:
        """Update the tables, if backward has not done so."""
        if self.optimizer is not None:
            self.optimizer.step()
        elif self.kind == "sparse":
            for table in self.tables:
                gradient = table.grad
                assert gradient is not None
                table.detach().index_add_(0, gradient._indices()[0], gradient._values(), alpha=-0.0)


class ByTorch(Way):
    """What people write by hand."""

    def begin(self) -> Any:
        """See `Way.begin`."""
        sparse = self.kind == "sparse"
        pooled = [
            embedding_bag(index, table, start, mode="sum", sparse=sparse)
            for table, index, start in zip(
                self.tables, self.batch.indices, self.batch.starts, strict=True
            )
        ]
        exchange = _Exchange(self)
        return exchange, _Begin.apply(torch.cat(pooled, dim=1), exchange)

    def end(self, begun: Any) -> list[Tensor]:
        """See `Way.end`."""
        exchange, arrived = begun
        blocks = _End.apply(arrived, exchange)
        return [block.view(self.own, -1, self.shape.dim) for block in blocks]


class _Exchange:
    """The sizes of a call's exchanges, and what is in flight."""

    def __init__(self, way: Way) -> None:
        area = way.own * way.shape.dim
        self.from_each = [area * count for count in way.counts]
        self.to_each = [area * way.counts[way.rank]] * way.world
        self.rows, self.pooled_rows = way.own, way.shape.batch
        self.work: Any = None
        self.kept: Tensor | None = None


class _Begin(torch.autograd.Function):
    """Begins the all-to-all of pooled tables; in backward, ends that of their gradients."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, exchange: _Exchange) -> Tensor:
        """Send [batch, own tables x dim] by rows."""
        ctx.exchange = exchange
        arrived = pooled.new_empty(sum(exchange.from_each))
        exchange.kept = pooled.contiguous().view(-1)
        exchange.work = dist.all_to_all_single(
            arrived, exchange.kept, exchange.from_each, exchange.to_each, async_op=True
        )
        return arrived

    @staticmethod
    def backward(ctx: Any, returned: Tensor) -> Any:
        """Wait for the gradients [batch, own tables x dim]."""
        ctx.exchange.work.wait()
        ctx.exchange.kept = None
        return ctx.exchange.back.view(ctx.exchange.pooled_rows, -1), None


class _End(torch.autograd.Function):
    """Ends the all-to-all of pooled tables; in backward, begins that of their gradients."""

    @staticmethod
    def forward(ctx: Any, arrived: Tensor, exchange: _Exchange) -> Any:
        """Return a block [b, tables x dim] for each rank."""
        exchange.work.wait()
        exchange.kept = None
        ctx.exchange = exchange
        parts = arrived.split(exchange.from_each)
        return tuple(part.view(exchange.rows, -1) for part in parts)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        """Pack the blocks' gradients, and send them."""
        exchange = ctx.exchange
        packed = dys[0].new_empty(sum(exchange.from_each))
        for part, dy in zip(packed.split(exchange.from_each), dys, strict=True):
            part.view(dy.shape).copy_(dy)
        exchange.kept, exchange.back = packed, packed.new_empty(sum(exchange.to_each))
        exchange.work = dist.all_to_all_single(
            exchange.back, packed, exchange.to_each, exchange.from_each, async_op=True
        )
        return packed, None  # only its shape is used


class ByFicco(Way):
    """ficco.embedding_all_to_all, with gradients of its own or an update in backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.more: dict[str, Any] = {"sparse": self.kind == "sparse"}
        if self.kind == "fused":
            self.more = {"optimizer": ficco.FusedSGD(self.tables, self.rate)}
        elif self.kind == "adagrad":
            self.more = {"optimizer": ficco.FusedRowWiseAdagrad(self.tables, self.rate)}

    def begin(self) -> Any:
        """See `Way.begin`."""
        return ficco.embedding_all_to_all(
            self.tables, self.batch.indices, self.batch.starts, tables_per_rank=self.counts,
            dimension=self.shape.dim, batch=self.shape.batch, dtype=self.batch.features.dtype,
            device=self.batch.features.device, **self.more,
        )  # fmt: skip

    def end(self, begun: Any) -> list[Tensor]:
        """See `Way.end`."""
        return [begun.view(self.own, self.shape.tables, self.shape.dim)]
