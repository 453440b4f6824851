"""Node: all ranks in one process, on NumPy arrays. Looks at what the user passes and names faults.

node = ficco.Node(4, machine="mesh4")
ys = node.all_gather_matmul(xs, ws)      # lists with one array per rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ficco import compute as computes
from ficco.compute import dtype_of
from ficco.errors import InputError
from ficco.machine import Machine
from ficco.problem import DTYPES, MAX_WORLD, Output, Problem
from ficco.runtime.local import LocalRuntime
from ficco.schedule import Schedule
from ficco.timeline import Timeline

__all__ = ["Node"]

Array = npt.NDArray[Any]


class Node:
    """All ranks of a group in this process, each a thread with copy lanes of its own.

    Args:
        world: number of ranks, 1 to 64.
        machine: a profile or its name. "host" runs as fast as this machine can; "mesh4", "mesh8",
            "switch4", "switch8" are paced: real bytes, on links that last as long as the profile
            says.
        schedule: a schedule or its name, for calls that name none.
        compute: "numpy" or "torch", the library for GEMMs.
        timeout_s: how long any wait within a call may last before it raises TimeoutExceeded.

    A node may be used by one call at a time; others wait. Nodes are independent of each other.
    After a failed call the node refuses further calls until `reset`. Use it as a context manager,
    or call `close`, to end its threads.

    Raises:
        InputError: an argument that cannot be.
    """

    def __init__(
        self,
        world: int,
        *,
        machine: str | Machine = "host",
        schedule: str | Schedule = "hetero_fused_1d",
        compute: str = "numpy",
        timeout_s: float = 30.0,
    ) -> None:
        if isinstance(world, bool) or not isinstance(world, int) or not 1 <= world <= MAX_WORLD:
            raise InputError(f"world={world!r}: a node has 1 to {MAX_WORLD} ranks")
        _check_timeout(timeout_s)
        self._schedule = schedule if isinstance(schedule, Schedule) else Schedule.named(schedule)
        profile = machine if isinstance(machine, Machine) else Machine.named(machine)
        self._runtime = LocalRuntime(world, profile, computes.named(compute), timeout_s)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self._runtime.world

    @property
    def machine(self) -> Machine:
        """The profile that it runs as."""
        return self._runtime.machine

    @property
    def timeout_s(self) -> float:
        """How long any wait within a call may last, in seconds."""
        return self._runtime.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        _check_timeout(value)
        self._runtime.timeout_s = value

    @property
    def window_bytes(self) -> int:
        """Bytes of memory that windows hold, over all ranks."""
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
            bias: per rank [n_r], or a tuple of one (or None) per weight; None: none.
            axes: per weight: "rows", or "contraction" for concat(x)^T . w_r with w_r [m, n_r].
            schedule: instead of the node's.
            grain: chunks per shard, instead of the schedule's.

        Returns:
            Per rank y_r [m, n_r] (along the contraction [k, n_r]); a tuple where ws has tuples.

        Raises:
            InputError: shapes or dtypes that do not fit; ScheduleError: a schedule that nothing
            implements; TimeoutExceeded, EngineError: the call failed.
        """
        shards = [_matrix(x, f"xs[{r}]") for r, x in enumerate(self._per_rank(xs, "xs"))]
        single = all(not isinstance(w, (tuple, list)) for w in ws)
        weights = [
            [
                _matrix(w, f"ws[{r}]" + ("" if single else f"[{i}]"))
                for i, w in enumerate(_several(entry))
            ]
            for r, entry in enumerate(self._per_rank(ws, "ws"))
        ]
        biases = self._biases(bias, weights)
        problem = _gathering(shards, weights, biases, axes)
        chosen = self._resolved(schedule, grain)
        arrays, results = [], []
        for rank in range(self.world):
            named = {"x": _row_contiguous(shards[rank])}
            mine = []
            for i, (output, w) in enumerate(zip(problem.outputs, weights[rank], strict=True)):
                named[output.operand] = w
                if output.bias:
                    named[f"bias{i}"] = np.reshape(biases[rank][i], (1, -1))
                height = problem.m if output.axis == "rows" else problem.k
                y = np.empty((height, output.columns[rank]), dtype_of(problem.dtype))
                named[f"y{i}"] = y
                mine.append(y)
            arrays.append(named)
            results.append(mine[0] if single else tuple(mine))
        self._runtime.execute(problem, chosen, arrays)
        return results

    def timeline(self) -> Timeline:
        """Return what the last call ran, over all ranks."""
        return self._runtime.timeline()

    def reset(self) -> None:
        """Make the node usable again after a failed call."""
        self._runtime.reset()

    def close(self) -> None:
        """End the node's threads and refuse further calls."""
        self._runtime.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _per_rank(self, entries: Sequence[Any], name: str) -> Sequence[Any]:
        if isinstance(entries, np.ndarray) or not isinstance(entries, (list, tuple)):
            raise InputError(
                f"{name}: {type(entries).__name__} found; give a list with one array per rank"
            )
        if len(entries) != self.world:
            raise InputError(f"{name} has {len(entries)} entries, the node has {self.world} ranks")
        return entries

    def _biases(self, bias: Sequence[Any] | None, weights: list[list[Array]]) -> list[list[Any]]:
        if bias is None:
            return [[None] * len(entry) for entry in weights]
        found = []
        for rank, entry in enumerate(self._per_rank(bias, "bias")):
            mine = list(entry) if isinstance(entry, (tuple, list)) else [entry]
            if len(mine) != len(weights[rank]):
                raise InputError(
                    f"bias[{rank}] has {len(mine)} entries, ws[{rank}] has {len(weights[rank])}"
                )
            found.append(mine)
        return found

    def _resolved(self, schedule: str | Schedule | None, grain: int | None) -> Schedule:
        chosen = self._schedule if schedule is None else schedule
        if not isinstance(chosen, Schedule):
            chosen = Schedule.named(chosen)
        if grain is not None:
            chosen = replace(chosen, grain=grain)
        return chosen.resolve(self.world, self.machine)


