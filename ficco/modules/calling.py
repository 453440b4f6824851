"""One collective call of this rank: checks that name the argument, and where it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from ficco.compute.numpy import NUMPY
from ficco.engines.available_memory import LOOKED_AT, check_host
from ficco.errors import InputError, ScheduleError
from ficco.modules import groups, plain
from ficco.modules.auto import AUTO, automatic, for_a_capture, is_held, regime
from ficco.modules.call_cache import (
    CachedCall,
    evenly,
    is_input,
    keep,
    matrix_of,
    readable,
    row_of,
    shaped,
    taken_as,
)
from ficco.operators.arrays import row_contiguous
from ficco.private.torch_core import unsafe_view
from ficco.problem import Problem
from ficco.runtime.process import ProcessRuntime
from ficco.schedule import Schedule

__all__ = ["Call", "check_asked", "check_dense", "check_held", "check_sized"]

_KINDS = {  # as NumPy writes them; bfloat16 as the bits that it has
    torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<i2", torch.int64: "<i8",
}  # fmt: skip
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
Tensor = torch.Tensor


def check_dense(tensor: Tensor, name: str) -> None:
    """Refuse tensors whose elements do not lie in memory by strides.

    Raises:
        InputError: it is nested, sparse, or of another library's layout.
    """
    if tensor.is_nested:
        raise InputError(
            f"{name} is a nested tensor; a dense tensor is needed: pad it by "
            "torch.nested.to_padded_tensor(), or pass its rows, values() of the jagged layout"
        )
    if tensor.layout != torch.strided:
        kind = "sparse" if "sparse" in str(tensor.layout) else "not dense"
        raise InputError(
            f"{name} is {kind} ({tensor.layout}); a dense tensor is needed: pass .to_dense()"
        )


def check_sized(tensor: Tensor, name: str) -> None:
    """Refuse a parameter of a lazy module that was not called yet.

    Raises:
        InputError: it is one.
    """
    if not torch.compiler.is_dynamo_compiling() and is_lazy(tensor):
        raise InputError(
            f"{name} has no size yet, as a parameter of a lazy module; call that module once before"
        )


def check_held(tensor: Tensor, name: str) -> None:
    """Refuse a tensor whose storage is smaller than what it shows of it, or gone.

    Raises:
        InputError: it is.
    """
    if torch.compiler.is_compiling() or not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum([(size - 1) * step for size, step in steps])
    held, needed = tensor.untyped_storage().nbytes(), (last + 1) * tensor.element_size()
    if held < needed:
        raise InputError(
            f"{name} needs {needed} bytes of its storage, which has {held}: it was freed or made "
            "smaller (by FSDP after a forward, say); give it its memory back before the call"
        )


class Call:
    """One collective call of this rank: its group, and checks that name the argument."""

    def __init__(
        self, group: Any, x: Tensor, name: str, key: Any = None, operator: str = ""
    ) -> None:
        self.key = key  # by which it is remembered, if at all
        self.name = operator
        self.group = groups.process_group(group)
        self.rank = torch.distributed.get_rank(self.group)
        self.world = torch.distributed.get_world_size(self.group)
        if self.rank < 0:
            raise InputError("group: this process is not one of its ranks")
        self.dtype = ""
        self.device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        self.check(x, name, 0)
        if x.dim() not in (2, 3):
            raise InputError(f"{name} is {list(x.shape)}; it has 2 or 3 dimensions")
        self.torch_dtype = x.dtype
        self.inner = tuple(x.shape[1:-1])  # what lies between rows and columns
        self.matrix = matrix_of(x)
        self.first = x.shape[0]

    def check(self, tensor: Any, name: str, dims: int) -> None:
        """Refuse what is no tensor of the call's device and dtype (or of `dims` dimensions)."""
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: {type(tensor).__name__} found; a torch tensor is needed")
        check_dense(tensor, name)
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(f"{name} is on {tensor.device}; it is to be on the CPU or on a GPU")
        if tensor.device != self.device:
            where = "the CPU or one GPU" if self.device.type == "cpu" else str(self.device)
            raise InputError(f"{name} is on {tensor.device}; all tensors are on {where}")
        if tensor.dtype not in _DTYPES:
            known = ", ".join(_DTYPES.values())
            raise InputError(f"{name} is {tensor.dtype}; it is one of {known}")
        dtype = _DTYPES[tensor.dtype]
        self.dtype = self.dtype or dtype
        if dtype != self.dtype:
            raise InputError(f"{name} is {dtype}, the first input is {self.dtype}; give one dtype")
        if dims and tensor.dim() != dims:
            raise InputError(f"{name} is {list(tensor.shape)}; it has {dims} dimensions")
        check_held(tensor, name)

    def check_integers(self, tensor: Tensor, name: str) -> None:
        """Refuse what is no row of int64 on the device of the call."""
        check_dense(tensor, name)
        if tensor.dtype != torch.int64:
            raise InputError(f"{name} is {tensor.dtype}; int64 is needed")
        if tensor.dim() != 1:
            raise InputError(f"{name} is {list(tensor.shape)}; it has 1 dimension")
        if tensor.device != self.device:
            raise InputError(
                f"{name} is on {tensor.device}, tables are on {self.device}; give one device"
            )
        check_held(tensor, name)

    @staticmethod
    def row_of(tensor: Tensor) -> Tensor:
        """Return a tensor as [1, its elements], one behind another."""
        return row_of(tensor)

    @staticmethod
    def readable(tensor: Tensor) -> Tensor:
        """Return a matrix, on GPUs a copy where a kernel could not read its rows."""
        return readable(tensor) if tensor.is_cuda else tensor

    @staticmethod
    def viewed(y: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a result with another shape, as no view."""
        view: Tensor = unsafe_view(y, shape)
        return view

    def rows_of(self, rows: Sequence[int] | None, total: int | None = None) -> tuple[int, ...]:
        """Return rows per rank, of matrices; `total`: what they add up to, else mine is given."""
        each = tuple(int(r) for r in rows) if rows is not None else (self.first,) * self.world
        if len(each) != self.world or min(each) < 0:
            raise InputError(f"rows={list(each)}: {self.world} sizes of 0 or more are needed")
        if total is None and each[self.rank] != self.first:
            raise InputError(f"rows[{self.rank}]={each[self.rank]}, but x has {self.first} rows")
        if total is not None and sum(each) != total:
            raise InputError(f"rows={list(each)} add up to {sum(each)}, not to {total}")
        return tuple(r * math.prod(self.inner) for r in each)

    def row(self, bias: Tensor, n: int, name: str) -> Tensor:
        """Return a bias as [1, n]."""
        self.check(bias, name, 0)
        if tuple(bias.shape) not in ((n,), (1, n)):
            raise InputError(f"{name} is {list(bias.shape)}; it is [{n}]")
        return row_of(bias)

    def run(
        self,
        problem: Problem,
        given: dict[str, Tensor],
        schedule: str | Schedule,
        grain: int | None,
    ) -> list[Tensor]:
        """Run the problem and return this rank's outputs, with the dimensions of x."""
        asked = _asked(schedule, grain)
        if groups.disabled():
            groups.log.info("%s: plain torch.distributed (FICCO_DISABLE)", problem.op)
            return self._run_plain(problem, given)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._run_on_gpu(problem, given, asked)
        runtime = groups.runtime(self.group)
        chosen = self._chosen(problem, asked, runtime)
        ys = self._outputs(problem)
        arrays = {name: _array(tensor) for name, tensor in given.items() if name != "like"}
        for name in filter(is_input, arrays):
            arrays[name] = row_contiguous(arrays[name], NUMPY)
        arrays |= {f"y{i}": _array(matrix_of(y)) for i, y in enumerate(ys)}
        runtime.execute(problem, chosen, arrays)
        return ys

    def _run_plain(self, problem: Problem, given: dict[str, Tensor]) -> list[Tensor]:
        return shaped(plain.run(problem, given, self.group, self.rank), self._shapes(problem))

    def _run_on_gpu(
        self, problem: Problem, given: dict[str, Tensor], asked: Schedule | None
    ) -> list[Tensor]:
        """Enqueue the problem on the current stream."""
        runtime = groups.gpu_runtime(self.group, self.device)
        changes = groups.changes()  # what is chosen stands until there is another one
        if runtime is None:  # for a reason that was logged when the group was opened
            return self._run_plain(problem, given)
        chosen = self._chosen(problem, asked, runtime)
        later = None
        ready = asked is not None or regime() == "captured" or runtime.repeats(problem)
        if asked is None and ready:
            later = for_a_capture(problem, chosen, runtime, self.device)
        if asked is None and is_held(problem, runtime, self.device):
            ready = False
        plainly, arrays = chosen.transport == "collective", dict[str, Tensor]()
        if not plainly or later is not None:
            ys = self._outputs(problem)
            arrays = {name: tensor for name, tensor in given.items() if name != "like"}
            for name in filter(is_input, arrays):
                arrays[name] = readable(arrays[name])
            if _only_even(runtime):
                arrays = {name: evenly(name, tensor) for name, tensor in arrays.items()}
            arrays |= {f"y{i}": matrix_of(y) for i, y in enumerate(ys)}
        if later is not None:
            try:
                runtime.load(problem, later, arrays)
            except (InputError, MemoryError) as error:  # equal on all ranks
                groups.log.info("%s is not made ready for captures: %s", later.name, error)
        if plainly:
            runtime.check_alive()
            ys = self._run_plain(problem, given)
        else:
            runtime.execute(problem, chosen, arrays)
        self._remember(problem, chosen, runtime, given, ready, changes)
        return ys

    def _remember(
        self,
        problem: Problem,
        chosen: Schedule,
        runtime: Any,
        given: Any,
        ready: bool,
        changes: int,
    ) -> None:
        if self.key is not None:
            shapes, plainly = tuple(self._shapes(problem)), chosen.transport == "collective"
            even = _only_even(runtime)
            takes = tuple((name, taken_as(name, plainly, even)) for name in given)
            call = CachedCall(runtime, problem, chosen, takes, shapes, ready, changes)
            keep(self.key, call)

    def _chosen(
        self, problem: Problem, asked: Schedule | None, runtime: ProcessRuntime
    ) -> Schedule:
        """Return the schedule of this call, resolved."""
        if asked is None:
            found = automatic(problem, runtime, self.device, self.group)
        else:
            found = asked.resolve(runtime.world, runtime.machine)
            waits = {"transport": found.transport == "sm", "sums": found.sums == "within"}
            if any(waits.values()) and self.device.type == "cuda" and not groups.alone():
                axis = next(axis for axis, value in waits.items() if value)
                nearest = {"transport": "dma", "sums": "apart"}[axis]
                raise ScheduleError(
                    f"schedule {found.name!r}: {axis}={getattr(found, axis)!r} waits for peers' "
                    "kernels, and other groups of this process are open for GPUs, whose kernels "
                    "may keep them from running, or CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams "
                    f"into one queue; close those groups, unset it, or use {axis}={nearest!r}"
                )
        groups.log.debug("%s: %s, grain %s", problem.op, found.name, found.grain)
        return found

    def _outputs(self, problem: Problem) -> list[Tensor]:
        shapes = self._shapes(problem)
        if self.device.type == "cpu":  # on a GPU PyTorch's allocator refuses what does not fit
            size = sum([math.prod(shape) for shape in shapes]) * self.torch_dtype.itemsize
            if size >= LOOKED_AT:
                check_host(size, f"results of {problem.op}")
        return [torch.empty(shape, dtype=self.torch_dtype, device=self.device) for shape in shapes]

    def _shapes(self, problem: Problem) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's outputs: rows are split as those of x are."""
        between = max(math.prod(self.inner), 1)
        return [
            (height, width) if output.axis != "rows" else (height // between, *self.inner, width)
            for (height, width), output in zip(
                problem.result_shapes(self.rank), problem.outputs, strict=True
            )
        ]


def _only_even(runtime: Any) -> bool:
    """Whether there are no kernels for matrices that lie in other ways than most do."""
    return runtime.kernels is not None and not runtime.kernels.compiles


def _asked(schedule: str | Schedule, grain: int | None) -> Schedule | None:
    """Return the schedule that is asked for; None: what the selector takes."""
    if isinstance(schedule, str) and schedule == AUTO:
        if grain is not None:
            raise InputError(
                f"grain={grain} with schedule='auto', which chooses it; name a schedule, or leave "
                "grain out"
            )
        return None
    chosen = Schedule.read(schedule)
    return chosen if grain is None else replace(chosen, grain=grain)


def check_asked(schedule: str | Schedule, grain: int | None) -> None:
    """Refuse a schedule that does not exist, or a grain that it cannot have.

    Raises:
        InputError: grain with "auto"; ScheduleError: no such schedule or grain.
    """
    try:
        _asked_before(schedule, grain)
    except TypeError:  # some argument has no hash
        _asked(schedule, grain)


_asked_before = lru_cache(maxsize=64, typed=True)(_asked)


class _Memory:
    """A tensor's memory for NumPy. Tensor.numpy() would forbid its storage to change its size.

    FSDP frees the weights that it has gathered in that way.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # lives as long as the array
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _KINDS[tensor.dtype],
            "data": (tensor.data_ptr(), False),
            "strides": tuple(step * tensor.element_size() for step in tensor.stride()),
            "version": 3,
        }


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return an array over the tensor's memory, with its strides."""
    plain_tensor = tensor.detach().resolve_neg()
    found: npt.NDArray[Any] = np.asarray(_Memory(plain_tensor))
    return found.view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else found
