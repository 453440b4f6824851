"""The operators by name: what a record of an operator holds, and where records are kept.

`ficco.operators` registers those of ficco. Everything that is specific to an operator is in its
record; all other modules read the record, and name no operator.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ficco.errors import InputError, closest

if TYPE_CHECKING:
    from ficco.operators.blocks import Blocks
    from ficco.problem import Problem
    from ficco.symbolic import Content

__all__ = [
    "Array",
    "Arrays",
    "Draw",
    "Exact",
    "Expected",
    "Flow",
    "Operand",
    "Operator",
    "Posed",
    "get",
    "names",
    "register",
]

Array = Any  # of NumPy, or of a library that looks alike; a tensor of PyTorch
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Flow:
    """How an operator's data flows. Lowering, simulator, selector and serial calls follow it.

    Attributes:
        direction: "gather": inputs travel, and are multiplied where they arrive. "scatter":
            products travel.
        make: "products" (GEMMs) or "bags" (pooled rows of tables).
        finish: what is done with what arrives: "multiply"; "sum" (each rank adds up its rows);
            "share" (as "sum", and every rank gets all sums); "move" (into the output).
        collective: the collective that moves the bytes where nothing overlaps: "all_gather",
            "reduce_scatter", "all_reduce" or "all_to_all".
        splits: whether the rows of each pair of ranks are given, as `Problem.splits`.
        own_columns: whether every rank multiplies with columns of its own, and several weights
            may share a gather; else all ranks have the same columns of one product.
        one_kernel: the kernel that runs the whole call by stores, for few rows: "gather",
            "all_reduce", or "" where there is none.
    """

    direction: str
    make: str
    finish: str
    collective: str
    splits: bool = False
    own_columns: bool = False
    one_kernel: str = ""

    @property
    def gathers(self) -> bool:
        """Whether inputs travel."""
        return self.direction == "gather"

    @property
    def sums(self) -> bool:
        """Whether products of all ranks are added up."""
        return self.finish in ("sum", "share")

    @property
    def shares(self) -> bool:
        """Whether every rank gets all sums."""
        return self.finish == "share"

    @property
    def pools(self) -> bool:
        """Whether bags are made, and no products."""
        return self.make == "bags"

    @property
    def passes(self) -> int:
        """How often a rank sends a part of its data to every peer."""
        return 2 if self.shares else 1


class Operand(NamedTuple):
    """An input, a weight or an output of a rank: what `ficco.plan.Buffer` needs."""

    name: str
    role: str
    rows: int
    cols: int
    dtype: str


class Expected(NamedTuple):
    """What a box of an output must hold: rows [row0, row1), columns [col0, col1)."""

    buffer: str
    row0: int
    row1: int
    col0: int
    col1: int
    content: Content


class Exact(NamedTuple):
    """What a rank must get.

    Attributes:
        value: float64, of the output's shape.
        magnitude: the same sum over absolute values.
        partial: an upper bound of the absolute rounding of partial sums that travelled; [1, 1]
            where none did.
        terms: how many terms a sum has.
    """

    value: Array
    magnitude: Array
    partial: Array
    terms: int


class Draw(Protocol):
    """Draws random arrays, one after another."""

    def normal(self, rows: int, cols: int, scale: float = 1.0) -> Array:
        """Return [rows, cols] of N(0, scale^2) in the problem's dtype."""

    def integers(self, below: int, count: int) -> Array:
        """Return [1, count] of int64 from 0 to below-1, equally likely."""

    def rising(self, below: int, count: int) -> Array:
        """Return such integers in rising order, of which the first is 0."""


class Posed(NamedTuple):
    """A problem, and per rank its inputs by buffer name."""

    problem: Problem
    arrays: list[dict[str, Array]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All that is specific to an operator.

    Attributes:
        name: of the operator, its functions and its plans.
        label: a short name for tables and figures.
        flow: how its data flows.
        schedules: named schedules that not every operator has.
        check: refuses a problem of this operator that cannot be; messages name the field.
        fields: from world, m, n, k and rows per rank, the fields of `Problem.chunked`.
        result_shapes: of a problem and a rank, the shape of each output.
        operands: of a problem and a rank, its inputs, weights and outputs.
        meaning: of a problem and a rank, what every part of its outputs must hold.
        blocks: of a problem and a rank, which rows it has for each rank; this selects a lowering.
        inputs: of a problem, a rank and a `Draw`, random inputs by buffer name.
        alike: names of inputs that are the same on all ranks.
        reference: of a problem, all ranks' inputs and some ranks: what these must get, per output.
        pose: of a library of arrays and the arguments of the `Node` method, the problem and the
            inputs. Raises InputError for shapes, dtypes or sizes that do not fit.
        per_rank: arguments that are lists with an entry per rank, which every call has.
    """

    name: str
    label: str
    flow: Flow
    check: Callable[[Problem], None]
    fields: Callable[[int, int, int, int, tuple[int, ...]], dict[str, Any]]
    result_shapes: Callable[[Problem, int], list[tuple[int, int]]]
    operands: Callable[[Problem, int], list[Operand]]
    meaning: Callable[[Problem, int], Iterator[Expected]]
    blocks: Callable[[Problem, int], Blocks]
    inputs: Callable[[Problem, int, Draw], dict[str, Array]]
    reference: Callable[[Problem, Sequence[Arrays], Sequence[int]], list[list[Exact]]]
    pose: Callable[..., Posed]
    schedules: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ("xs", "ws")

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments of a call, those without a default first."""
        return tuple(inspect.signature(self.pose).parameters)[1:]  # behind the library


_operators: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Add an operator, and return it.

    Args:
        operator: its record.

    Raises:
        InputError: its name is taken, or no identifier.

    Example:
        >>> register(replace(get("matmul_all_to_all"), name="combine"))  # doctest: +SKIP
    """
    if not operator.name.isidentifier():
        raise InputError(f"operator {operator.name!r}: the name is an identifier, such as 'my_sum'")
    if operator.name in _operators:
        raise InputError(f"operator {operator.name!r} is registered already; take another name")
    _operators[operator.name] = operator
    return operator


def get(name: str) -> Operator:
    """Return an operator by name.

    Raises:
        InputError: there is none of this name.
    """
    found = _operators.get(name) if isinstance(name, str) else None
    if found is None:
        importlib.import_module("ficco.operators")  # registers those of ficco
        found = _operators.get(name) if isinstance(name, str) else None
    if found is None:
        raise InputError(
            f"unknown operator {name!r}{closest(name, names())}. Known: {', '.join(names())}"
        )
    return found


def names() -> tuple[str, ...]:
    """Return the names of all operators, those of ficco first."""
    importlib.import_module("ficco.operators")
    return tuple(_operators)
