"""One collective call of this rank: argument checks, and execution on the CPU, GPU or NCCL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from ficco.api import groups, tuning
from ficco.api.arguments import check_dense, check_held, process_group
from ficco.api.auto import (
    AUTO,
    automatic,
    regime,
    schedule_for_capture,
    waits_for_kernels,
    within_limit,
)
from ficco.api.call_cache import (
    CachedCall,
    PlainRank,
    keep,
    row_of,
    shaped,
    taken_as,
)
from ficco.core.checking import check_sum
from ficco.core.dtypes import ALL, DTYPES
from ficco.core.errors import InputError, ScheduleError
from ficco.core.logs import log
from ficco.core.private.torch_core import unsafe_view
from ficco.engine.available_memory import LOOKED_AT, check_host
from ficco.engine.compute.numpy import NUMPY
from ficco.engine.compute.torch_dtypes import NAME_OF, PROBLEM_NAME_OF
from ficco.operators.arrays import row_contiguous
from ficco.operators.functions import as_matrix
from ficco.operators.problem import Problem
from ficco.operators.shapes import check_bias
from ficco.plan.schedule import Schedule
from ficco.runtime import library_programs
from ficco.runtime.members import rank_in
from ficco.runtime.process import ProcessRuntime

Tensor = torch.Tensor


class Call:
    """One collective call of this rank, with checks whose errors name the argument."""

    row_of, viewed = staticmethod(row_of), staticmethod(unsafe_view)

    def __init__(
        self,
        group: Any,
        x: Tensor,
        name: str,
        key: Any = None,
        operator: str = "",
        lengths: Iterable[int] = (),
    ) -> None:
        self.key = key  # under which the call is cached; None: it is not
        self.name, self.lengths = operator, lengths  # see `registry.Function.lengths`
        self.group = process_group(group)
        self.rank = rank_in(self.group)
        self.world = torch.distributed.get_world_size(self.group)
        self.dtype = ""
        self.device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        self.check(x, name, 0)
        if x.dim() not in (2, 3):
            raise InputError(f"{name} is {list(x.shape)}; 2 or 3 dimensions are needed")
        self.torch_dtype = x.dtype
        self.inner = tuple(x.shape[1:-1])  # dimensions between rows and columns
        self.matrix = as_matrix(x)
        self.first = x.shape[0]

    def check(self, tensor: Any, name: str, dims: int) -> None:
        """Refuse anything but a tensor of the call's device and dtype, and of `dims` dimensions."""
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: {type(tensor).__name__} found; a torch tensor is needed")
        check_dense(tensor, name)
        if tensor.device.type not in ("cpu", "cuda"):
            raise InputError(f"{name} is on {tensor.device}; it must be on the CPU or on a GPU")
        if tensor.device != self.device:
            where = "the CPU or one GPU" if self.device.type == "cpu" else str(self.device)
            raise InputError(f"{name} is on {tensor.device}; all tensors must be on {where}")
        if tensor.dtype not in PROBLEM_NAME_OF:
            known = ", ".join(DTYPES)
            raise InputError(f"{name} is {tensor.dtype}; it must be one of {known}")
        dtype = PROBLEM_NAME_OF[tensor.dtype]
        self.dtype = self.dtype or dtype
        if dtype != self.dtype:
            raise InputError(f"{name} is {dtype}, the first input is {self.dtype}; use one dtype")
        if dims and tensor.dim() != dims:
            raise InputError(f"{name} is {list(tensor.shape)}; {dims} dimensions are needed")
        check_held(tensor, name)

    @staticmethod
    def index_dtype(tensors: Sequence[Tensor]) -> str:
        """Return the name of the dtype of indices and offsets; "" if there are none."""
        return NAME_OF.get(tensors[0].dtype, "") if tensors else ""

    def check_integers(self, tensor: Tensor, name: str, dtype: str) -> None:
        """Refuse what is no row of integers of a dtype on the device of the call.

        dtype: that of the first indices, "int32" or "int64".
        """
        if tensor.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{name} is {tensor.dtype}; int32 or int64 is needed")
        if NAME_OF[tensor.dtype] != dtype:
            raise InputError(
                f"{name} is {tensor.dtype}, indices[0] is torch.{dtype}; give all indices and "
                "offsets in one dtype"
            )
        self._check_row(tensor, name)

    def check_weights(self, tensor: Tensor, name: str, count: int) -> None:
        """Refuse what is no row of `count` float32 weights on the device of the call."""
        if tensor.dtype != torch.float32:
            raise InputError(f"{name} is {tensor.dtype}; float32 is needed: pass .float()")
        self._check_row(tensor, name)
        if tensor.numel() != count:
            raise InputError(
                f"{name} has {tensor.numel()} entries; {count} are needed, one per index"
            )

    def _check_row(self, tensor: Tensor, name: str) -> None:
        check_dense(tensor, name)
        if tensor.dim() != 1:
            raise InputError(f"{name} is {list(tensor.shape)}; it has 1 dimension")
        if tensor.device != self.device:
            raise InputError(
                f"{name} is on {tensor.device}, tables are on {self.device}; give one device"
            )
        check_held(tensor, name)

    def rows_of(self, rows: Sequence[int] | None, total: int | None = None) -> tuple[int, ...]:
        """Return the matrices' rows per rank; `total`: their sum; None: x has this rank's rows."""
        sizes = tuple(int(r) for r in rows) if rows is not None else (self.first,) * self.world
        whole = sum(sizes) if total is None else total
        check_sum(sizes, "rows", self.world, whole, "the rows of all ranks")
        if total is None and sizes[self.rank] != self.first:
            raise InputError(f"rows[{self.rank}]={sizes[self.rank]}, but x has {self.first} rows")
        return tuple(r * math.prod(self.inner) for r in sizes)

    def row(self, bias: Tensor, n: int, name: str) -> Tensor:
        """Return a bias as [1, n]."""
        self.check(bias, name, 0)
        check_bias(bias, name, n)
        return row_of(bias)

    def run(
        self,
        problem: Problem,
        tensors: dict[str, Tensor],
        schedule: str | Schedule,
        grain: int | None,
    ) -> list[Tensor]:
        """Run the problem and return this rank's outputs, with the dimensions of x."""
        named = _named_schedule(schedule, grain, problem.op)
        if groups.disabled():
            log.info("%s: plain torch.distributed (FICCO_DISABLE)", problem.op)
            return self._run_plain(problem, tensors)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return self._run_on_gpu(problem, tensors, named)
        runtime = groups.runtime(self.group)
        if runtime is None:  # the reason was logged when the group was opened
            return self._run_plain(problem, tensors)
        if named is None and (context := tuning.due(problem, runtime)):
            make = partial(self._on_host_by, problem, tensors)
            tuning.measure(context, problem, runtime, self.group, self.device, make)
        chosen = self._chosen(problem, named, runtime)
        if chosen.transport == "collective" and runtime.window_limit is not None:
            runtime.meet_for_library(problem, chosen)
            return self._run_plain(problem, tensors)
        return self._on_host_by(problem, tensors, runtime, chosen)()

    def _on_host_by(
        self,
        problem: Problem,
        tensors: dict[str, Tensor],
        runtime: ProcessRuntime,
        schedule: Schedule,
    ) -> Callable[[], list[Tensor]]:
        """Return a function that makes the call on the CPU, and returns its outputs."""
        roles = problem.roles(self.rank)

        def call() -> list[Tensor]:
            ys = self._outputs(problem)
            arrays = {name: _array(tensors[name]) for name in roles if name in tensors}
            for name, array in arrays.items():
                if roles[name].travels:
                    arrays[name] = row_contiguous(array, NUMPY)
            arrays |= {f"y{i}": _array(as_matrix(y)) for i, y in enumerate(ys)}
            runtime.execute(problem, schedule, arrays)
            return ys

        return call

    def _run_plain(self, problem: Problem, tensors: dict[str, Tensor]) -> list[Tensor]:
        program = library_programs.program_of(problem, self.rank)
        ys = library_programs.run(problem, program, tensors, self.group)
        return shaped(ys, self._shapes(problem))

    def _run_on_gpu(
        self, problem: Problem, tensors: dict[str, Tensor], named: Schedule | None
    ) -> list[Tensor]:
        """Enqueue the problem on the current stream."""
        runtime = groups.gpu_runtime(self.group, self.device)
        if runtime is None:  # the reason was logged when the group was opened
            before = groups.changes(), None
            ys = self._run_plain(problem, tensors)
            if self.key is not None:
                rank = PlainRank(self.rank, self.group, self.device)
                serial = library_programs.SERIAL
                keep(self.key, self._repeated(problem, serial, rank, tensors, True, before))
            return ys
        if named is None and (context := tuning.due(problem, runtime)):
            make = partial(self._on_gpu_by, problem, tensors)
            if tuning.measure(context, problem, runtime, self.group, self.device, make):
                runtime.repeats(problem)  # this call was made before
        changes = groups.changes()  # before the choice
        since = changes, runtime.moves if named is None else None
        chosen = self._chosen(problem, named, runtime)
        captured = None
        ready = named is not None or regime() == "captured" or runtime.repeats(problem)
        if named is None and ready:
            captured = schedule_for_capture(problem, chosen, runtime, self.device)
        if named is None and waits_for_kernels(problem, runtime, self.device):
            ready = False
        if captured is not None:
            self._load(problem, captured, runtime, tensors)
        if chosen.transport == "collective":
            runtime.check_alive()
            ys = self._run_plain(problem, tensors)
            runtime.note_plain_run(problem)
        else:
            ys = self._outputs(problem)
            runtime.execute(problem, chosen, self._arrays(problem, runtime, tensors, ys))
        if self.key is not None:
            keep(self.key, self._repeated(problem, chosen, runtime, tensors, ready, since))
        return ys

    def _load(self, problem: Problem, captured: Schedule, runtime: Any, tensors: Any) -> None:
        """Load what a capture of this call takes."""
        if captured.transport == "collective":
            self._run_plain(problem, tensors)
            runtime.note_plain_run(problem)
            return
        arrays = self._arrays(problem, runtime, tensors, self._outputs(problem))
        try:
            runtime.load(problem, captured, arrays)
        except (InputError, MemoryError) as error:  # equal on all ranks
            log.info("%s is not loaded for captures: %s", captured.name, error)

    def _arrays(
        self, problem: Problem, runtime: Any, tensors: dict[str, Tensor], ys: list[Tensor]
    ) -> dict[str, Tensor]:
        """Return a call's inputs as kernels can read them, and its outputs, as matrices."""
        roles, even = problem.roles(self.rank), _needs_even(runtime)
        arrays = {
            name: taken_as(roles[name], plainly=False, even=even)(tensor)
            for name, tensor in tensors.items()
            if name in roles
        }
        return arrays | {f"y{i}": as_matrix(y) for i, y in enumerate(ys)}

    def _repeated(
        self,
        problem: Problem,
        schedule: Schedule,
        runtime: Any,
        tensors: Iterable[str],
        ready: bool,
        since: tuple[int, int | None],
    ) -> CachedCall:
        """Return the call as one that is repeated; see `CachedCall`."""
        shapes, plainly = tuple(self._shapes(problem)), schedule.transport == "collective"
        even, roles = _needs_even(runtime), problem.roles(self.rank)
        takes = tuple(
            (name, taken_as(roles.get(name), plainly, even), taken_as(roles.get(name), True))
            for name in tensors
        )
        return CachedCall(
            runtime, problem, schedule, takes, shapes, ready, since, tuple(self.lengths)
        )

    def _on_gpu_by(
        self, problem: Problem, tensors: dict[str, Tensor], runtime: Any, schedule: Schedule
    ) -> Callable[[], object]:
        """Return a function that enqueues the call as one that is repeated."""
        since = groups.changes(), None
        call = self._repeated(problem, schedule, runtime, tensors, True, since)
        return partial(call.run, list(tensors.values()))

    def _chosen(
        self, problem: Problem, named: Schedule | None, runtime: ProcessRuntime
    ) -> Schedule:
        """Return the schedule of this call, resolved."""
        if named is None:
            chosen = automatic(problem, runtime, self.device, self.group)
        else:
            chosen = named.resolve(runtime.world, runtime.machine)
            chosen = within_limit(problem, chosen, runtime)
            waits = {"transport": chosen.transport == "sm", "sums": chosen.sums == "within"}
            if any(waits.values()) and self.device.type == "cuda" and not groups.alone():
                axis = next(axis for axis, value in waits.items() if value)
                nearest = {"transport": "dma", "sums": "apart"}[axis]
                raise ScheduleError(
                    f"schedule {chosen.name!r}: {axis}={getattr(chosen, axis)!r} waits for peers' "
                    "kernels. These may never run, because this process has other groups open for "
                    "GPUs or CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue; close "
                    f"those groups, unset the variable, or use {axis}={nearest!r}"
                )
        log.debug("%s: %s, grain %s", problem.op, chosen.name, chosen.grain)
        return chosen

    def _outputs(self, problem: Problem) -> list[Tensor]:
        shapes = self._shapes(problem)
        if self.device.type == "cpu":  # on a GPU PyTorch's allocator raises an error
            size = sum([math.prod(shape) for shape in shapes]) * self.torch_dtype.itemsize
            if size >= LOOKED_AT:
                check_host(size, f"results of {problem.op}")
        return [torch.empty(shape, dtype=self.torch_dtype, device=self.device) for shape in shapes]

    def _shapes(self, problem: Problem) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's outputs; rows have the same dimensions as in x."""
        inner = max(math.prod(self.inner), 1)
        return [
            (height, width) if output.axis != "rows" else (height // inner, *self.inner, width)
            for (height, width), output in zip(
                problem.result_shapes(self.rank), problem.outputs, strict=True
            )
        ]


def _needs_even(runtime: Any) -> bool:
    """Return whether `evenly` must align all matrices, because no kernels can be compiled."""
    return runtime.kernels is not None and not runtime.kernels.compiles


def _named_schedule(schedule: str | Schedule, grain: int | None, op: str) -> Schedule | None:
    """Return the schedule that the user named for `op`, with its grain; None: "auto"."""
    if isinstance(schedule, str) and schedule == AUTO:
        if grain is not None:
            raise InputError(
                f"grain={grain} with schedule='auto', which chooses the grain; name a schedule, or "
                "leave grain out"
            )
        return None
    chosen = Schedule.read(schedule, op)
    return chosen if grain is None else replace(chosen, grain=grain)


def check_schedule(schedule: str | Schedule, grain: int | None, op: str) -> None:
    """Refuse a schedule of `op` that does not exist, or a grain that is invalid for it.

    Raises:
        InputError: grain with "auto"; ScheduleError: no such schedule or grain.
    """
    try:
        _cached_named_schedule(schedule, grain, op)
    except TypeError:  # some argument has no hash
        _named_schedule(schedule, grain, op)


_cached_named_schedule = lru_cache(maxsize=64, typed=True)(_named_schedule)


class _Memory:
    """A tensor's memory for NumPy. After Tensor.numpy() the storage could not be resized.

    FSDP resizes the storage to free gathered weights.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # lives as long as the array
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": ALL[NAME_OF[tensor.dtype]].typestr,
            "data": (tensor.data_ptr(), False),
            "strides": tuple(step * tensor.element_size() for step in tensor.stride()),
            "version": 3,
        }


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return an array over the tensor's memory, with its strides."""
    array: npt.NDArray[Any] = np.asarray(_Memory(tensor.detach().resolve_neg()))
    return array.view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else array
