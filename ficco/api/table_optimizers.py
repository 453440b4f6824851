"""Optimizers that update embedding tables during backward, in place of gradients of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ficco.api.row_sums import RowSums
from ficco.api.sorted_rows import Looked, can_update, prepare_updates
from ficco.api.table_gradients import Lookups, Pools
from ficco.core.dtypes import DTYPES
from ficco.core.errors import InputError, shown
from ficco.engine.compute.torch_dtypes import PROBLEM_NAME_OF
from ficco.kernels import row_updates

Tensor = torch.Tensor

# Of float32, in which updates are computed.
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class FusedOptimizer:
    """The common part of `FusedSGD` and `FusedRowWiseAdagrad`.

    Args:
        tables: the tables of this rank, on the device where they will be updated.
        lr: the learning rate.

    Attributes:
        tables: as above.
    """

    def __init__(self, tables: Iterable[Tensor], lr: float | Tensor) -> None:
        if isinstance(tables, Tensor) or not hasattr(tables, "__iter__"):
            kind = type(tables).__name__
            raise InputError(f"tables: {kind} found; a list of this rank's tables is needed")
        self.tables = list(tables)
        for i, table in enumerate(self.tables):
            _check_table(table, f"tables[{i}]")
        self.lr = lr

    @property
    def lr(self) -> float | Tensor:
        """The learning rate; it may be set between steps."""
        return self._lr

    @lr.setter
    def lr(self, value: float | Tensor) -> None:
        self._lr = _checked_rate(value, self.tables)

    def places_of(self, tables: Sequence[Tensor]) -> list[int]:
        """Return the places of a call's tables among those of the optimizer.

        Raises:
            InputError: a table is not one of them, is given twice, or cannot be updated; or a
                tensor of the optimizer does not fit the table.
        """
        known = {id(table): i for i, table in enumerate(self.tables)}
        places = []
        for i, table in enumerate(tables):
            _check_table(table, f"tables[{i}]")
            if id(table) not in known:
                raise InputError(
                    f"tables[{i}] is not one of the {len(self.tables)} tables of the optimizer; "
                    "give the same tensors to both"
                )
            places.append(known[id(table)])
            self._check_tensors(places[-1], f"tables[{i}]")
        if len(set(places)) < len(places):
            raise InputError("tables: one table is given twice; a call updates a table once")
        return places

    def _check_tensors(self, place: int, name: str) -> None:
        """Refuse a table whose update cannot be computed with the optimizer's own tensors."""
        device = self.tables[place].device
        for about, own in self._tensors_of(place).items():
            if own.device != device:
                raise InputError(
                    f"{name} is on {device}, the optimizer's {about} is on {own.device}; make the "
                    "optimizer after the tables are on their device"
                )

    def _tensors_of(self, place: int) -> dict[str, Tensor]:
        """Return the optimizer's own tensors that an update of a table reads, by name."""
        return {"lr": self._lr} if isinstance(self._lr, Tensor) else {}

    def begin(self, places: Sequence[int], pools: Pools) -> Callable[[Tensor], None]:
        """Sort the lookups, and return the function that updates the rows that were looked up.

        Args:
            places: of the tables among those of the optimizer, in the order of the call; at least
                one.
            pools: of these tables, with a lookup at least.

        Returns:
            A function of the gradients of bags [batch x tables, dimension].
        """
        tables = [self.tables[place].detach() for place in places]
        if can_update(tables):
            looked = Looked(pools, range(len(places)), len(places))
            update = prepare_updates(looked, tables, self._accumulators(places), self._kind)
            if update is not None:

                def change(bags: Tensor) -> None:
                    if not update(bags, self._lr, self.eps):
                        self._by_pytorch(places, RowSums(Lookups(*pools)), bags)

                return change
        sums = RowSums(Lookups(*pools))
        return lambda bags: self._by_pytorch(places, sums, bags)

    _kind: int  # of `row_updates`
    eps = 0.0  # of Adagrad

    def _accumulators(self, places: Sequence[int]) -> list[Tensor] | None:
        """Return those of the tables at these places, if the optimizer has any."""
        return None

    def _by_pytorch(self, places: Sequence[int], sums: RowSums, bags: Tensor) -> None:
        rows = torch.split(sums.rows, sums.sizes)
        changes = torch.split(self._changes(places, rows, sums, bags), sums.sizes)
        for place, chosen, change in zip(places, rows, changes, strict=True):
            table = self.tables[place].detach()
            table.index_add_(0, chosen, change.to(table.dtype))  # unused slots add zeros

    def _changes(
        self, places: Sequence[int], rows: Sequence[Tensor], sums: RowSums, bags: Tensor
    ) -> Tensor:
        """Return what is added to the rows [slots, dimension].

        Args:
            places: as of `begin`.
            rows: of each table, [slots].
            sums: made from the lookups.
            bags: gradients of bags [batch x tables, dimension].
        """
        raise NotImplementedError


