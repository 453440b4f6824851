"""Cache of calls on GPUs, so a repeated call needs no checks and no choice of a schedule.

A call with tensors of the same shapes, strides, dtypes and device, and equal other arguments, is
the same problem with the same matrix layouts. If native code enqueues all of the call, Python only
passes the tensors: on a host that is slower than the GPU, Python is most of a call's cost.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.distributed import GroupMember

from ficco.api import groups
from ficco.api.arguments import process_group, weights_of
from ficco.api.auto import AUTO
from ficco.api.routes import DIRECT, FORWARD_LEVEL, OBSERVERS, survey
from ficco.core.private.torch_core import (
    contiguous_strides,
    current_device,
    current_stream,
    empty_on_gpu,
    is_view,
    unsafe_view,
)
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.engine.prepared import PreparedCall, Results
from ficco.engine.repeated_calls import CallFinder, CallSteps, Step, flat_table, reader_of
from ficco.operators.expert_functions import stacked
from ficco.operators.functions import as_matrix, rounded_length
from ficco.operators.problem import Problem
from ficco.operators.registry import Role
from ficco.plan.schedule import Schedule
from ficco.runtime import library_programs

if TYPE_CHECKING:
    from ficco.runtime.process_gpu import GpuProcessRuntime

MAX_CALLS = 256  # cached calls; the least recently used call is dropped first
UNORDERED_CALLS = MAX_CALLS // 2  # with fewer, order does not matter
_ALIGNMENT = 16  # of addresses (bytes) and row pitches (elements), for the pack's kernels
_MAX_TRIES = 8  # how often a call tries to prepare itself between two prepared calls

_P = ParamSpec("_P")
_R = TypeVar("_R")
Tensor = torch.Tensor
Take = Callable[[Tensor], Tensor]
_STRIDED = torch.strided
_compiling = torch.compiler.is_dynamo_compiling
calls: OrderedDict[Any, CachedCall] = OrderedDict()  # by key
_NO_LENGTHS: Mapping[int, int] = {}


def _no_prepared_call() -> None:
    return None


reader = reader_of(Tensor, torch.nn.Parameter)  # None: this PyTorch lacks the API
_facts_of = None if reader is None else reader.facts


class PlainRank(NamedTuple):
    """A rank of a group that runs torch.distributed, in place of a runtime; see `CachedCall`."""

    rank: int
    process_group: Any
    device: torch.device
    kernels: None = None

    def check_alive(self) -> None:
        """Do nothing: errors are those of torch.distributed."""


class CachedCall:
    """A call that was checked and bound.

    Args:
        runtime: the runtime of its group, or a PlainRank for calls by torch.distributed.
        problem, schedule: the problem and its resolved schedule.
        takes: per tensor, in call order: the buffer's name, and the functions that make its matrix
            from a tensor, for kernels and for torch.distributed; see `taken_as`.
        shapes: of its results.
        ready: whether the next call needs no further work.
        since: `groups.changes()` and `runtime.moves` before the choice; the call is invalid when
            one of them changes. The room in windows decides what is loaded for captures, so the
            second is None if the user named the schedule.
        lengths: places of rows whose length may differ from call to call.

    Attributes:
        ready: as above.
        changes: the first number of `since`.
    """

    __slots__ = (
        "_device",
        "_flat",
        "_lengths",
        "_library",
        "_moves",
        "_prepared",
        "_problem",
        "_results",
        "_runtime",
        "_schedule",
        "_shapes",
        "_takes",
        "_tries_left",
        "changes",
        "ready",
    )  # fmt: skip

    def __init__(
        self,
        runtime: GpuProcessRuntime,
        problem: Problem,
        schedule: Schedule,
        takes: Sequence[tuple[str, Take, Take]],
        shapes: Sequence[tuple[int, ...]],
        ready: bool,
        since: tuple[int, int | None],
        lengths: Sequence[int] = (),
    ) -> None:
        self._lengths = lengths
        self._runtime, self._problem, self._schedule = runtime, problem, schedule
        self._takes, self._shapes = takes, shapes
        self.ready, (self.changes, self._moves) = ready, since
        self._library: library_programs.Call | None = None
        if schedule.transport == "collective":
            program = library_programs.program_of(problem, runtime.rank)
            names, group = [name for name, _, _ in takes], runtime.process_group
            self._library = library_programs.bind(problem, program, names, group, on_gpu=True)
        outputs = problem.outputs
        flat = all(len(shape) == 2 for shape in shapes)
        along_rows = all(output.axis == "rows" and not output.bias for output in outputs)
        # Without a bias or indices, which become a row, and with results of 2-D: tensors are the
        # matrices.
        self._flat = flat and along_rows and not (problem.flow.pools or problem.flow.routes)
        self._device: int = runtime.device.index
        if self._library is None:
            self._results = _results_of(shapes, TORCH_DTYPE[problem.dtype], flat)
        # The prepared call, valid while its plan is bound, and how often the call may still try to
        # prepare itself. A prepared call that runs resets the count.
        self._prepared: Callable[[], PreparedCall | None] = _no_prepared_call
        self._tries_left = _MAX_TRIES

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Enqueue the call with other tensors of the same shapes; return its results.

        Returns None, and enqueues nothing, if the call is not valid now. Repeated calls run few
        Python functions on purpose, since each takes about a microsecond behind a launch.
        """
        if not self.ready or self.changes != groups.changes():
            return None
        if self._moves is not None and self._moves != self._runtime.moves:
            return None  # the windows were made anew since the choice
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(tensors)
        if self._library is not None:
            self._runtime.check_alive()
            if self._flat:
                return self._library(tensors)
            return shaped(self._library(list(self._matrices(tensors).values())), self._shapes)
        prepared = self._prepared()
        if prepared is not None:
            # `_prepare` has checked that the matrices are the tensors' own memory, so addresses of
            # the tensors do where no library multiplies. Else the library gets views: copies for
            # kernels, which depend on the address, have other pitches.
            tensors_do = self._flat or not prepared.by_library
            inputs = tensors if tensors_do else self._viewed(tensors)
            lengths = [tensors[place].shape[-1] for place in self._lengths] if self._lengths else ()
            stream = current_stream(self._device)
            made = self._runtime.run_prepared(prepared, inputs, self._results, stream, lengths)
            if made is not None:
                self._tries_left = _MAX_TRIES
                return made
        new, shaping = self._results
        ys = new.run(())
        matrices = ys if shaping is None else shaping.run(ys)
        arrays = self._matrices(tensors) | {f"y{i}": y for i, y in enumerate(matrices)}
        self._runtime.execute(self._problem, self._schedule, arrays)
        usable = prepared is not None and not prepared.stale and self._runtime.uses(prepared)
        if self._tries_left and not usable:
            renewed = self._prepare(tensors, arrays)
            if renewed is not None:
                self._prepared = weakref.ref(renewed)
            if renewed is None or prepared is not None:  # it failed, or alternates with another
                self._tries_left -= 1
        return ys

    def _prepare(self, tensors: Sequence[Tensor], arrays: dict[str, Tensor]) -> PreparedCall | None:
        """Return a prepared call, if the matrices are the tensors' own memory."""
        for tensor, matrix in zip(tensors, arrays.values(), strict=False):  # results follow
            if tensor.data_ptr() != matrix.data_ptr():
                return None
        lengths = [self._takes[place][0] for place in self._lengths]
        return self._runtime.prepared_call(self._problem, self._schedule, arrays, lengths)

    def _viewed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self._takes, tensors, strict=True)
        return [view(tensor) for (_, _, view), tensor in pairs]

    def _matrices(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        pairs = zip(self._takes, tensors, strict=True)
        return {name: take(tensor) for (name, take, _), tensor in pairs}


def _results_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, flat: bool) -> Results:
    """Return how results of these shapes are allocated; `flat`: all have two dimensions."""
    count = len(shapes)
    places = range(count)
    sizes = [size for shape in shapes for size in (shape, contiguous_strides(shape))]
    new = [Step(empty_on_gpu, (2 * i, 2 * i + 1, 2 * count), 2 * count + 1 + i) for i in places]
    made = [step.result for step in new]
    matrices = [Step(as_matrix, (i,), count + i) for i in places]
    return Results(
        CallSteps(0, [*sizes, dtype, *[None] * count], new, made),
        None if flat else CallSteps(count, [None] * count, matrices, [count + i for i in places]),
    )


