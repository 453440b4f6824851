"""Run a command's problem as one rank of a group of processes.

`RankExecutor` computes on the CPU, `GpuExecutor` on the rank's GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ficco.core import settings
from ficco.core.errors import DevicesRefused, InputError
from ficco.core.machine import Machine
from ficco.core.private.torch_core import symmetric_memory
from ficco.engine import available_memory
from ficco.engine import compute as computes
from ficco.engine.compute import dtype_of
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.lowering.lowered import Lowered
from ficco.measure import timed
from ficco.measure.clock import device_ms
from ficco.measure.launching import join
from ficco.operators import oracle
from ficco.operators.problem import Problem
from ficco.plan.timeline import Timeline
from ficco.program import Entry, Exchange, Launch
from ficco.program.passes import compile_plan
from ficco.program.target import LIBRARY
from ficco.runtime import library_programs
from ficco.runtime.process import ProcessRuntime

_ROUNDS, _RUNS_PER_ROUND = 7, 5  # the median is taken over rounds

Tensor = torch.Tensor
Named = Mapping[str, Any]


class TorchOffers(NamedTuple):
    """The GPU features of the installed PyTorch.

    Attributes:
        cuda: the CUDA version that PyTorch was built for, or an empty string.
        devices: the number of usable GPUs.
        nccl, symmetric_memory: whether PyTorch has them.
        triton: whether Triton is installed, to compile kernels that the pack lacks.
        rocm: the HIP version that PyTorch was built for, or an empty string.
    """

    cuda: str
    devices: int
    nccl: bool
    symmetric_memory: bool
    triton: bool
    rocm: str = ""

    def lacking(self, engine: str = "cuda") -> str:
        """Return a sentence on what an engine of GPUs lacks here, or an empty string."""
        if engine == "hip" and not self.rocm:
            return "PyTorch is a build without ROCm"
        if engine == "cuda" and not self.cuda:
            return "PyTorch is a build without CUDA"
        needs = {"a GPU that it can use": self.devices > 0, "NCCL": self.nccl}
        if engine == "cuda":
            needs["symmetric memory"] = self.symmetric_memory
        missing = [name for name, available in needs.items() if not available]
        return f"PyTorch lacks {', '.join(missing)}" if missing else ""


def torch_offers() -> TorchOffers:
    """Return the GPU features of the installed PyTorch."""
    try:
        symmetric_memory()
    except ImportError:
        symmetric = False
    else:
        symmetric = True
    return TorchOffers(
        cuda=torch.version.cuda or "",
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        nccl=dist.is_available() and dist.is_nccl_available(),
        symmetric_memory=symmetric,
        rocm=torch.version.hip or "",
        triton=find_spec("triton") is not None,
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect this process's stdout to stderr, including output of native code."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


class _Rank:
    """One rank, set by the environment (RANK, WORLD_SIZE, and FICCO_STORE or torchrun's).

    Attributes:
        ranks: a list with this process's rank only.
        leads: whether it is rank 0.
    """

    def __init__(self, world: int) -> None:
        started = settings.whole("WORLD_SIZE")
        if started != world:
            raise InputError(f"--ranks {world}, but {started} processes were started")
        self.rank, self.world = settings.whole("RANK"), world
        self.ranks: Sequence[int] = [self.rank]
        self.leads = self.rank == 0

    def _join(self, backend: str, device: torch.device | None = None) -> None:
        with _stdout_to_stderr():  # gloo of PyTorch 2.9 prints to stdout, which `--json` needs
            join(backend, device_id=device)

    def most(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        return [max(column) for column in zip(*self._gathered(list(values)), strict=True)]

    def total(self, values: Sequence[int]) -> list[int]:
        """Return the sum of each value over all ranks."""
        return [sum(column) for column in zip(*self._gathered(list(values)), strict=True)]

    def joined(self, timeline: Timeline) -> Timeline:
        """Return the timeline of all ranks; they share one host's clock."""
        return Timeline.joined(self._gathered(timeline))

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


class RankExecutor(_Rank):
    """A rank on the CPU, over gloo."""

    def __init__(self, world: int, machine: Machine, compute: str, timeout_s: float) -> None:
        super().__init__(world)
        self._join("gloo")
        self._runtime = ProcessRuntime(
            dist.group.WORLD, machine, computes.named(compute), timeout_s
        )

    def check_room(self, problem: Problem) -> None:
        """Reject a problem whose data, in all processes, exceeds this machine's memory."""
        need = self.world * oracle.bytes_needed(problem, self.ranks)
        available_memory.check_host(need, "inputs and results of all ranks, in every process")

    def inputs(self, problem: Problem, seed: int) -> list[dict[str, Any]]:
        """Return all ranks' inputs."""
        return oracle.inputs(problem, seed)

    def run(self, lowered: Lowered, given: Sequence[Named], traced: bool) -> list[list[Any]]:
        """Return this rank's outputs; times are always recorded."""
        problem, plan = lowered.problem, lowered.rank(self.rank)
        dtype = dtype_of(problem.dtype)
        ys = [np.empty(shape, dtype) for shape in problem.result_shapes(self.rank)]
        arrays = {**given[self.rank], **{f"y{i}": y for i, y in enumerate(ys)}}
        self._runtime.execute(problem, lowered.schedule, arrays, plan)
        return [ys]

    def alone(self, problem: Problem, given: Sequence[Named]) -> None:
        """Do nothing: the timeline of `serial` has the times of its parts."""

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def timeline(self) -> Timeline:
        """Return the timeline of this rank's last run."""
        return self._runtime.timeline()

    def close(self) -> None:
        """Leave the group."""
        self._runtime.close()
        dist.destroy_process_group()


class GpuExecutor(_Rank):
    """A rank on its GPU, over NCCL: device LOCAL_RANK under torchrun, else RANK.

    A context manager: it closes the group on success. After an error the process must end, because
    other ranks may never arrive to close the group.

    Attributes:
        reason: why the group's GPUs cannot run ficco, equal on all ranks; None: they can.
    """

    def __init__(self, world: int, machine: Machine, timeout_s: float) -> None:
        super().__init__(world)
        from ficco.runtime.process_gpu import GpuProcessRuntime

        self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        torch.cuda.set_device(self._device)
        self._join("nccl", self._device)
        # As in the engine's own GEMMs, products of 16-bit values are summed in float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._has_timeline = False
        self._runtime: Any = None
        self.reason: str | None = None
        try:
            self._runtime = GpuProcessRuntime(dist.group.WORLD, machine, timeout_s)
        except DevicesRefused as refused:
            self.reason = str(refused)

    def __enter__(self) -> GpuExecutor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryError(f"GPU {self._device.index} is full") from error
        if error is None or self._runtime is None:
            if self._runtime is not None:
                self._runtime.close()
            dist.destroy_process_group()

    def check_room(self, problem: Problem) -> None:
        """Reject a problem whose data exceeds this GPU's memory."""
        need = oracle.bytes_needed(problem, self.ranks)
        available_memory.check_gpu(need, "inputs of all ranks and results of one", self._device)

    def inputs(self, problem: Problem, seed: int) -> list[dict[str, Tensor]]:
        """Return all ranks' inputs, drawn on this GPU; equal GPUs draw the same values."""
        return oracle.inputs(problem, seed, TorchDraw(problem.dtype, seed, self._device))

    def run(self, lowered: Lowered, given: Sequence[Named], traced: bool) -> list[list[Tensor]]:
        """Return this rank's outputs after they are complete; traced runs are warmed up first."""
        if traced:
            self._call(lowered, given[self.rank])
            self.meet()
        self._has_timeline = traced and not lowered.is_collective
        self._runtime.traced = traced
        try:
            return [self._call(lowered, given[self.rank])]
        finally:
            self._runtime.traced = False

    def _call(self, lowered: Lowered, own: Named) -> list[Tensor]:
        problem = lowered.problem
        dtype = TORCH_DTYPE[problem.dtype]
        if lowered.is_collective:
            like = torch.empty((0, problem.n), dtype=dtype, device=self._device)
            program = compile_plan(lowered.rank(self.rank), LIBRARY)
            tensors = {**own, "like": like}
            ys = library_programs.run(problem, program, tensors, dist.group.WORLD)
        else:
            ys = [
                torch.empty(shape, dtype=dtype, device=self._device)
                for shape in problem.result_shapes(self.rank)
            ]
            arrays = {**own, **{f"y{i}": y for i, y in enumerate(ys)}}
            self._runtime.execute(problem, lowered.schedule, arrays, lowered.rank(self.rank))
        torch.cuda.synchronize(self._device)
        self._runtime.check_alive()
        return ys

    def alone(self, problem: Problem, given: Sequence[Named]) -> tuple[float, float]:
        """Return the times of serial's whole compute and its whole transfer, each alone, in ms."""
        program, own = library_programs.program_of(problem, self.rank), given[self.rank]
        exchanges = [entry for entry in program.entries if isinstance(entry, Exchange)]
        launches = [entry for entry in program.entries if isinstance(entry, Launch)]
        arrived = {region.buffer for entry in exchanges for region in entry.writes}
        draw = TorchDraw(problem.dtype, 0, self._device)
        gathered = {
            buffer.name: draw.normal(buffer.rows, buffer.cols)
            for buffer in program.buffers
            if buffer.role == "workspace" and buffer.name in arrived
        }

        def median_ms(entries: Sequence[Entry], tensors: Named) -> float:
            part = program._replace(entries=tuple(entries))
            run = library_programs.bind(problem, part, [*tensors], dist.group.WORLD, True)
            call = functools.partial(run, [*tensors.values()])
            way = functools.partial(device_ms, call, _RUNS_PER_ROUND)
            return statistics.median(*timed([way], _ROUNDS, self.meet))

        return median_ms(launches, {**own, **gathered}), median_ms(exchanges, own)

    def meet(self) -> None:
        """Wait for all ranks and their GPUs."""
        torch.cuda.synchronize(self._device)
        dist.barrier()
        torch.cuda.synchronize(self._device)

    def timeline(self) -> Timeline | None:
        """Return this rank's last run, if it was traced; collectives record no times."""
        last: Timeline | None = self._runtime.timeline() if self._has_timeline else None
        return last


class TorchDraw:
    """Draws tensors on a device. See `oracle.Draw`."""

    def __init__(self, dtype: str, seed: int, device: torch.device) -> None:
        self._dtype = dtype
        self._options: dict[str, Any] = {
            "generator": torch.Generator(device).manual_seed(seed),
            "device": device,
        }

    def normal(self, rows: int, cols: int, scale: float = 1.0, dtype: str = "") -> Tensor:
        """See `oracle.Draw.normal`."""
        drawn = torch.randn((rows, cols), **self._options).mul_(scale)
        return drawn.to(TORCH_DTYPE[dtype or self._dtype])

    def integers(self, below: int, count: int, dtype: str = "int64") -> Tensor:
        """See `oracle.Draw.integers`."""
        return torch.randint(0, below, (1, count), dtype=TORCH_DTYPE[dtype], **self._options)

    def rising(self, below: int, count: int, dtype: str = "int64") -> Tensor:
        """See `oracle.Draw.rising`."""
        drawn: Tensor = self.integers(below, count, dtype).sort().values
        drawn[0, 0] = 0
        return drawn