def _check_timeout(value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise InputError(f"timeout_s={value!r}: it is a positive number of seconds")


def _several(entry: Any) -> Sequence[Any]:
    return entry if isinstance(entry, (tuple, list)) else (entry,)


def _matrix(array: Any, name: str) -> Array:
    if not isinstance(array, np.ndarray):
        raise InputError(f"{name}: {type(array).__name__} found; a NumPy array is needed")
    if array.dtype.name not in DTYPES:
        raise InputError(
            f"{name}: dtype {array.dtype.name} found; it is one of {', '.join(DTYPES)} "
            "(bfloat16 from ml_dtypes)"
        )
    if not array.dtype.isnative:
        raise InputError(f"{name}: its bytes are not in this machine's order; convert it first")
    if array.ndim != 2:
        raise InputError(f"{name}: shape {array.shape} found; a matrix is needed")
    return array


def _row_contiguous(x: Array) -> Array:
    """Return x, or a copy where a copy engine could not read its rows."""
    row_bytes = x.shape[1] * x.itemsize
    fits = x.strides[1] == x.itemsize and (x.strides[0] >= row_bytes or x.shape[0] <= 1)
    return x if fits and x.strides[0] >= 0 else np.ascontiguousarray(x)


def _gathering(
    shards: list[Array],
    weights: list[list[Array]],
    biases: list[list[Any]],
    axes: Sequence[str] | None,
) -> Problem:
    """Return the problem that the arrays pose, or say what does not fit."""
    dtype, k = shards[0].dtype, shards[0].shape[1]
    rows = tuple(x.shape[0] for x in shards)
    count = len(weights[0])
    if axes is None:
        axes = ("rows",) * count
    if len(axes) != count:
        raise InputError(f"axes has {len(axes)} entries, there are {count} weights a rank")
    for rank, x in enumerate(shards):
        _same_dtype(x, dtype, f"xs[{rank}]")
        if x.shape[1] != k:
            raise InputError(
                f"xs[{rank}] has {x.shape[1]} columns, xs[0] has {k}; all shards are [m_r, k]"
            )
    if k < 1 or sum(rows) < 1:
        raise InputError(f"xs: m={sum(rows)}, k={k}; there is nothing to gather")
    outputs = []
    for i in range(count):
        inner = {"rows": k, "contraction": sum(rows)}.get(axes[i])
        if inner is None:
            raise InputError(f"axes[{i}]={axes[i]!r}: it is 'rows' or 'contraction'")
        columns = []
        for rank, entry in enumerate(weights):
            name = f"ws[{rank}]" + (f"[{i}]" if count > 1 else "")
            if len(entry) != count:
                raise InputError(f"ws[{rank}] has {len(entry)} weights, ws[0] has {count}")
            _same_dtype(entry[i], dtype, name)
            if entry[i].shape[0] != inner:
                raise InputError(
                    f"{name} has shape {entry[i].shape}; with xs of m={sum(rows)}, k={k} and axis "
                    f"{axes[i]!r} it is [{inner}, n_r] (pass linear.weight.T)"
                )
            columns.append(entry[i].shape[1])
        has_bias = [biases[rank][i] is not None for rank in range(len(weights))]
        if any(has_bias) != all(has_bias):
            raise InputError("bias: some ranks have one and some have none")
        if any(has_bias):
            _check_bias([entry[i] for entry in biases], columns, dtype)
        operand = "w" if count == 1 else f"w{i}"
        outputs.append(Output(tuple(columns), operand, axes[i], bias=any(has_bias)))
    return Problem("all_gather_matmul", len(shards), rows, k, tuple(outputs), dtype=dtype.name)


def _check_bias(biases: list[Any], columns: list[int], dtype: np.dtype[Any]) -> None:
    for rank, bias in enumerate(biases):
        if not isinstance(bias, np.ndarray):
            raise InputError(f"bias[{rank}]: {type(bias).__name__} found; an array is needed")
        _same_dtype(bias, dtype, f"bias[{rank}]")
        if bias.shape not in ((columns[rank],), (1, columns[rank])):
            raise InputError(f"bias[{rank}] has shape {bias.shape}; it is [{columns[rank]}]")


def _same_dtype(array: Array, dtype: np.dtype[Any], name: str) -> None:
    if array.dtype != dtype:
        raise InputError(f"{name} is {array.dtype.name}, xs[0] is {dtype.name}; give one dtype")