def key_of(
    op: str,
    group: Any,
    x: Any,
    others: Sequence[Any],
    schedule: str | Schedule,
    *rest: Any,
    lengths: Mapping[int, int] = _NO_LENGTHS,
) -> Any:
    """Return the cache key of a call; None: the call cannot be cached.

    Args:
        op: name of the operator.
        group: as the user gave it.
        x: the first tensor.
        others: the other tensors, or None.
        schedule: as the user gave it.
        rest: further arguments, without lists.
        lengths: places among all tensors of rows of which only the rounded length matters, with the
            places of the rows whose lengths they have; see `registry.Function.lengths`.
    """
    if not isinstance(x, Tensor) or not x.is_cuda or x.layout != _STRIDED or groups.disabled():
        return None
    try:
        # The best schedule may differ between regimes.
        when = torch.cuda.is_current_stream_capturing() if schedule == AUTO else None
        pg = process_group(group)
        if _facts_of is not None and not lengths:
            read = _facts_of((x, *others))
            if read is not None:
                return (op, pg, schedule, when, read, *rest)
        facts: list[Any] = [
            op, pg, schedule, when, x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(),
        ]  # fmt: skip
        for place, t in enumerate(others, 1):
            if t is None:
                facts.append(None)
            elif place in lengths:
                like = others[lengths[place] - 1]
                if t is not like and t.numel() != like.numel():
                    return None  # the check of the call refuses it
                facts += (rounded_length(t.numel()), t.dim(), t.is_contiguous(), t.dtype,
                          t.get_device(), t.layout)  # fmt: skip
            elif isinstance(t, Tensor) and t.layout == _STRIDED:
                facts += (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())
            else:
                return None
    except (RuntimeError, ValueError):  # nested tensors have no shape, arrays no truth value
        return None
    return (*facts, *rest)


