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
    "Function",
    "Kept",
    "Local",
    "Operand",
    "Operator",
    "Posed",
    "follow",
    "function",
    "get",
    "names",
    "register",
    "register_function",
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


class Local(NamedTuple):
    """A call of one rank: the problem, and this rank's tensors by buffer name."""

    problem: Problem
    tensors: dict[str, Array]


class Kept(NamedTuple):
    """What a function of PyTorch keeps for its gradient.

    Attributes:
        tensors: those that some gradient needs; None in the place of others.
        rest: the arguments that are no tensors.
        needs: per tensor of the call, whether its gradient is wanted.
        shapes: of the tensors of the call.
    """

    tensors: Sequence[Any]
    rest: tuple[Any, ...]
    needs: Sequence[bool]
    shapes: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Function:
    """An operator as a function of PyTorch's tensors, of one rank.

    Arguments of a call are a sequence in the order of the schema. They are taken apart into
    tensors, in one flat list, and the rest, which no gradient is of and which ends with group,
    schedule and grain. Code here uses methods of tensors alone, and does not load PyTorch.

    Attributes:
        name: in the namespace `torch.ops.ficco`.
        schema: of torch.library.
        shapes: of `ranks` (from a group, this rank and the number of ranks) and the arguments, what
            the call returns, empty: arithmetic on sizes alone, so that symbolic sizes pass.
        flat: of the arguments, the tensors and the rest.
        nested: the inverse of `flat`; of gradients in the places of tensors, too.
        local: of a `Call` and the arguments in front of group, the `Local` call; or its results,
            where no element is to be exchanged. None: the function has code of its own.
        flops: of the shapes of tensors, the operations; None: none are counted.
        keep: of the tensors, the rest, which gradients are needed, and the outputs: what `gradient`
            needs. None: the function has no gradient.
        gradient: of a `Gradients`, what was `Kept`, and the gradients of the outputs (None: none):
            a gradient, or None, per tensor.
        visible: how many outputs the user sees, given the rest; None: all.
        several: whether a call returns a list of tensors.
        cached: whether calls of equal sizes are remembered.
        sends: whether the function is a collective.
        casts: whether autocast casts the tensors.
        group_at: the place of group among the arguments; None: there is none.
    """

    name: str
    schema: str
    shapes: Callable[..., Any]
    flat: Callable[[Sequence[Any]], tuple[list[Any], tuple[Any, ...]]]
    nested: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    local: Callable[..., Any] | None = None
    flops: Callable[..., int] | None = None
    keep: Callable[..., list[Any]] | None = None
    gradient: Callable[..., list[Any]] | None = None
    visible: Callable[[Sequence[Any]], int] | None = None
    several: bool = False
    cached: bool = True
    sends: bool = True
    casts: bool = True
    group_at: int | None = -3


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All that is specific to an operator.

    Attributes:
        name: of the operator, its functions and its plans.
        label: a short name for tables and figures.
        flow: how its data flows.
        function: the operator as a function of PyTorch; None: it has none.
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
        pose: of the name, a library of arrays and the arguments of the `Node` method, the problem
            and the inputs. Raises InputError for shapes, dtypes or sizes that do not fit.
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
    function: Function | None = None
    schedules: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ("xs", "ws")

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments of a call, those without a default first."""
        return tuple(inspect.signature(self.pose).parameters)[2:]


_operators: dict[str, Operator] = {}
_functions: dict[str, Function] = {}
_followers: list[Callable[[Function], None]] = []  # are given every function


def register(operator: Operator) -> Operator:
    """Add an operator and its function, and return it.

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
    if operator.function is not None:
        register_function(operator.function)
    _operators[operator.name] = operator
    return operator


def register_function(function: Function) -> Function:
    """Add a function of PyTorch that is no operator with a plan, and return it.

    Raises:
        InputError: its name is taken.
    """
    if function.name in _functions:
        raise InputError(f"function {function.name!r} is registered already; take another name")
    _functions[function.name] = function
    for follower in _followers:
        follower(function)
    return function


def follow(follower: Callable[[Function], None]) -> None:
    """Call a function with every `Function`: those registered so far, and later ones."""
    names()
    for function in _functions.values():
        follower(function)
    _followers.append(follower)


def function(name: str) -> Function:
    """Return a function of PyTorch by name (KeyError where there is none)."""
    return _functions[name]


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