class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent: row -= lr x the row's gradient, in backward.

    FBGEMM calls it EXACT_SGD. See `embedding_all_to_all` for what an update in backward replaces.

    Args:
        tables: the tables of this rank, which require gradients. Move them to their device first.
        lr: the learning rate: a number, or a tensor of one element on the device of the tables. A
            captured graph reads the tensor at every replay; a number is part of the graph.

    Attributes:
        lr: as above; it may be set between steps.

    Raises:
        InputError: a table cannot be updated, or lr is below 0 or more than float32 holds.

    Example:
        >>> table = torch.ones(9, 4, requires_grad=True)
        >>> optimizer = ficco.FusedSGD([table], lr=0.5)
        >>> y = ficco.embedding_all_to_all(
        ...     [table], [torch.tensor([1, 2, 2])], [torch.tensor([0, 2])], tables_per_rank=[1],
        ...     dimension=4, batch=2, optimizer=optimizer)
        >>> y.sum().backward()
        >>> table[:3, 0].tolist(), table.grad
        ([1.0, 0.5, 0.0], None)
    """

    _kind = row_updates.SGD

    def _changes(
        self, places: Sequence[int], rows: Sequence[Tensor], sums: RowSums, bags: Tensor
    ) -> Tensor:
        return sums.of(bags.float() * -self.lr)  # there are fewer bags than slots


class FusedRowWiseAdagrad(FusedOptimizer):
    """Adagrad with one accumulator per row, in backward.

    The accumulator grows by the mean of the squares of the row's gradient; then
    row -= lr x gradient / (sqrt(accumulator) + eps). FBGEMM calls it EXACT_ROWWISE_ADAGRAD.

    Args:
        tables: the tables of this rank, which require gradients. Move them to their device first.
        lr: as of `FusedSGD`.
        eps: more than 0.
        initial_accumulator_value: of all rows, 0 or more.

    Attributes:
        lr: as above; it may be set between steps.
        accumulators: per table, float32 [rows]; save and restore them with the tables.

    Raises:
        InputError: a table cannot be updated, or a number is out of bounds.

    Example:
        >>> table = torch.ones(9, 4, requires_grad=True)
        >>> optimizer = ficco.FusedRowWiseAdagrad([table], lr=0.1)
        >>> y = ficco.embedding_all_to_all(
        ...     [table], [torch.tensor([1, 2, 2])], [torch.tensor([0, 2])], tables_per_rank=[1],
        ...     dimension=4, batch=2, optimizer=optimizer)
        >>> y.sum().backward()
        >>> optimizer.accumulators[0][:3].tolist()
        [0.0, 1.0, 4.0]
    """

    _kind = row_updates.ADAGRAD

    def __init__(
        self,
        tables: Iterable[Tensor],
        lr: float | Tensor,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        super().__init__(tables, lr)
        if not (_is_number(eps) and _LEAST <= eps <= _MOST):
            raise InputError(
                f"eps={shown(eps)}: a number from {_LEAST:.2g} to {_MOST:.2g} is needed"
            )
        begin = initial_accumulator_value
        if not (_is_number(begin) and 0 <= begin <= _MOST):
            raise InputError(
                f"initial_accumulator_value={shown(begin)}: a number from 0 to {_MOST:.2g} is "
                "needed"
            )
        self.eps = eps
        self.accumulators = [
            torch.full((table.shape[0],), float(begin), dtype=torch.float32, device=table.device)
            for table in self.tables
        ]

    def _accumulators(self, places: Sequence[int]) -> list[Tensor] | None:
        return [self.accumulators[place] for place in places]

    def _check_tensors(self, place: int, name: str) -> None:
        """See `FusedOptimizer._check_tensors`: the accumulators are the user's to restore."""
        super()._check_tensors(place, name)
        own, rows = self.accumulators[place], self.tables[place].shape[0]
        if own.dtype != torch.float32 or own.shape != (rows,) or not own.is_contiguous():
            raise InputError(
                f"accumulators[{place}] of the optimizer is {list(own.shape)}, {own.dtype}, with "
                f"strides {list(own.stride())}; contiguous float32 [{rows}] is needed for {name}"
            )

    def _tensors_of(self, place: int) -> dict[str, Tensor]:
        return {**super()._tensors_of(place), f"accumulators[{place}]": self.accumulators[place]}

    def _changes(
        self, places: Sequence[int], rows: Sequence[Tensor], sums: RowSums, bags: Tensor
    ) -> Tensor:
        gradients = sums.of(bags)
        squares = torch.linalg.vector_norm(gradients, dim=1).square_().div_(gradients.shape[1])
        found = []
        for place, chosen, square in zip(
            places, rows, torch.split(squares, sums.sizes), strict=True
        ):
            own = self.accumulators[place]
            own.index_add_(0, chosen, square)
            found.append(own[chosen])
        factors = torch.cat(found).sqrt_().add_(self.eps).reciprocal_().mul_(-self.lr)
        return gradients.mul_(factors.unsqueeze(1))