def find(key: Any) -> CachedCall | None:
    """Return the cached call of a key, while its group is open; it may not be valid now."""
    if key is None:
        return None
    try:
        call = calls.get(key)
        if call is not None and len(calls) >= UNORDERED_CALLS:
            calls.move_to_end(key)
    except KeyError:  # another thread has just dropped it: this call is made anew
        return None
    except TypeError:  # some argument has no hash
        return None
    if call is not None and call.changes != groups.changes():
        calls.clear()
        return None
    return call


def keep(key: Any, call: CachedCall) -> None:
    """Cache a call that has succeeded."""
    try:
        calls[key] = call
    except TypeError:
        return
    if len(calls) > MAX_CALLS:
        calls.popitem(last=False)


# ---- finding the cached call of a function's arguments


class Form(NamedTuple):
    """How a function of one input is called, for the cache of calls.

    Attributes:
        op: the operator.
        several: whether the function takes one weight or a list of them, which share the input.
            Which of them have a bias comes before `rest` then.
        bias: whether the function has the argument `bias`: a tensor or None, or with `several` a
            list of these, one per weight.
        rest: its further arguments in cached calls, as `operators.run` orders them.
        unset: names of arguments that are None in these calls.
        flags: names of arguments that are bools, and that do not matter in these calls.
        table: name of the third argument, a square table of ints, which follows `rest`; None:
            there is none.
    """

    op: str
    several: bool = False
    bias: bool = False
    rest: tuple[Any, ...] = ()
    unset: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    table: str | None = None


# A cached call, its tensors, and whether it returns a tuple of results.
Found = tuple[CachedCall, Sequence[Any], bool]


def repeatable(form: Form) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function that all ranks call, as `groups.collective` does; repeat cached calls.

    A repeated call costs the host least if it looks at its arguments once: the cached call is found
    before Python assigns them to parameters.

    Args:
        form: of the calls that may be repeated.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        place = list(inspect.signature(function).parameters).index("group")

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _compiling():
                return function(*args, **kwargs)
            try:
                found = _find_call(form, args, kwargs)
                if found is not None:
                    cached, tensors, several = found
                    ys = cached.run(tensors)
                    if ys is not None:
                        return tuple(ys) if several else ys[0]  # type: ignore[return-value]
                return function(*args, **kwargs)
            except Exception as error:
                groups.refuse(args[place] if len(args) > place else kwargs.get("group"), error)
                raise

        return call

    return decorate


