"""Calls on GPUs that were made before: what their checks found, so that it is not looked for again.

A call with tensors of the same shapes, dtypes and device, and equal other arguments, is the same
problem. On a host that is slower than the GPU this is half of what a call costs.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Sequence
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
]

MOST = 256  # calls that are remembered, least recently used out first

Tensor = torch.Tensor
# No view: autograd would not let the caller change it in place.
_unsafe_view: Any = torch.ops.aten._unsafe_view
_known: OrderedDict[Any, Known] = OrderedDict()


class Known(NamedTuple):
    """A call that was checked and bound.

    Attributes:
        runtime: that of its group.
        problem, schedule: what it is; the schedule is resolved.
        names: of its tensors as buffers, in the order in which they are passed.
        shapes: of its results.
        ready: whether nothing is left to be done at the next call.
    """

    runtime: CudaProcessRuntime
    problem: Problem
    schedule: Schedule
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    ready: bool = True

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the call with other tensors of the same shapes; return its results."""
        if self.schedule.transport == "collective":
            return self._run_plain(tensors)
        x = tensors[0]
        arrays: dict[str, Any] = {}
        for name, tensor in zip(self.names, tensors, strict=True):
            if name.startswith("bias"):
                arrays[name] = row_of(tensor)
            else:
                flat = matrix_of(tensor)
                arrays[name] = readable(flat) if is_input(name) else flat
        results = []
        for i, shape in enumerate(self.shapes):
            y = torch.empty(shape, dtype=x.dtype, device=x.device)
            results.append(y)
            arrays[f"y{i}"] = matrix_of(y)
        if torch.cuda.current_device() == x.device.index:
            self.runtime.execute(self.problem, self.schedule, arrays)
        else:
            with torch.cuda.device(x.device):
                self.runtime.execute(self.problem, self.schedule, arrays)
        return results

    def _run_plain(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.runtime.check_alive()
        arrays = {
            name: row_of(tensor) if name.startswith("bias") else matrix_of(tensor)
            for name, tensor in zip(self.names, tensors, strict=True)
        }
        ys = plain.run(self.problem, arrays, self.runtime.process_group, self.runtime.rank)
        return shaped(ys, self.shapes)


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
    facts += (tuple(value) if isinstance(value, (list, torch.Size)) else value for value in rest)
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
        y if y.shape == shape and not y._is_view() else _unsafe_view(y, shape)
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
    return row if row.numel() <= 1 or row.stride(1) == 1 else row.contiguous()


def is_input(name: str) -> bool:
    """Whether a buffer is x, or one of several: what copy engines and bulk loads read by rows."""
    return name.startswith("x")


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy where a copy engine could not read its rows."""
    across, along = x.stride()
    fits = along == 1 and (across >= x.shape[1] or x.shape[0] <= 1) and not x.is_neg()
    return x if fits else x.resolve_neg().contiguous()