def _check_table(table: Any, name: str) -> None:
    """Refuse what backward cannot update."""
    if not isinstance(table, Tensor):
        raise InputError(f"{name}: {type(table).__name__} found; a torch tensor is needed")
    if table.dim() != 2 or table.dtype not in PROBLEM_NAME_OF:
        known = ", ".join(DTYPES)
        raise InputError(
            f"{name} is {list(table.shape)}, {table.dtype}; a table is [rows, dimension], of "
            f"{known}"
        )
    if not table.requires_grad:
        raise InputError(
            f"{name} does not require a gradient, so backward cannot update it; call its "
            "requires_grad_(), or leave optimizer= out"
        )
    if not table.is_leaf:
        raise InputError(
            f"{name} is computed from other tensors, so an update of it would be lost; give the "
            "parameter itself"
        )
    if _overlaps_itself(table):
        raise InputError(
            f"{name} is {list(table.shape)} with strides {list(table.stride())}, as of an expanded "
            "tensor: elements share memory, so an update of one would change others; give a copy, "
            "such as table.detach().clone().requires_grad_()"
        )


def _overlaps_itself(table: Tensor) -> bool:
    """Return whether elements of a matrix may share memory."""
    # Per dimension of more than one element: the smaller stride, the elements along it.
    places = sorted((step, n) for step, n in zip(table.stride(), table.shape, strict=True) if n > 1)
    reach = 0  # the last element of the dimensions before
    for step, n in places if table.numel() else ():
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _checked_rate(value: Any, tables: Sequence[Tensor]) -> float | Tensor:
    """Return a learning rate.

    Raises:
        InputError: it is neither a number nor a tensor that the tables' device can read.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise InputError(
                f"lr is {list(value.shape)}, {value.dtype}; a tensor of one element is needed, "
                "such as torch.tensor(0.1)"
            )
        for i, table in enumerate(tables):
            if table.device != value.device:
                raise InputError(
                    f"lr is on {value.device}, tables[{i}] is on {table.device}; give one device"
                )
        return value.detach().reshape(())
    if not (_is_number(value) and 0 <= value <= _MOST):
        raise InputError(
            f"lr={shown(value)}: a number from 0 to {_MOST:.2g}, or a tensor, is needed"
        )
    return float(value)