def _find_in_python(form: Form, args: tuple[Any, ...], words: Mapping[str, Any]) -> Found | None:
    """Return the cached call of a function's arguments, as `_native.CallFinder.find` does."""
    x, w, *more = args if len(args) > 1 else (None, None)
    if not isinstance(x, Tensor) or not x.is_cuda:
        return None  # only calls on GPUs are cached
    if not isinstance(w, (Tensor, list, tuple) if form.several else Tensor):
        return None  # an iterator is read once, by the call
    given: dict[Any, Any] = {"group": None, "schedule": AUTO, "grain": None, **words}
    rest = form.rest
    if form.table is not None:
        table = flat_table(more.pop() if len(more) == 1 else given.pop(form.table, None))
        if table is None:
            return None
        rest = (*rest, table)
    group, schedule, grain = given.pop("group"), given.pop("schedule"), given.pop("grain")
    bias = given.pop("bias", None) if form.bias else None
    unset = [given.pop(name) for name in form.unset if name in given]
    flags = [given.pop(name) for name in form.flags if name in given]
    if more or given or any(each is not None for each in unset):
        return None
    if any(type(each) is not bool for each in flags) or type(grain) not in (int, type(None)):
        return None
    if form.several:
        weights, biases, biased = weights_of(w, bias)
        if len(biased) != len(weights):
            return None
        others, rest = [*weights, *biases], (tuple(biased), *rest)
    else:
        others = [w, bias] if form.bias else [w]
    tensors = [x, *(other for other in others if other is not None)]
    if not all(isinstance(tensor, Tensor) for tensor in tensors) or survey(tensors) != DIRECT:
        return None
    call = find(key_of(form.op, group, x, others, schedule, *rest, grain))
    return None if call is None else (call, tensors, form.several and not isinstance(w, Tensor))


def _finder() -> Callable[..., Found | None]:
    if reader is None:
        return _find_in_python
    found: Callable[..., Found | None] = CallFinder(
        reader,
        calls=(calls, UNORDERED_CALLS),
        off="FICCO_DISABLE",
        observers=OBSERVERS,
        forward=FORWARD_LEVEL,
        recording=torch.is_grad_enabled,
        group_of=(GroupMember, process_group),
        automatic=(AUTO, torch.cuda.is_current_stream_capturing),
    ).find
    return found


_find_call = _finder()


# ---- matrices of tensors


def shaped(ys: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return results with the given shapes, and not as views."""
    return [
        y if y.shape == shape and not is_view(y) else unsafe_view(y, shape)
        for y, shape in zip(ys, shapes, strict=True)
    ]


def row_of(bias: Tensor) -> Tensor:
    """Return a bias, indices or offsets as a contiguous [1, n], as kernels read it."""
    row = bias.reshape(1, bias.numel())
    if row.is_neg():
        row = row.resolve_neg()
    if row.numel() == 1:  # PyTorch keeps any strides of a single element
        return row.as_strided((1, 1), (1, 1))
    return row if row.numel() == 0 or row.stride(1) == 1 else row.contiguous()


def taken_as(role: Role | None, plainly: bool, even: bool = False) -> Take:
    """Return the function that makes a buffer's matrix from a tensor.

    Args:
        role: of the operand; None: the tensor is none.
        plainly: whether torch.distributed reads it.
        even: whether kernels need it aligned by `evenly`.
    """
    if role is None:
        return as_matrix
    if even and role.aligned and not plainly:
        take = taken_as(role, plainly)
        return lambda tensor: evenly(take(tensor))
    if role.layout == "vector":
        return row_of
    if role.layout == "stack":
        return stacked
    return _readable_matrix if role.layout == "rows" and not plainly else as_matrix


def _readable_matrix(x: Tensor) -> Tensor:
    return readable(as_matrix(x))


def evenly(matrix: Tensor) -> Tensor:
    """Return a matrix, or a copy if its layout does not suit the kernels of the pack.

    They need addresses that are multiples of 16, and rows that are either contiguous or a multiple
    of 16 long and apart. Other layouts need compilation. Peers do not depend on the layout.
    """
    row_stride, col_stride = matrix.stride()
    transposed = col_stride != 1 and row_stride == 1
    by_rows = matrix.t() if transposed else matrix
    (_, width), (pitch, step) = by_rows.shape, by_rows.stride()
    dense = pitch == width or pitch % _ALIGNMENT == 0 == width % _ALIGNMENT
    if step == 1 and dense and matrix.data_ptr() % _ALIGNMENT == 0:
        return matrix
    copy = by_rows.new_empty(by_rows.shape).copy_(by_rows)
    return copy.t() if transposed else copy


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy if a copy engine cannot read its rows."""
    row_stride, col_stride = x.stride()
    rows, cols = x.shape
    fits = col_stride == 1 and (row_stride >= cols or rows <= 1) and not x.is_neg()
    return x if fits else x.resolve_neg().contiguous()
