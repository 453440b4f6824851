"""Node: all ranks in one process. Checks the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ficco import operators
from ficco.api.node_operators import NodeOperators
from ficco.core.checking import positive_seconds, true_or_false, whole_number
from ficco.core.errors import InputError, closest, shown
from ficco.core.logs import log, reporting, set_up
from ficco.core.machine import Machine
from ficco.engine import compute as computes
from ficco.engine.available_memory import LOOKED_AT, check_host
from ficco.engine.compute import dtype_of
from ficco.engine.compute.numpy import NUMPY
from ficco.engine.group_kernels import GroupKernels
from ficco.lowering import planning
from ficco.lowering.lowered import Lowered
from ficco.measure import selector
from ficco.operators import registry
from ficco.operators.arrays import Library, row_contiguous
from ficco.operators.problem import Problem
from ficco.operators.problem_checks import MAX_WORLD
from ficco.operators.registry import Posed
from ficco.plan import Plan, operand_buffers
from ficco.plan.schedule import Schedule
from ficco.plan.timeline import Timeline
from ficco.runtime.node_runtime import NodeRuntime

if TYPE_CHECKING:
    from ficco.engine.compute.cupy import CupyCompute

Array = npt.NDArray[Any]


class Node(NodeOperators):
    """All ranks of a group in this process, each a thread with its own copy queues.

    Args:
        world: number of ranks, 1 to 64.
        machine: a profile or its name. "host" runs at the full speed of this machine. "mesh4",
            "mesh8", "switch4", "switch8" are emulated: copies move real bytes, and take the time
            that the profile gives. "cuda" runs on GPUs 0 to world-1 of this machine.
        schedule: a schedule or its name, for calls without one; "auto": the one predicted to be
            fastest, from the machine's rates or a shipped profile of the devices. None:
            "hetero_fused_1d"; of experts "two_waves" and "push_sm".
        compute: the GEMM library: "numpy" or "torch", on GPUs "cupy"; None: the first available.
        timeout_s: longest time of any wait within a call, in seconds, before TimeoutExceeded.

    A node runs one call at a time; others wait. Nodes are independent of each other. After a failed
    call the node rejects further calls until `reset`. Use it as a context manager, or call `close`,
    to end its threads. A node has no process group, so it does not support transport="collective":
    whole transfers, as in the schedule "serial", are copies on every machine.

    On GPUs inputs and results are CuPy arrays, those of rank r on device r. A call enqueues its
    work on the current stream of each device and returns. It does not check values, so indices must
    be within their tables. If a call fails on the device, the next call or `synchronize` reports
    it. A call cannot be captured into a CUDA graph, because CuPy does not allow GEMMs in a capture;
    the torch functions can.

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
        schedule: str | Schedule | None = None,
        compute: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        set_up()
        world = whole_number(world, "world", 1, MAX_WORLD)
        timeout_s = positive_seconds(timeout_s, "timeout_s")
        self._schedule = None if schedule is None else _named(schedule)
        self._checked: tuple[Plan, bool] | None = None  # the last plan of `run`: was it proved?
        profile = machine if isinstance(machine, Machine) else Machine.named(machine)
        self._library: Library = NUMPY
        if profile.engine == "cuda":
            cupy = _cupy(compute)
            self._library = cupy
            with reporting(f"opening a node of {world} GPUs"):
                self._runtime = NodeRuntime(world, profile, cupy, timeout_s)
        elif profile.engine == "hip":
            raise InputError(
                f"machine {profile.name!r}: a node does not run on AMD GPUs; use the torch "
                "functions, in a process per GPU, or a machine such as 'host' or 'mesh4'"
            )
        else:
            library = computes.named("numpy" if compute is None else compute)
            self._runtime = NodeRuntime(world, profile, library, timeout_s)
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

    @overload
    def run(
        self,
        problem: Problem,
        arrays: Sequence[Mapping[str, Array]],
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
    ) -> list[list[Array]]: ...

    @overload
    def run(
        self,
        problem: Plan,
        arrays: Sequence[Mapping[str, Array]] | None = None,
        *,
        verify: bool = True,
        **arguments: Any,
    ) -> list[list[Array]]: ...

    def run(
        self,
        problem: Problem | Plan,
        arrays: Sequence[Mapping[str, Array]] | None = None,
        *,
        schedule: str | Schedule | None = None,
        grain: int | None = None,
        verify: bool = True,
        **arguments: Any,
    ) -> list[list[Array]]:
        """Run a problem on named inputs, or a plan as it is.

        Args:
            problem: a problem, or a plan: one of `ficco.lower`, of `ficco.load_plan`, or written by
                hand. Its world is the node's.
            arrays: per rank, inputs and weights by buffer name (see the plan's schema).
            schedule: of a problem: instead of the node's.
            grain: of a problem: chunks per shard, instead of the schedule's.
            verify: of a plan: prove it before its first run (`ficco.verify`); further runs of the
                same object skip the proof. False: check only its form, so that no step leaves its
                buffer. An unproved plan may give wrong results, or wait until `timeout_s`.
            arguments: of a plan, instead of `arrays`: the operator's arguments, as in `call`. Their
                problem (sizes, dtype, rows per rank) must be the plan's.

        Returns:
            Per rank, its outputs.

        Raises:
            InputError: the arguments do not fit the problem, or a plan is for another problem.
            PlanError: the plan is wrong; the message names rank, step and remedy.
            TimeoutExceeded, EngineError: the call failed.
            MemoryError: results, or windows and workspaces, exceed the host's available memory.

        Example:
            >>> plan = ficco.load_plan("mine.json")  # doctest: +SKIP
            >>> ys = node.run(plan, xs=xs, ws=ws)  # doctest: +SKIP
        """
        if isinstance(problem, Plan):
            if schedule is not None or grain is not None:
                raise InputError(
                    f"schedule={shown(schedule)}, grain={shown(grain)} with a plan, which has a "
                    "schedule of its own; leave them out, or make the plan by ficco.lower"
                )
            return self._run_plan(problem, arrays, verify, arguments)
        if arguments or not verify:
            name = next(iter(arguments), "verify")
            raise InputError(f"{name}: this argument is for a plan; leave it out, or use call()")
        if not isinstance(problem, Problem):
            raise InputError(f"problem={shown(problem)}: a ficco.Problem or a ficco.Plan is needed")
        results, named = self._checked_with_results(problem, arrays)
        self._runtime.execute(problem, self._resolved(problem, schedule, grain), named)
        return results

    def _run_plan(
        self,
        plan: Plan,
        arrays: Sequence[Mapping[str, Array]] | None,
        verify: bool,
        arguments: dict[str, Any],
    ) -> list[list[Array]]:
        problem = plan.problem
        self._check_world(problem)
        if arrays is None:
            posed = self._posed(problem.op, arguments)
            if not isinstance(posed, Posed):
                raise InputError(
                    "the plan is for sizes of 1 or more, and a size of the arguments is 0; pass "
                    "arguments of the plan's sizes, or use call()"
                )
            if posed.problem != problem:
                unlike = planning.differences(problem, posed.problem)
                raise InputError(
                    f"the plan is for another problem: {unlike}; pass arguments of those sizes, or "
                    "make a plan for these by ficco.lower"
                )
            arrays = posed.arrays
        elif arguments:
            raise InputError(
                f"arrays and {', '.join(arguments)}: give the arrays by buffer name, or the "
                "operator's arguments, not both"
            )
        self._check_named(problem, self._per_rank(arrays, "arrays"))
        if self._checked is None or self._checked[0] is not plan or verify > self._checked[1]:
            with reporting(f"proving a plan of {planning.steps_of(plan)} steps"):
                planning.check(plan, verify)
            self._checked = (plan, verify)
        results, named = self._with_results(problem, arrays)
        self._runtime.execute_plan(plan, named)
        return results

    def _checked_with_results(
        self, problem: Problem, arrays: Any
    ) -> tuple[list[list[Array]], list[dict[str, Array]]]:
        """Return the result of `_with_results` after checks of a problem and its arrays."""
        self._check_world(problem)
        arrays = self._per_rank(arrays, "arrays")
        self._check_named(problem, arrays)
        return self._with_results(problem, arrays)

    def _check_world(self, problem: Problem) -> None:
        if problem.world != self.world:
            raise InputError(f"the problem has {problem.world} ranks, the node {self.world}")

    def _with_results(
        self, problem: Problem, arrays: Sequence[Mapping[str, Array]]
    ) -> tuple[list[list[Array]], list[dict[str, Array]]]:
        """Return, per rank, new outputs, and all its arrays by buffer name."""
        dtype = dtype_of(problem.result_dtype)
        if self._runtime.machine.engine == "host":  # on a GPU, CuPy checks memory
            shapes = [shape for rank in range(self.world) for shape in problem.result_shapes(rank)]
            size = sum(rows * cols for rows, cols in shapes) * problem.result_itemsize
            if size >= LOOKED_AT:
                check_host(size, f"results of {problem.op} on {self.world} ranks")
        results = [
            [self._library.new(shape, dtype, rank) for shape in problem.result_shapes(rank)]
            for rank in range(self.world)
        ]
        named = [
            self._readable(problem, rank, arrays[rank]) | {f"y{i}": y for i, y in enumerate(ys)}
            for rank, ys in enumerate(results)
        ]
        return results, named

    def _call(
        self, name: str, schedule: str | Schedule | None, grain: int | None, **arguments: Any
    ) -> list[list[Array]]:
        """Return, per rank, all outputs of an operator."""
        posed = self._posed(name, arguments)
        if not isinstance(posed, Posed):
            self._runtime.check()
            _named(self._given(schedule, name), grain, name)
            return posed
        return self.run(posed.problem, posed.arrays, schedule=schedule, grain=grain)

    def _posed(self, name: str, arguments: dict[str, Any]) -> Posed | list[list[Array]]:
        """Return the problem of an operator's arguments, and its arrays by buffer name.

        If a size is 0, so that there is no problem, return the results.
        """
        operator = operators.get(name)
        for argument in arguments:
            if argument not in operator.arguments:
                raise InputError(
                    f"{name} has no argument {argument!r}{closest(argument, operator.arguments)}. "
                    f"Known: {', '.join(operator.arguments)}"
                )
        for argument in operator.per_rank:
            arguments[argument] = self._per_rank(arguments.get(argument), argument)
        return operator.pose(name, self._library, **arguments)

    @property
    def traced(self) -> bool:
        """Whether calls record times for `timeline`: always on the host, on GPUs if set."""
        return self.machine.engine == "host" or self._runtime.traced

    @traced.setter
    def traced(self, value: bool) -> None:
        true_or_false(value, "traced")
        self._runtime.traced = value

    def timeline(self) -> Timeline:
        """Return the timeline of the last call, over all ranks; on GPUs it must be `traced`."""
        return self._runtime.timeline()

    def synchronize(self) -> None:
        """Wait until all calls have ended on their devices; on the host they already have.

        Raises:
            TimeoutExceeded, EngineError: a call failed; the node needs `reset`.
        """
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _per_rank(self, entries: Any, name: str) -> Sequence[Any]:
        if isinstance(entries, np.ndarray) or not isinstance(entries, (list, tuple)):
            found = type(entries).__name__
            raise InputError(f"{name}: {found} found; give a list with one array per rank")
        if len(entries) != self.world:
            raise InputError(f"{name} has {len(entries)} entries, the node has {self.world} ranks")
        return entries

    def _check_named(self, problem: Problem, arrays: Sequence[Mapping[str, Array]]) -> None:
        """Check names, shapes and dtypes of all inputs against the problem's buffers."""
        for rank, rank_arrays in enumerate(arrays):
            if not isinstance(rank_arrays, Mapping):
                raise InputError(
                    f"arrays[{rank}]={shown(rank_arrays)}: a dict of arrays by name is needed"
                )
            buffers = {b.name: b for b in operand_buffers(problem, rank) if b.role != "output"}
            for name in rank_arrays:
                if name not in buffers:
                    raise InputError(
                        f"arrays[{rank}] has {shown(name)}, which is no input of "
                        f"{problem.op}{closest(name, buffers)}. Its inputs: {', '.join(buffers)}"
                    )
            for name, buffer in buffers.items():
                array, where = rank_arrays.get(name), f"arrays[{rank}][{name!r}]"
                wanted = (buffer.rows, buffer.cols), buffer.dtype
                refusal = None if array is None else self._library.refusal(array, rank)
                if refusal is not None:
                    raise InputError(where + refusal)
                actual = None if array is None else (array.shape, array.dtype.name)
                if actual != wanted:
                    raise InputError(f"{where}: {wanted} is needed, {actual} found")

    def _readable(
        self, problem: Problem, rank: int, arrays: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return inputs with contiguous rows where engines need them; GPUs: all but weights."""
        roles, readable = problem.roles(rank), dict(arrays)
        for name, array in arrays.items():
            role = roles[name]
            if role.travels or not (self._library.immediate or role.layout == "any"):
                readable[name] = row_contiguous(array, self._library)
        return readable

    def _given(self, schedule: str | Schedule | None, op: str) -> str | Schedule:
        """Return the schedule of a call: its own, the node's, or the usual one of the operator."""
        if schedule is None:
            schedule = self._schedule
        return registry.get(op).usual_schedule if schedule is None else schedule

    def _resolved(
        self, problem: Problem, schedule: str | Schedule | None, grain: int | None
    ) -> Schedule:
        chosen = _named(self._given(schedule, problem.op), grain, problem.op)
        if not isinstance(chosen, Schedule) and self._runtime.no_overlap:  # "auto"
            chosen = Schedule.named("serial")
        elif not isinstance(chosen, Schedule):
            library = self._library
            chosen = self._automatic(problem, library.gates)
            gpu = library.gpu
            if gpu is not None and not GroupKernels("", False, (gpu,)).has(problem, chosen):
                chosen = self._automatic(problem, False)
        if chosen.transport in ("machine", "collective"):
            chosen = replace(chosen, transport="dma")  # the only one that a node has
        return chosen.resolve(self.world, self.machine)

    def _automatic(self, problem: Problem, gates: bool) -> Schedule:
        device = self._library.device
        return selector.automatic(problem, self.machine, device, "eager", gates=gates).schedule


def run_lowered(
    node: Node, lowered: Lowered, arrays: Sequence[Mapping[str, Array]]
) -> list[list[Array]]:
    """Run a problem on named inputs like `Node.run`, by the plan of `lowered`.

    The node does not check the plan. It stays bound, as those that `Node.run` makes.

    Args:
        node: the node.
        lowered: the problem and a resolved schedule that a node supports.
        arrays: see `Node.run`.

    Returns:
        Per rank, its outputs.
    """
    results, named = node._checked_with_results(lowered.problem, arrays)
    node._runtime.execute(lowered.problem, lowered.schedule, named, lowered.plan)
    return results


def _named(
    schedule: str | Schedule, grain: int | None = None, op: str | None = None
) -> str | Schedule:
    """Return a schedule of `op`, with `grain` if that is given; or "auto"."""
    if isinstance(schedule, str) and schedule == "auto":
        if grain is not None:
            raise InputError(f"grain={grain} with schedule='auto', which sets it; leave it out")
        return schedule
    chosen = schedule if isinstance(schedule, Schedule) else Schedule.named(schedule, op)
    return chosen if grain is None else replace(chosen, grain=grain)


def _cupy(compute: str | None) -> CupyCompute:
    if compute not in (None, "cupy"):
        raise InputError(f"compute={compute!r}: on GPUs a node computes by 'cupy'; leave it out")
    try:
        from ficco.engine.compute.cupy import CupyCompute
    except ImportError as missing:
        raise InputError(
            f"a node on GPUs needs CuPy ({missing}); pip install 'ficco[cuda]', or use a machine "
            "such as 'host'"
        ) from missing
    return CupyCompute()
