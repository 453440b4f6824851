"""The registry of operators: the type of an operator's record, and the records by name.

`ficco.operators` registers ficco's own operators. A record holds all data and code that is specific
to an operator; all other modules read records and name no operator.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ficco.core.errors import InputError, closest, shown

if TYPE_CHECKING:
    from ficco.operators.blocks import Blocks
    from ficco.operators.problem import Problem
    from ficco.operators.symbolic import Content

Array = Any  # an array of NumPy or a compatible library, or a PyTorch tensor
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Flow:
    """How an operator's data flows. Lowering, simulator, selector and serial calls depend on it.

    Attributes:
        direction: "gather": inputs travel and are multiplied at the receiver. "scatter":
            products travel.
        make: "products" (GEMMs), "bags" (pooled rows of tables), or "experts" (rows times the
            weights of their experts, by a routing table on the device).
        finish: the work on arrivals: "multiply"; "sum" (each rank adds up its rows); "share" (as
            "sum", and every rank gets all sums); "move" (into the output); "combine" (each rank
            adds up the rows of a token's slots).
        collective: the collective that moves the bytes without overlap: "all_gather",
            "reduce_scatter", "all_reduce" or "all_to_all".
        splits: whether `Problem.splits` gives the rows for each pair of ranks.
        own_columns: whether every rank multiplies with its own columns, and several weights may
            share a gather; else all ranks have the same columns of one product.
        one_kernel: the kernel that runs the whole call by stores: "gather" or "all_reduce", for few
            rows; "pool"; or "" for none.
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
        """Whether the operator makes bags, not products."""
        return self.make == "bags"

    @property
    def routes(self) -> bool:
        """Whether rows are multiplied with the weights of their experts."""
        return self.make == "experts"

    @property
    def adds_by_library(self) -> bool:
        """Whether the collective without overlap adds up data of ranks, and rounds the sums."""
        return self.collective in ("reduce_scatter", "all_reduce")

    @property
    def passes(self) -> int:
        """How often a rank sends a part of its data to every peer."""
        return 2 if self.shares else 1


Extent = int  # a size of an operand


class Role(NamedTuple):
    """What a role of operands means.

    Attributes:
        buffer: the role of its buffer in plans, see `ficco.plan.ROLES`.
        layout: of the array that a caller passes: "rows" (a matrix with contiguous rows, as copy
            engines and bulk loads read it), "any" (a matrix with any strides), "vector" (one
            dimension, which becomes a contiguous [1, n]), or "stack" (three dimensions, which
            become the contiguous matrices of all experts, one below the other).
        aligned: whether the kernels of the pack need its rows aligned.
    """

    buffer: str
    layout: str
    aligned: bool = False

    @property
    def travels(self) -> bool:
        """Whether copy engines read it."""
        return self.buffer == "input" and self.layout == "rows"


ROLES = {
    "input": Role("input", "rows", aligned=True),
    "weight": Role("weight", "any", aligned=True),
    "output": Role("output", "any"),
    "bias": Role("weight", "vector", aligned=True),
    "term": Role("input", "rows"),
    "table": Role("weight", "rows"),
    "indices": Role("input", "vector"),
    "offsets": Role("input", "vector"),
    "factors": Role("input", "vector"),
    "routing": Role("input", "vector"),
    "experts": Role("weight", "stack", aligned=True),
}
"""The roles of operands, by name.

"input" travels, or is multiplied with a "weight". "bias" is one row that is added to all rows of
the output that it follows. "term" has a row for each row of the input that it follows; it travels
with these rows, and is added to their products. "factors" are the weights of the lookups of bags.
"routing" is a table of `operators.routing`; "experts" are the weights of a rank's experts.
"""


class Operand(NamedTuple):
    """An input, a weight or an output of a rank.

    Attributes:
        name: of its buffer.
        role: one of `ROLES`.
        rows, cols: its size on the rank.
        dtype: of its elements.
        follows: of an attachment, the operand that it belongs to: an attachment is cut, travels and
            is bound with that operand. "": it is no attachment.
    """

    name: str
    role: str
    rows: Extent
    cols: Extent
    dtype: str
    follows: str = ""


class Attachment(NamedTuple):
    """An operand that a record adds to those of its operator, with a row per row of another.

    Attributes:
        name: of its buffer.
        role: "term"; see `ROLES`.
        follows: the input that it belongs to.
        dtype: of its elements; "": that of the problem.
    """

    name: str
    role: str
    follows: str
    dtype: str = ""


class Expected(NamedTuple):
    """The required content of a box of an output: rows [row0, row1), columns [col0, col1)."""

    buffer: str
    row0: int
    row1: int
    col0: int
    col1: int
    content: Content


class Exact(NamedTuple):
    """The exact output of a rank.

    Attributes:
        value: float64, of the output's shape.
        magnitude: the same sum over absolute values.
        partial: an upper bound of the absolute values of partial sums that are rounded to travel;
            [1, 1] if none travel.
        terms: the number of terms of a sum.
    """

    value: Array
    magnitude: Array
    partial: Array
    terms: int


class Draw(Protocol):
    """Draws random arrays, one after another."""

    def normal(self, rows: int, cols: int, scale: float = 1.0, dtype: str = "") -> Array:
        """Return [rows, cols] of N(0, scale^2) in a dtype; "": that of the problem."""

    def integers(self, below: int, count: int, dtype: str = "int64") -> Array:
        """Return [1, count] of integers of a dtype, uniform from 0 to below-1."""

    def rising(self, below: int, count: int, dtype: str = "int64") -> Array:
        """Return [1, count] of such integers in ascending order, with 0 first."""


class Posed(NamedTuple):
    """A problem, and per rank its inputs by buffer name."""

    problem: Problem
    arrays: list[dict[str, Array]]


class Local(NamedTuple):
    """A call of one rank: the problem, and this rank's tensors by buffer name.

    Attributes:
        results: the results of a rank whose own matrices are empty. It runs the problem only to
            find out whether those of other ranks are empty too. None: the outputs of the problem
            are the results.
        empty: what is empty on this rank, and so must be on the others; a sentence without a stop.
    """

    problem: Problem
    tensors: dict[str, Array]
    results: list[Array] | None = None
    empty: str = ""


class Kept(NamedTuple):
    """The data that a function of PyTorch saves for its gradient.

    Attributes:
        tensors: tensors that a gradient needs; None in place of others.
        rest: the arguments that are not tensors.
        needs: per tensor of the call, whether this backward needs its gradient.
        shapes: the shapes of the tensors of the call.
        arrivals: what one backward receives from other ranks for a later one.
        sink: where the gradient of the call's only weight is added; None: it is returned.
    """

    tensors: Sequence[Any]
    rest: tuple[Any, ...]
    needs: Sequence[bool]
    shapes: Sequence[Any]
    arrivals: Arrivals
    sink: Sink | None = None


class Sink(Protocol):
    """A buffer that collects the gradient of a weight w [k, n], such as Megatron's main_grad.

    Both methods return what autograd passes on in place of the gradient.
    """

    def add(self, dw: Array) -> Array | None:
        """Add a gradient [k, n]."""

    def add_product(self, x: Array, dy: Array) -> Array | None:
        """Add x^T dy in one GEMM, which does not round the product to the dtype of w."""


class Arrivals(Protocol):
    """What a backward received from other ranks, kept for a later backward of the same call.

    Zero-bubble pipelines run two: one for the gradients of inputs, a later one for those of
    weights. The later one multiplies what the first one received, and sends nothing.

    Attributes:
        wanted: whether a later backward may ask for the gradients that this one does not need.
    """

    wanted: bool

    def of(self, sent: Array | None) -> Array | None:
        """Return what an earlier backward received, or None.

        `sent` is the gradient that was sent, or None for an input of the call.
        """

    def keep(self, sent: Array | None, arrived: Array) -> None:
        """Keep what arrived if it is wanted; see `of`."""


@dataclass(frozen=True, kw_only=True)
class Function:
    """An operator as a function of one rank's PyTorch tensors.

    The arguments of a call are a sequence in the order of the schema. They are split into a flat
    list of tensors, and the rest, which has no gradients and ends with group, schedule and grain.
    The code uses only methods of tensors and does not load PyTorch.

    Attributes:
        name: the name in the namespace `torch.ops.ficco`.
        schema: the schema for torch.library.
        shapes: maps `ranks` (a function from a group to this rank and the number of ranks) and the
            arguments to empty results. It only computes sizes, so symbolic sizes work.
        flat: maps the arguments to the tensors and the rest.
        nested: the inverse of `flat`; it also takes gradients in place of tensors.
        local: maps a `Call` and the arguments before group to the `Local` call, or to its results
            if no data is exchanged. None: the function has its own code.
        flops: maps the shapes of the tensors to the operations; None: not counted.
        keep: maps the tensors, the rest, the needed gradients, and the outputs to the tensors that
            `gradient` needs. None: the function has no gradient.
        gradient: maps a `Gradients`, the `Kept` data, and the gradients of the outputs (or None) to
            a gradient, or None, per tensor.
        visible: maps the rest to the number of outputs that the user gets; None: all.
        several: whether a call returns a list of tensors.
        sends: whether the function is a collective.
        casts: whether autocast casts the tensors.
        group_at: the index of group among the arguments; None: there is none.
        leading: the place among the tensors, and the name in messages, of the tensor that sets the
            dtype, the device and the first dimension of the call.
        joins_pairs: whether pairs of x and w may be concatenated into one pair.
        lengths: maps the number of tensors, and the rest, to the places of rows whose length may
            differ between calls of one plan, as `operators.functions.rounded_length` says, each
            with the place of the row whose length it has; None: there are none.
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
    sends: bool = True
    casts: bool = True
    group_at: int | None = -3
    leading: tuple[int, str] = (0, "x")
    joins_pairs: bool = False
    lengths: Callable[[int, Sequence[Any]], Mapping[int, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """All data and code that is specific to an operator.

    Attributes:
        name: the name of the operator, its functions and its plans.
        label: a short name for tables and figures.
        flow: how its data flows.
        function: the operator as a function of PyTorch; None: it has none.
        about: one line on what a rank gets, for lists.
        schedules: named schedules that not every operator has.
        general: whether it has the schedules of every operator, too; else only `serial`.
        check: rejects an invalid problem of this operator; messages name the field. None: the
            checks of `Problem` suffice.
        fields: maps world, m, n, k and rows per rank to the fields of `Problem.chunked`.
        result_shapes: maps a problem and a rank to the shape of each output.
        operands: maps a problem and a rank to its inputs and weights, without biases and
            `attachments`; see `Problem.operands`.
        attachments: further operands, which follow an input.
        meaning: maps a problem and a rank to the required content of its outputs.
        blocks: maps a problem and a rank to its rows for each rank; this selects a lowering.
        alike: roles of operands that are the same on all ranks.
        drawn: maps a problem and a `Draw` to some random inputs of all ranks, by buffer name, which
            are not independent; None: there are none.
        reference: maps a problem, all ranks' inputs and some ranks to their exact outputs.
        pose: maps the name, a library of arrays and the arguments of the `Node` method to the
            problem and the inputs, or to every rank's outputs if no data is exchanged. Raises
            InputError if shapes, dtypes or sizes do not fit.
        per_rank: required arguments that are lists with an entry per rank.
    """

    name: str
    label: str
    flow: Flow
    fields: Callable[[int, int, int, int, tuple[int, ...]], dict[str, Any]]
    result_shapes: Callable[[Problem, int], list[tuple[int, int]]]
    operands: Callable[[Problem, int], list[Operand]]
    meaning: Callable[[Problem, int], Iterator[Expected]]
    blocks: Callable[[Problem, int], Blocks]
    reference: Callable[[Problem, Sequence[Arrays], Sequence[int]], list[list[Exact]]]
    pose: Callable[..., Posed | list[list[Array]]]
    check: Callable[[Problem], None] | None = None
    function: Function | None = None
    about: str = ""
    schedules: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    alike: tuple[str, ...] = ()
    per_rank: tuple[str, ...] = ("xs", "ws")
    drawn: Callable[[Problem, Draw], list[dict[str, Array]]] | None = None
    general: bool = True

    @property
    def usual_schedule(self) -> str:
        """The name of the schedule of nodes and commands for which none is named."""
        return "hetero_fused_1d" if self.general else self.schedules[0]

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments of a call, those without a default first."""
        return tuple(inspect.signature(self.pose).parameters)[2:]


_operators: dict[str, Operator] = {}
_functions: dict[str, Function] = {}
_followers: list[Callable[[Function], None]] = []  # called with every function


def register(operator: Operator) -> Operator:
    """Add an operator and its function, and return it.

    Args:
        operator: the operator's record.

    Raises:
        InputError: its name is taken, or not an identifier.

    Example:
        >>> toy = replace(get("matmul_all_to_all"), name="toy", function=None)  # doctest: +SKIP
        >>> register(toy)  # doctest: +SKIP
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
    """Add a function of PyTorch that has no plan of its own, and return it.

    Raises:
        InputError: its name is taken.
    """
    if function.name in _functions:
        raise InputError(f"function {function.name!r} is registered already; take another name")
    for follower in _followers:
        follower(function)
    _functions[function.name] = function
    return function


def follow(follower: Callable[[Function], None]) -> None:
    """Call `follower` with every `Function`: those already registered, and later ones."""
    names()
    for function in _functions.values():
        follower(function)
    _followers.append(follower)


def function(name: str) -> Function:
    """Return a function of PyTorch by name (KeyError if there is none)."""
    return _functions[name]


def get(name: str) -> Operator:
    """Return an operator by name.

    Raises:
        InputError: there is no operator of this name.
    """
    try:
        return _operators[name]
    except (KeyError, TypeError):
        importlib.import_module("ficco.operators")  # registers ficco's own
    operator = _operators.get(name) if isinstance(name, str) else None
    if operator is None:
        raise InputError(
            f"unknown operator {shown(name)}{closest(name, names())}. Known: "
            f"{', '.join(names())}; `ficco list operators` describes them"
        )
    return operator


def names() -> tuple[str, ...]:
    """Return the names of all operators, ficco's own first."""
    importlib.import_module("ficco.operators")
    return tuple(_operators)
