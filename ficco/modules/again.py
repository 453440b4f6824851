"""Calls on GPUs that were made before: what their checks found, so that it is not looked for again.

A call with tensors of the same shapes, dtypes and device, and equal other arguments, is the same
problem. On a host that is slower than the GPU this is half of what a call costs.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ficco.modules import groups, plain
from ficco.modules.auto import AUTO, regime
from ficco.problem import Problem
from ficco.schedule import Schedule

if TYPE_CHECKING:
    from ficco.runtime.process_cuda import CudaProcessRuntime

__all__ = [
    "Known",
    "is_input",
    "key_of",
    "known",
    "matrix_of",
    "readable",
    "remember",
    "row_of",
    "shaped",
    "taken_as",
]

MOST = 256  # calls that are remembered, least recently used out first

Tensor = torch.Tensor
# No view: autograd would not let the caller change it in place.
unsafe_view: Any = torch.ops.aten._unsafe_view
_known: OrderedDict[Any, Known] = OrderedDict()


class Known(NamedTuple):
    """A call that was checked and bound.

    Attributes:
        runtime: that of its group.
        problem, schedule: what it is; the schedule is resolved.
        takes: of its tensors, in the order in which they are passed: the name as a buffer, and what
            makes that matrix of a tensor.
        shapes: of its results.
        ready: whether nothing is left to be done at the next call.
    """

    runtime: CudaProcessRuntime
    problem: Problem
    schedule: Schedule
    takes: tuple[tuple[str, Callable[[Tensor], Tensor]], ...]
    shapes: tuple[tuple[int, ...], ...]
    ready: bool = True

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the call with other tensors of the same shapes; return its results."""
        if self.schedule.transport == "collective":
            return self._run_plain(tensors)
        x = tensors[0]
        arrays = self._matrices(tensors)
        results = [x.new_empty(*shape) for shape in self.shapes]
        for i, y in enumerate(results):
            arrays[f"y{i}"] = matrix_of(y)
        if torch._C._cuda_getDevice() == x.get_device():
            self.runtime.execute(self.problem, self.schedule, arrays)
        else:
            with torch.cuda.device(x.device):
                self.runtime.execute(self.problem, self.schedule, arrays)
        return results

    def _run_plain(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.runtime.check_alive()
        arrays = self._matrices(tensors)
        ys = plain.run(self.problem, arrays, self.runtime.process_group, self.runtime.rank)
        return shaped(ys, self.shapes)

    def _matrices(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        return {
            name: take(tensor) for (name, take), tensor in zip(self.takes, tensors, strict=True)
        }


def key_of(
    op: str, group: Any, x: Any, others: Sequence[Any], schedule: str | Schedule, *rest: Any
) -> Any:
    """Return what makes a call equal to another one; None: nothing does, look at it anew."""
    if not isinstance(x, Tensor) or not x.is_cuda or groups.disabled():
        return None
    when = regime() if schedule == AUTO else None  # another one may want another schedule
    facts: list[Any] = [
        op, groups.process_group(group), groups.alone(), schedule, when,
        x.shape, x.dtype, x.device, x.layout,
    ]  # fmt: skip
    for tensor in others:
        if tensor is None:
            facts.append(None)
        elif isinstance(tensor, Tensor):
            facts += (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
        else:
            return None
    facts += [tuple(value) if isinstance(value, (list, torch.Size)) else value for value in rest]
    return tuple(facts)


def known(key: Any) -> Known | None:
    """Return an earlier call that is equal, while its group is open."""
    if key is None:
        return None
    try:
        found = _known.get(key)
    except TypeError:  # some argument has no hash
        return None
    if found is not None:
        if not groups.serves(found.runtime):
            _known.clear()
            return None
        if len(_known) >= MOST // 2:  # else none goes soon, in whatever order they are
            with contextlib.suppress(KeyError):  # another thread has just forgotten it
                _known.move_to_end(key)
    return found if found is not None and found.ready else None


def remember(key: Any, call: Known) -> None:
    """Keep a call that has succeeded."""
    try:
        _known[key] = call
    except TypeError:
        return
    if len(_known) > MOST:
        _known.popitem(last=False)


def shaped(ys: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return results with the dimensions that they are to have, as no views."""
    return [
        y if y.shape == shape and not y._is_view() else unsafe_view(y, shape)
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


def taken_as(name: str, plainly: bool) -> Callable[[Tensor], Tensor]:
    """Return what makes a buffer's matrix of a tensor; `plainly`: torch.distributed reads it."""
    if name.startswith("bias"):
        return row_of
    return _readable_matrix if is_input(name) and not plainly else matrix_of


def _readable_matrix(x: Tensor) -> Tensor:
    return readable(matrix_of(x))


def is_input(name: str) -> bool:
    """Whether a buffer is x, or one of several: what copy engines and bulk loads read by rows."""
    return name.startswith("x")


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy where a copy engine could not read its rows."""
    across, along = x.stride()
    high, wide = x.shape
    fits = along == 1 and (across >= wide or high <= 1) and not x.is_neg()
    return x if fits else x.resolve_neg().contiguous()
