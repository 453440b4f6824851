"""The operators as methods, and by name: what `ficco.Node` offers for each operator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from ficco.plan.schedule import Schedule

Array = npt.NDArray[Any]


class NodeOperators(ABC):
    """Calls of the operators, with a list of arrays per argument: one for each rank."""

    @abstractmethod
    def _call(
        self, name: str, schedule: str | Schedule | None, grain: int | None, **arguments: Any
    ) -> list[list[Array]]:
        """Return, per rank, all outputs of an operator."""

    def all_gather_matmul(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array | Sequence[Array]],
        *,
        bias: Sequence[Any] | None = None,
        axes: Sequence[str] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Any]:
        """Multiply the concatenation of all ranks' rows with each rank's weight.

        Args:
            xs: per rank x_r [m_r, k]; m_r may differ and be 0. Rows whose elements are not
                contiguous are copied first.
            ws: per rank w_r [k, n_r] with any strides, or a tuple of several weights that share
                the gather; n_r may differ and be 0.
            bias: per rank [n_r], or a tuple with one (or None) per weight; None: no bias.
            axes: per weight: "rows", or "contraction" for concat(x)^T . w_r with w_r [m, n_r].
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y_r [m, n_r] (along the contraction [k, n_r]); a tuple if ws has tuples.

        Raises:
            InputError: shapes or dtypes do not fit. ScheduleError: the schedule is not implemented.
            TimeoutExceeded, EngineError: the call failed.
        """
        outputs = self._call(
            "all_gather_matmul", schedule, grain, xs=xs, ws=ws, bias=bias, axes=axes
        )
        if any(isinstance(w, (tuple, list)) for w in ws):
            return [tuple(ys) for ys in outputs]
        return [ys[0] for ys in outputs]

    def matmul_reduce_scatter(
        self,
        xs: Sequence[Array | Sequence[Array]],
        ws: Sequence[Array | Sequence[Array]],
        *,
        rows: Sequence[int] | None = None,
        bias: Sequence[Any] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Sum all ranks' products, and give each rank its rows of the sum.

        Args:
            xs: per rank x_r [m, k_r], or several, whose products are added up.
            ws: per rank w_r [k_r, n], or several, one per x.
            rows: per rank, the number of rows it gets; default: torch.chunk's rule.
            bias: per rank [n], added to that rank's rows.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y_r [m_r, n].

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "matmul_reduce_scatter", schedule=schedule, grain=grain, xs=xs, ws=ws, rows=rows,
            bias=bias,
        )  # fmt: skip

    def matmul_all_reduce(
        self,
        xs: Sequence[Array | Sequence[Array]],
        ws: Sequence[Array | Sequence[Array]],
        *,
        bias: Sequence[Any] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Sum all ranks' products, and give every rank the whole sum.

        Args:
            xs: per rank x_r [m, k_r], or several, whose products are added up.
            ws: per rank w_r [k_r, n], or several, one per x.
            bias: per rank [n], the same on all.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y [m, n], bitwise equal on all.

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "matmul_all_reduce", schedule=schedule, grain=grain, xs=xs, ws=ws, bias=bias
        )

    def all_to_all_matmul(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array],
        splits: Sequence[Sequence[int]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Send every rank its block of rows, and multiply each rank's rows with its weight.

        Args:
            xs: per rank x_r [sum of splits[r], k], blocks for rank 0, 1, ... in this order.
            ws: per rank w_r [k, n].
            splits: splits[s][r] rows go from rank s to rank r.
            schedule: instead of the node's.
            grain: chunks per block, instead of the schedule's.

        Returns:
            Per rank [rows received, n], rows ordered by source rank.

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "all_to_all_matmul", schedule=schedule, grain=grain, xs=xs, ws=ws, splits=splits
        )

    def matmul_all_to_all(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array],
        splits: Sequence[Sequence[int]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Multiply each rank's rows with its weight, and send every rank its block of the product.

        Arguments, result and errors are as in `all_to_all_matmul`.
        """
        return self.call(
            "matmul_all_to_all", schedule=schedule, grain=grain, xs=xs, ws=ws, splits=splits
        )

    def embedding_all_to_all(
        self,
        tables: Sequence[Sequence[Array]],
        indices: Sequence[Sequence[Array]],
        offsets: Sequence[Sequence[Array]],
        *,
        rows: Sequence[int] | None = None,
        mode: str | Sequence[Any] = "sum",
        weights: Sequence[Any] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Pool every rank's tables for the whole batch; give each rank its slice of all tables.

        Args:
            tables: per rank its tables, each [rows, d].
            indices: per rank and table [lookups], int32 or int64, one dtype for all.
            offsets: per rank and table [batch], of that dtype: the start of each bag in its
                indices.
            rows: per rank, the rows of the batch that it gets; default: torch.chunk's rule.
            mode: "sum" or "mean" of the rows of a bag, or per rank one of them, or a list of them
                with an entry per table. The mean of an empty bag is 0.
            weights: per rank None, or a list with an array per table: float32 [lookups], which
                multiplies the rows of a sum; None: all are 1.
            schedule: instead of the node's.
            grain: chunks per batch slice, instead of the schedule's.

        Returns:
            Per rank [its rows, all tables of all ranks side by side].

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "embedding_all_to_all", schedule=schedule, grain=grain, tables=tables,
            indices=indices, offsets=offsets, rows=rows, mode=mode, weights=weights,
        )  # fmt: skip

    def dispatch_matmul(
        self,
        xs: Sequence[Array],
        ids: Sequence[Array],
        ws: Sequence[Array],
        *,
        capacity: int | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Send all tokens to all ranks, and multiply on each rank the rows of its experts.

        Args:
            xs: per rank its tokens [T_r, k].
            ids: per rank the experts of its tokens, [T_r, topk], NumPy arrays of integers. With e
                experts per rank, rank r has experts r * e to (r + 1) * e - 1. Below 0: none.
            ws: per rank the weights of its experts [e, k, n].
            capacity: rows of each result; None: as many as all tokens can need.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank [capacity, n]: a row for each slot of a token whose expert is on the rank, by
            expert; for each expert first those of the rank's own tokens, then the others, by
            number. The rows behind them are 0.

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "dispatch_matmul", schedule=schedule, grain=grain, xs=xs, ids=ids, ws=ws,
            capacity=capacity,
        )  # fmt: skip

    def matmul_combine(
        self,
        xs: Sequence[Array],
        ids: Sequence[Array],
        ws: Sequence[Array],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Multiply the rows of experts, return them to their tokens, and add them up there.

        Args:
            xs: per rank [capacity, k], rows as `dispatch_matmul` returns them.
            ids: as in `dispatch_matmul`.
            ws: per rank the weights of its experts [e, k, n].
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank [T_r, n]: for each token the sum of the rows of its slots, in order. It is NaN
            if an expert does not exist, or if a row did not fit into the capacity.

        Raises: as `all_gather_matmul`.
        """
        return self.call("matmul_combine", schedule=schedule, grain=grain, xs=xs, ids=ids, ws=ws)

    def call(
        self,
        name: str,
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
        **arguments: Any,
    ) -> list[Array]:
        """Run an operator by name, including those of `ficco.operators.register`.

        Args:
            name: the name of the operator.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.
            arguments: the operator's arguments; arrays are lists with an entry per rank.

        Returns:
            Per rank, its first output.

        Raises: as `all_gather_matmul`; InputError for an operator that is not registered.

        Example:
            >>> node.call("matmul_all_reduce", xs=xs, ws=ws)  # doctest: +SKIP
        """
        return [ys[0] for ys in self._call(name, schedule, grain, **arguments)]
