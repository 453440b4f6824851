"""Calls on GPUs that were made before: what their checks found, so that it is not looked for again.

A call with tensors of the same shapes, strides, dtypes and device, and equal other arguments, is
the same problem, and its matrices lie alike. What native code launches whole is told where they
begin, and no more is done by Python: on a host that is slower than the GPU this is most of what a
call costs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ficco.modules import groups, plain
from ficco.modules.auto import AUTO
from ficco.private.torch_core import current_device, current_stream, is_view, unsafe_view
from ficco.problem import Problem
from ficco.schedule import Schedule

if TYPE_CHECKING:
    from ficco.engines.prepared import PreparedCall
    from ficco.runtime.process_gpu import CudaProcessRuntime

__all__ = [
    "CachedCall",
    "evenly",
    "find",
    "is_input",
    "keep",
    "key_of",
    "matrix_of",
    "readable",
    "row_of",
    "shaped",
    "taken_as",
]

MOST = 256  # calls that are remembered, least recently used out first
_EVEN = 16  # bytes, or elements: what divides where matrices lie that the pack's kernels read
_ASKED = 8  # times that a call asks how it is made again, between two that were so made

Tensor = torch.Tensor
_STRIDED = torch.strided
_kept: OrderedDict[Any, CachedCall] = OrderedDict()


def _nothing() -> None:
    return None


class CachedCall:
    """A call that was checked and bound.

    Args:
        runtime: that of its group.
        problem, schedule: what it is; the schedule is resolved.
        takes: of its tensors, in the order in which they are passed: the name as a buffer, and what
            makes that matrix of a tensor.
        shapes: of its results.
        ready: whether nothing is left to be done at the next call.
        changes: `groups.changes()` before it was chosen; it is void as soon as there is another.

    Attributes:
        ready, changes: as above.
    """

    __slots__ = (
        "_device",
        "_flat",
        "_more",
        "_names",
        "_plain",
        "_prepared",
        "_problem",
        "_runtime",
        "_schedule",
        "_shapes",
        "_short",
        "_takes",
        "changes",
        "ready",
    )  # fmt: skip

    def __init__(
        self,
        runtime: CudaProcessRuntime,
        problem: Problem,
        schedule: Schedule,
        takes: Sequence[tuple[str, Callable[[Tensor], Tensor]]],
        shapes: Sequence[tuple[int, ...]],
        ready: bool,
        changes: int,
    ) -> None:
        self._runtime, self._problem, self._schedule = runtime, problem, schedule
        self._takes, self._shapes = takes, shapes
        self._names = (*(name for name, _ in takes), *(f"y{i}" for i in range(len(shapes))))
        self.ready, self.changes = ready, changes
        self._plain = schedule.transport == "collective"
        self._short = (
            plain.short(problem, runtime.process_group, runtime.rank) if self._plain else None
        )
        self._flat = all(len(shape) == 2 for shape in shapes)  # then the tensors are the matrices
        self._device: int = runtime.device.index
        # What makes it again, for as long as its plan is bound; how often it may still ask for it
        # before one is so made. After its plan was bound anew it may ask in any case.
        self._prepared: Callable[[], PreparedCall | None] = _nothing
        self._more = _ASKED

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the call with other tensors of the same shapes; return its results."""
        if self._plain:
            return self._run_plain(tensors)
        x = tensors[0]
        ys = [x.new_empty(*shape) for shape in self._shapes]
        here, prepared = current_device() == self._device, self._prepared()
        if here and prepared is not None:
            addresses = [tensor.data_ptr() for tensor in tensors]
            addresses += [y.data_ptr() for y in ys]
            arrays: dict[str, Any] = {}
            if prepared.before is not None:
                # `_ask` has made sure that matrices are the tensors' own memory.
                arrays = self._named(tensors, ys) if self._flat else self._arrays(tensors, ys)
            stream = current_stream(self._device)
            if self._runtime.run_prepared(prepared, addresses, stream, ys, arrays):
                self._more = _ASKED
                return ys
        arrays = self._arrays(tensors, ys)
        if here:
            self._runtime.execute(self._problem, self._schedule, arrays)
        else:
            with torch.cuda.device(self._device):
                self._runtime.execute(self._problem, self._schedule, arrays)
        if self._more and (prepared is None or prepared.stale):
            found = self._ask(tensors, arrays)
            if found is not None:
                self._prepared = weakref.ref(found)
            if found is None or prepared is not None:  # for nothing, or in turns with another one
                self._more -= 1
        return ys

    def _ask(self, tensors: Sequence[Tensor], arrays: dict[str, Tensor]) -> PreparedCall | None:
        """Return what makes the call again, if its matrices are the tensors' own memory."""
        for tensor, matrix in zip(tensors, arrays.values(), strict=False):  # results follow
            if tensor.data_ptr() != matrix.data_ptr():
                return None
        return self._runtime.prepared_call(self._problem, self._schedule, arrays)

    def _run_plain(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        runtime, short = self._runtime, self._short
        runtime.check_alive()
        if short is not None and self._flat:
            return short(tensors)
        arrays = self._matrices(tensors)
        if short is not None:
            return shaped(short(list(arrays.values())), self._shapes)
        ys = plain.run(self._problem, arrays, runtime.process_group, runtime.rank)
        return shaped(ys, self._shapes)

    def _arrays(self, tensors: Sequence[Tensor], ys: Sequence[Tensor]) -> dict[str, Any]:
        arrays = self._matrices(tensors)
        for i, y in enumerate(ys):
            arrays[f"y{i}"] = matrix_of(y)
        return arrays

    def _named(self, tensors: Sequence[Tensor], ys: Sequence[Tensor]) -> dict[str, Any]:
        """Return tensors and results by the names of their buffers."""
        return dict(zip(self._names, (*tensors, *ys), strict=True))

    def _matrices(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        return {
            name: take(tensor) for (name, take), tensor in zip(self._takes, tensors, strict=True)
        }


def key_of(
    op: str, group: Any, x: Any, others: Sequence[Any], schedule: str | Schedule, *rest: Any
) -> Any:
    """Return what makes a call equal to another one; None: nothing does, look at it anew."""
    if not isinstance(x, Tensor) or not x.is_cuda or x.layout != _STRIDED or groups.disabled():
        return None
    try:
        return _facts(op, group, x, others, schedule, rest)
    except (RuntimeError, ValueError):  # a nested tensor has no shape, an array no truth value
        return None


def _facts(
    op: str, group: Any, x: Tensor, others: Sequence[Any], schedule: str | Schedule, rest: Any
) -> Any:
    # In another regime another schedule may be wanted.
    when = torch.cuda.is_current_stream_capturing() if schedule == AUTO else None
    facts: list[Any] = [
        op, groups.process_group(group), schedule, when,
        x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg(),
    ]  # fmt: skip
    for t in others:
        if t is None:
            facts.append(None)
        elif isinstance(t, Tensor) and t.layout == _STRIDED:
            facts += (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg())
        else:
            return None
    facts += [tuple(value) if isinstance(value, list) else value for value in rest]
    return tuple(facts)


def find(key: Any) -> CachedCall | None:
    """Return an earlier call that is equal, while its group is open."""
    if key is None:
        return None
    try:
        found = _kept.get(key)
    except TypeError:  # some argument has no hash
        return None
    if found is not None:
        if found.changes != groups.changes():
            _kept.clear()
            return None
        if len(_kept) >= MOST // 2:  # else none goes soon, in whatever order they are
            with contextlib.suppress(KeyError):  # another thread has just forgotten it
                _kept.move_to_end(key)
    return found if found is not None and found.ready else None


def keep(key: Any, call: CachedCall) -> None:
    """Keep a call that has succeeded."""
    try:
        _kept[key] = call
    except TypeError:
        return
    if len(_kept) > MOST:
        _kept.popitem(last=False)


def shaped(ys: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return results with the dimensions that they are to have, as no views."""
    return [
        y if y.shape == shape and not is_view(y) else unsafe_view(y, shape)
        for y, shape in zip(ys, shapes, strict=True)
    ]


def matrix_of(tensor: Tensor) -> Tensor:
    """Return a tensor with all dimensions but the last as one; no copy where none is needed."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def row_of(bias: Tensor) -> Tensor:
    """Return a bias as [1, n] whose elements lie one behind another, as kernels read it."""
    row = bias.reshape(1, bias.numel())
    if row.is_neg():
        row = row.resolve_neg()
    return row if row.numel() <= 1 or row.stride(1) == 1 else row.contiguous()


def taken_as(name: str, plainly: bool, even: bool = False) -> Callable[[Tensor], Tensor]:
    """Return what makes a buffer's matrix of a tensor.

    Args:
        name: of the buffer.
        plainly: whether torch.distributed reads it.
        even: whether kernels read it only as `evenly` has it.
    """
    if even and not plainly:
        take = taken_as(name, plainly)
        return lambda tensor: evenly(name, take(tensor))
    if name.startswith("bias"):
        return row_of
    return _readable_matrix if is_input(name) and not plainly else matrix_of


def _readable_matrix(x: Tensor) -> Tensor:
    return readable(matrix_of(x))


def evenly(name: str, matrix: Tensor) -> Tensor:
    """Return a matrix that kernels read, or a copy where it lies as the pack's are not made for.

    Those are for what 16 divides: addresses, and the distance of rows unless rows of that length
    lie one behind another. Others would have to be compiled. No peer sees how a matrix lies.
    """
    if not name.startswith(("x", "w", "bias")):
        return matrix
    down, along = matrix.stride()
    turned = along != 1 and down == 1
    lying = matrix.t() if turned else matrix
    (_, wide), (pitch, beside) = lying.shape, lying.stride()
    dense = pitch == wide or pitch % _EVEN == 0 == wide % _EVEN
    if beside == 1 and dense and matrix.data_ptr() % _EVEN == 0:
        return matrix
    copy = lying.new_empty(lying.shape).copy_(lying)
    return copy.t() if turned else copy


def is_input(name: str) -> bool:
    """Whether a buffer is x, or one of several: what copy engines and bulk loads read by rows."""
    return name.startswith("x")


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy where a copy engine could not read its rows."""
    across, along = x.stride()
    high, wide = x.shape
    fits = along == 1 and (across >= wide or high <= 1) and not x.is_neg()
    return x if fits else x.resolve_neg().contiguous()
