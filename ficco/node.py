"""Node: all ranks in one process. Checks the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ficco import compute as computes
from ficco import operators, selector
from ficco.checking import positive_seconds, whole_number
from ficco.compute import dtype_of
from ficco.compute.numpy import NUMPY
from ficco.engines.available_memory import LOOKED_AT, check_host
from ficco.engines.group_kernels import GroupKernels
from ficco.errors import InputError, closest
from ficco.logs import log, set_up
from ficco.machine import Machine
from ficco.operators.arrays import Library, row_contiguous
from ficco.problem import MAX_WORLD, Problem
from ficco.runtime.local import LocalRuntime
from ficco.runtime.local_gpu import CudaLocalRuntime
from ficco.schedule import Schedule
from ficco.timeline import Timeline
from ficco.verifier.meaning import required_buffers

if TYPE_CHECKING:
    from ficco.compute.cupy import CupyCompute

__all__ = ["Node"]

Array = npt.NDArray[Any]


class Node:
    """All ranks of a group in this process, each a thread with its own copy lanes.

    Args:
        world: number of ranks, 1 to 64.
        machine: a profile or its name. "host" runs at the full speed of this machine. "mesh4",
            "mesh8", "switch4", "switch8" are paced: copies move real bytes, and take the time that
            the profile gives. "cuda" runs on GPUs 0 to world-1 of this machine.
        schedule: a schedule or its name, for calls without one; "auto": the one predicted to be
            fastest, from the machine's rates or a shipped profile of the devices.
        compute: the GEMM library: "numpy" or "torch", on GPUs "cupy"; None: the first available.
        timeout_s: longest time of any wait within a call, in seconds, before TimeoutExceeded.

    A node runs one call at a time; others wait. Nodes are independent of each other. After a failed
    call the node rejects further calls until `reset`. Use it as a context manager, or call `close`,
    to end its threads. A node has no process group and thus no transport="collective": whole
    transfers, as in the schedule "serial", are copies on every machine.

    On GPUs inputs and results are CuPy arrays, those of rank r on device r. A call enqueues its
    work on the current stream of each device and returns. It does not check values, so indices must
    be within their tables. If a call fails on the device, the next call or `synchronize` reports
    it. Capture into a CUDA graph is rejected, because CuPy does not allow GEMMs in a capture; the
    torch functions can be captured.

    Raises:
        InputError: an argument is invalid.
        EngineError: on GPUs: there are too few, or they cannot access each other.
        GpuError: on GPUs: there is no driver, or it is too old.

    Example:
        >>> xs = [np.ones((rows, 64), np.float32) for rows in (5, 0, 7, 3)]  # x_r [m_r, k]
        >>> ws = [np.ones((64, 8), np.float32)] * 4  # w_r [k, n_r]
        >>> with ficco.Node(4, machine="mesh4") as node:
        ...     ys = node.all_gather_matmul(xs, ws, schedule="hetero_fused_1d", grain=2)
        >>> [y.shape for y in ys]
        [(15, 8), (15, 8), (15, 8), (15, 8)]
    """

    def __init__(
        self,
        world: int,
        *,
        machine: str | Machine = "host",
        schedule: str | Schedule = "hetero_fused_1d",
        compute: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        set_up()
        world = whole_number(world, "world", 1, MAX_WORLD)
        timeout_s = positive_seconds(timeout_s, "timeout_s")
        self._schedule = _named(schedule)
        profile = machine if isinstance(machine, Machine) else Machine.named(machine)
        self._library: Library = NUMPY
        self._runtime: LocalRuntime | CudaLocalRuntime
        if profile.engine == "cuda":
            cupy = _cupy(compute)
            self._library = cupy
            self._runtime = CudaLocalRuntime(world, profile, cupy, timeout_s)
        else:
            library = computes.named("numpy" if compute is None else compute)
            self._runtime = LocalRuntime(world, profile, library, timeout_s)
        log.info("node of %d ranks opened on machine %s", world, profile.name)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._runtime.world

    @property
    def machine(self) -> Machine:
        """The machine's profile."""
        return self._runtime.machine

    @property
    def timeout_s(self) -> float:
        """The longest time of any wait within a call, in seconds."""
        return self._runtime.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._runtime.timeout_s = positive_seconds(value, "timeout_s")

    @property
    def window_bytes(self) -> int:
        """Bytes of memory of the windows, over all ranks."""
        return self._runtime.window_bytes

    def all_gather_matmul(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array | Sequence[Array]],
        *,
        bias: Sequence[Any] | None = None,
        axes: Sequence[str] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Any]:
        """Multiply the concatenation of all ranks' rows with each rank's weight.

        Args:
            xs: per rank x_r [m_r, k]; m_r may differ and be 0. Rows whose elements are not
                contiguous are copied first.
            ws: per rank w_r [k, n_r] with any strides, or a tuple of several weights that share
                the gather; n_r may differ and be 0.
            bias: per rank [n_r], or a tuple with one (or None) per weight; None: no bias.
            axes: per weight: "rows", or "contraction" for concat(x)^T . w_r with w_r [m, n_r].
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y_r [m, n_r] (along the contraction [k, n_r]); a tuple if ws has tuples.

        Raises:
            InputError: shapes or dtypes do not fit. ScheduleError: the schedule is not implemented.
            TimeoutExceeded, EngineError: the call failed.
        """
        outputs = self._call(
            "all_gather_matmul", schedule, grain, xs=xs, ws=ws, bias=bias, axes=axes
        )
        if any(isinstance(w, (tuple, list)) for w in ws):
            return [tuple(ys) for ys in outputs]
        return [ys[0] for ys in outputs]

    def matmul_reduce_scatter(
        self,
        xs: Sequence[Array | Sequence[Array]],
        ws: Sequence[Array | Sequence[Array]],
        *,
        rows: Sequence[int] | None = None,
        bias: Sequence[Any] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Sum all ranks' products, and give each rank its rows of the sum.

        Args:
            xs: per rank x_r [m, k_r], or several, whose products are added up.
            ws: per rank w_r [k_r, n], or several, one per x.
            rows: per rank, the number of rows it gets; default: torch.chunk's rule.
            bias: per rank [n], added to that rank's rows.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y_r [m_r, n].

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "matmul_reduce_scatter", schedule=schedule, grain=grain, xs=xs, ws=ws, rows=rows,
            bias=bias,
        )  # fmt: skip

    def matmul_all_reduce(
        self,
        xs: Sequence[Array | Sequence[Array]],
        ws: Sequence[Array | Sequence[Array]],
        *,
        bias: Sequence[Any] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Sum all ranks' products, and give every rank the whole sum.

        Args:
            xs: per rank x_r [m, k_r], or several, whose products are added up.
            ws: per rank w_r [k_r, n], or several, one per x.
            bias: per rank [n], the same on all.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y [m, n], bitwise equal on all.

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "matmul_all_reduce", schedule=schedule, grain=grain, xs=xs, ws=ws, bias=bias
        )

    def all_to_all_matmul(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array],
        splits: Sequence[Sequence[int]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Send every rank its block of rows, and multiply each rank's rows with its weight.

        Args:
            xs: per rank x_r [sum of splits[r], k], blocks for rank 0, 1, ... in this order.
            ws: per rank w_r [k, n].
            splits: splits[s][r] rows go from rank s to rank r.
            schedule: instead of the node's.
            grain: chunks per block, instead of the schedule's.

        Returns:
            Per rank [rows received, n], rows ordered by source rank.

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "all_to_all_matmul", schedule=schedule, grain=grain, xs=xs, ws=ws, splits=splits
        )

    def matmul_all_to_all(
        self,
        xs: Sequence[Array],
        ws: Sequence[Array],
        splits: Sequence[Sequence[int]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Multiply each rank's rows with its weight, and send every rank its block of the product.

        Arguments, result and errors are as in `all_to_all_matmul`.
        """
        return self.call(
            "matmul_all_to_all", schedule=schedule, grain=grain, xs=xs, ws=ws, splits=splits
        )

    def embedding_all_to_all(
        self,
        tables: Sequence[Sequence[Array]],
        indices: Sequence[Sequence[Array]],
        offsets: Sequence[Sequence[Array]],
        *,
        rows: Sequence[int] | None = None,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[Array]:
        """Pool every rank's tables for the whole batch; give each rank its slice of all tables.

        Args:
            tables: per rank its tables, each [rows, d].
            indices: per rank and table [lookups], int64.
            offsets: per rank and table [batch], int64: the start of each bag in its indices.
            rows: per rank, the rows of the batch that it gets; default: torch.chunk's rule.
            schedule: instead of the node's.
            grain: chunks per batch slice, instead of the schedule's.

        Returns:
            Per rank [its rows, all tables of all ranks side by side].

        Raises: as `all_gather_matmul`.
        """
        return self.call(
            "embedding_all_to_all", schedule=schedule, grain=grain, tables=tables,
            indices=indices, offsets=offsets, rows=rows,
        )  # fmt: skip

    def call(
        self,
        name: str,
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
        **arguments: Any,
    ) -> list[Array]:
        """Run an operator by name, including those of `ficco.operators.register`.

        Args:
            name: the name of the operator.
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.
            arguments: the operator's arguments; arrays are lists with an entry per rank.

        Returns:
            Per rank, its first output.

        Raises: as `all_gather_matmul`; InputError for an operator that is not registered.

        Example:
            >>> node.call("matmul_all_reduce", xs=xs, ws=ws)  # doctest: +SKIP
        """
        return [ys[0] for ys in self._call(name, schedule, grain, **arguments)]

    def run(
        self,
        problem: Problem,
        arrays: Sequence[Mapping[str, Array]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[list[Array]]:
        """Run a problem on named inputs.

        Args:
            problem: the problem; its world is the node's.
            arrays: per rank, inputs and weights by buffer name (see the plan's schema).
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank, its outputs.

        Raises:
            MemoryError: results, or windows and workspaces, exceed the host's available memory.
        """
        if not isinstance(problem, Problem):
            raise InputError(f"problem={problem!r:.80}: a ficco.Problem is needed")
        if problem.world != self.world:
            raise InputError(f"the problem has {problem.world} ranks, the node {self.world}")
        self._check_named(problem, self._per_rank(arrays, "arrays"))
        dtype = dtype_of(problem.dtype)
        if self._runtime.machine.engine == "host":  # on a GPU, CuPy checks memory
            shapes = [shape for rank in range(self.world) for shape in problem.result_shapes(rank)]
            size = sum(rows * cols for rows, cols in shapes) * problem.itemsize
            if size >= LOOKED_AT:
                check_host(size, f"results of {problem.op} on {self.world} ranks")
        results = [
            [self._library.new(shape, dtype, rank) for shape in problem.result_shapes(rank)]
            for rank in range(self.world)
        ]
        named = [
            {**self._readable(rank_arrays), **{f"y{i}": y for i, y in enumerate(ys)}}
            for rank_arrays, ys in zip(arrays, results, strict=True)
        ]
        self._runtime.execute(problem, self._resolved(problem, schedule, grain), named)
        return results

    def _call(
        self, name: str, schedule: str | Schedule | None, grain: int | None, **arguments: Any
    ) -> list[list[Array]]:
        """Return, per rank, all outputs of an operator."""
        operator = operators.get(name)
        for argument in arguments:
            if argument not in operator.arguments:
                known = ", ".join(operator.arguments)
                raise InputError(
                    f"{name} has no argument {argument!r}{closest(argument, operator.arguments)}. "
                    f"Known: {known}"
                )
        for argument in operator.per_rank:
            arguments[argument] = self._per_rank(arguments.get(argument), argument)
        posed = operator.pose(name, self._library, **arguments)
        return self.run(posed.problem, posed.arrays, schedule=schedule, grain=grain)

    @property
    def traced(self) -> bool:
        """Whether calls record times for `timeline`: always on the host, on GPUs if set."""
        return not isinstance(self._runtime, CudaLocalRuntime) or self._runtime.traced

    @traced.setter
    def traced(self, value: bool) -> None:
        if isinstance(self._runtime, CudaLocalRuntime):
            self._runtime.traced = value

    def timeline(self) -> Timeline:
        """Return the timeline of the last call, over all ranks; on GPUs it must be `traced`."""
        return self._runtime.timeline()

    def synchronize(self) -> None:
        """Wait until all calls have ended on their devices; on the host they already have.

        Raises:
            TimeoutExceeded, EngineError: a call failed; the node needs `reset`.
        """
        if isinstance(self._runtime, CudaLocalRuntime):
            self._runtime.synchronize()

    def reset(self) -> None:
        """Make the node usable again after a failed call."""
        self._runtime.reset()

    def close(self) -> None:
        """End the node's threads and reject further calls."""
        self._runtime.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ficco.Node has threads and memory of this process, and can be neither copied nor "
            "pickled; make a new Node instead"
        )

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _per_rank(self, entries: Any, name: str) -> Sequence[Any]:
        if isinstance(entries, np.ndarray) or not isinstance(entries, (list, tuple)):
            raise InputError(
                f"{name}: {type(entries).__name__} found; give a list with one array per rank"
            )
        if len(entries) != self.world:
            raise InputError(f"{name} has {len(entries)} entries, the node has {self.world} ranks")
        return entries

    def _check_named(self, problem: Problem, arrays: Sequence[Mapping[str, Array]]) -> None:
        """Check the shape and dtype of every input against the problem's buffers."""
        for rank, rank_arrays in enumerate(arrays):
            for buffer in required_buffers(problem, rank):
                if buffer.role == "output":
                    continue
                array, where = rank_arrays.get(buffer.name), f"arrays[{rank}][{buffer.name!r}]"
                wanted = (buffer.rows, buffer.cols), buffer.dtype
                refusal = None if array is None else self._library.refusal(array, rank)
                if refusal is not None:
                    raise InputError(where + refusal)
                actual = None if array is None else (array.shape, array.dtype.name)
                if actual != wanted:
                    raise InputError(f"{where}: {wanted} is needed, {actual} found")

    def _readable(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return inputs with contiguous rows where engines need them (x; GPUs: not weights)."""
        readable = dict(arrays)
        for name, array in arrays.items():
            if name.startswith("x") or not (self._library.immediate or name.startswith("w")):
                readable[name] = row_contiguous(array, self._library)
        return readable

    def _resolved(
        self, problem: Problem, schedule: str | Schedule | None, grain: int | None
    ) -> Schedule:
        chosen = self._schedule if schedule is None else _named(schedule)
        if not isinstance(chosen, Schedule):  # "auto"
            if grain is not None:
                raise InputError(f"grain={grain} with schedule='auto', which sets it; leave it out")
            library = self._library
            chosen = self._automatic(problem, library.gates)
            gpu = library.gpu
            if gpu is not None and not GroupKernels("", False, (gpu,)).has(problem, chosen):
                chosen = self._automatic(problem, False)
        if grain is not None:
            chosen = replace(chosen, grain=grain)
        if chosen.transport in ("machine", "collective"):
            chosen = replace(chosen, transport="dma")  # the only one that a node has
        return chosen.resolve(self.world, self.machine)

    def _automatic(self, problem: Problem, gates: bool) -> Schedule:
        device = self._library.device
        return selector.automatic(problem, self.machine, device, "eager", gates=gates).schedule


def _named(schedule: str | Schedule) -> str | Schedule:
    """Return a schedule, or "auto"."""
    if isinstance(schedule, Schedule) or (isinstance(schedule, str) and schedule == "auto"):
        return schedule
    return Schedule.named(schedule)  # raises if it is not a text


def _cupy(compute: str | None) -> CupyCompute:
    if compute not in (None, "cupy"):
        raise InputError(f"compute={compute!r}: on GPUs a node computes by 'cupy'; leave it out")
    try:
        from ficco.compute.cupy import CupyCompute
    except ImportError as missing:
        raise InputError(
            f"a node on GPUs needs CuPy ({missing}); pip install 'ficco[cuda]', or use a machine "
            "such as 'host'"
        ) from missing
    return CupyCompute()
