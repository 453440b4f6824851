"""Programs of whole GEMMs and collectives, run by PyTorch and torch.distributed.

FICCO_DISABLE=1, `serial` on GPUs, and GPUs without peer access use them. Sums over ranks
are in the input's dtype on GPUs, as in NCCL, and in float32 elsewhere. A bias is added by the GEMM
after a gather, and to this rank's own rows before an all-reduce.

A program becomes a list of steps once (`bind`): calls of PyTorch's functions with values by place,
which native code makes. Nothing is looked up by name in a call, since a call of few rows is limited
by the host.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ficco.core.dtypes import INDEX_DTYPES
from ficco.core.errors import EngineError
from ficco.core.private import torch_collectives
from ficco.core.private.torch_core import contiguous_strides, empty_on_gpu, unsafe_view
from ficco.engine.compute import torch_experts
from ficco.engine.compute.torch import pooled_bags
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.engine.repeated_calls import CallSteps, Step
from ficco.lowering import lower_rank
from ficco.operators.problem import Problem
from ficco.plan import Buffer, Region
from ficco.plan.schedule import Schedule
from ficco.program import Bag, Copy, Entry, Exchange, Experts, Gemm, Launch, Program, Reduce
from ficco.program.passes import compile_plan
from ficco.program.target import LIBRARY
from ficco.runtime import distributed

Tensor = torch.Tensor
Call = Callable[[Sequence[Tensor]], list[Tensor]]


SERIAL = Schedule(name="serial", grain=1, compute="whole", transport="collective")


@functools.lru_cache(maxsize=256)
def program_of(problem: Problem, rank: int) -> Program:
    """Return the program of one rank that overlaps nothing."""
    return compile_plan(lower_rank(problem, SERIAL, rank), LIBRARY)


def run(
    problem: Problem, program: Program, tensors: Mapping[str, Tensor], group: Any
) -> list[Tensor]:
    """Return this rank's outputs.

    Args:
        problem: the problem.
        program: of this rank, for the target "library".
        tensors: this rank's matrices by buffer name, on one device. "like" names no buffer: on CPUs
            results take its dtype.
        group: the ProcessGroup.
    """
    first = next(iter(tensors.values()))
    call = bind(problem, program, list(tensors), group, first.is_cuda)
    with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
        return call(list(tensors.values()))


def bind(
    problem: Problem, program: Program, names: Sequence[str], group: Any, on_gpu: bool
) -> Call:
    """Return a function of this rank's matrices that runs the call and returns the outputs.

    Args:
        problem: the problem.
        program: of this rank, for the target "library".
        names: the buffers of the matrices, in the order in which calls give them; see `run`.
        group: the ProcessGroup.
        on_gpu: whether the matrices are on a GPU, which is then current in calls.

    Raises:
        EngineError: PyTorch has no call for an entry.
    """
    return _Binding(problem, program, names, group, on_gpu).call()


class _Binding:
    """Turns the entries of a program into steps. Every buffer and every other value has a place."""

    def __init__(
        self, problem: Problem, program: Program, names: Sequence[str], group: Any, on_gpu: bool
    ) -> None:
        self.problem, self.group, self.on_gpu = problem, group, on_gpu
        self.program, self.rank, self.names = program, program.rank, list(names)
        self.buffers = {buffer.name: buffer for buffer in self.program.buffers}
        self.steps: list[Step] = []
        self.more: list[Any] = []  # constants, and None where steps store
        self.places = {name: place for place, name in enumerate(names)}
        # Elsewhere than on GPUs partial sums stay float32, and the result is rounded once.
        self.wide = not on_gpu and problem.flow.adds_by_library
        if self.wide:
            self.places = {n: self._widened(n, i) for n, i in self.places.items()}
        self.made: set[str] = set(names)  # buffers that have a tensor when an entry runs
        self.places |= {name: self._value() for name in self.buffers if name not in names}

    def _widened(self, name: str, place: int) -> int:
        """Return the place of a matrix in float32; integers do not change."""
        integers = name in self.buffers and self.buffers[name].dtype in INDEX_DTYPES
        return place if integers else self._result_of(Tensor.float, place)

    def call(self) -> Call:
        """Return the call."""
        for entry in self.program.entries:
            self._add(entry)
        outputs = [b for b in self.program.buffers if b.role == "output"]
        for buffer in outputs:
            self._allocate(buffer)
        results = [self.places[b.name] for b in outputs]
        if self.wide:
            dtype = TORCH_DTYPE[self.problem.dtype]
            results = [self._result_of(operator.methodcaller("to", dtype), y) for y in results]
        return CallSteps(len(self.names), self.more, self.steps, results).run

    def _add(self, entry: Entry) -> None:
        if isinstance(entry, Exchange):
            exchange = {
                "all_gather": self._all_gather, "all_reduce": self._all_reduce,
                "all_to_all": self._all_to_all, "reduce_scatter": self._reduce_scatter,
            }[entry.collective]  # fmt: skip
            for region in entry.reads:  # a rank may have nothing to send
                self._allocate(self.buffers[region.buffer])
            exchange(entry)
            self.made.update(region.buffer for region in entry.writes)
        elif isinstance(entry, Copy):
            self._allocate(self.buffers[entry.target.buffer])
            self._do(Tensor.copy_, self._view(entry.target), self._view(entry.source))
        elif isinstance(entry, Launch) and isinstance(entry.work, Gemm) and entry.work.number == 1:
            self._gemm(entry.work)
        elif isinstance(entry, Launch) and isinstance(entry.work, Reduce):
            self._reduce(entry.work)
        elif isinstance(entry, Launch) and isinstance(entry.work, Bag):
            self._bag(entry.work)
        elif isinstance(entry, Launch) and isinstance(entry.work, Experts):
            self._experts(entry.work)
        else:
            raise EngineError(f"entry {entry.id!r}: PyTorch has no call for it: {entry}")

    # ---- steps and values

    def _value(self, constant: Any = None) -> int:
        """Return the place of a constant, or of a value that a step stores."""
        self.more.append(constant)
        return len(self.names) + len(self.more) - 1

    def _do(self, function: Callable[..., Any], *arguments: int, result: int = -1) -> None:
        """Add a step; `arguments`, `result`: places."""
        self.steps.append(Step(function, arguments, result))

    def _result_of(self, function: Callable[..., Any], *arguments: int) -> int:
        """Add a step; return the place of its result."""
        place = self._value()
        self._do(function, *arguments, result=place)
        return place

    def _collective(self, name: str, public: Callable[..., Any], *arguments: int) -> None:
        """Add a collective of this group; on GPUs without PyTorch's wrapper, if possible."""
        function: Callable[..., Any] = functools.partial(public, group=self.group)
        more: Sequence[Any] = ()
        if self.on_gpu:
            function, more = getattr(torch_collectives, name)(self.group, public)
        places = [self._value(each) for each in more]
        self.steps.append(Step(function, (*arguments, *places), waits=True))

    # ---- regions and buffers

    def _whole(self, region: Region) -> bool:
        buffer = self.buffers[region.buffer]
        return tuple(region[2:6]) == (0, buffer.rows, 0, buffer.cols)

    def _place(self, region: Region) -> int:
        """Return the place of a region that is a whole buffer."""
        if not self._whole(region):
            raise EngineError(
                f"{region} is a part of its buffer, and PyTorch's calls here take all"
            )
        return self.places[region.buffer]

    def _view(self, region: Region) -> int:
        """Return the place of a region, which may be a part of its buffer."""
        place = self.places[region.buffer]
        if self._whole(region):
            return place
        part = slice(region.row0, region.row1), slice(region.col0, region.col1)
        return self._result_of(operator.itemgetter(part), place)

    def _new(self, rows: int, cols: int, result: int) -> None:
        """Add a step that allocates a matrix of the results' dtype and device."""
        if self.on_gpu:
            facts = (rows, cols), contiguous_strides((rows, cols)), TORCH_DTYPE[self.problem.dtype]
            self._do(empty_on_gpu, *map(self._value, facts), result=result)
        else:
            self._do(operator.methodcaller("new_empty", rows, cols), self._like(), result=result)

    def _allocate(self, buffer: Buffer) -> None:
        """Add a step that allocates a buffer, if it has no tensor yet."""
        if buffer.name not in self.made:
            self._new(buffer.rows, buffer.cols, self.places[buffer.name])
            self.made.add(buffer.name)

    def _like(self) -> int:
        """Return the place of a tensor with the dtype and the device of the results."""
        if "like" in self.names:
            return self.places["like"]
        own = {"input", "weight"}
        dtype = self.problem.dtype
        return next(
            self.places[name]
            for name in self.names
            if self.buffers[name].role in own and self.buffers[name].dtype == dtype
        )

    # ---- launches

    def _gemm(self, gemm: Gemm) -> None:
        a, b, c = self._view(gemm.a), self._view(gemm.b), self._place(gemm.c)
        if gemm.transpose_a:
            a = self._result_of(Tensor.t, a)
        if gemm.transpose_b:
            b = self._result_of(Tensor.t, b)
        self.made.add(gemm.c.buffer)
        if gemm.accumulate and not gemm.add:
            self._do(Tensor.addmm_, c, a, b)
        elif not gemm.add:
            self._do(torch.mm, a, b, result=c)
        elif not gemm.accumulate and len(gemm.add) == 1:
            self._do(torch.addmm, self._view(gemm.add[0]), a, b, result=c)
        else:
            raise EngineError(f"PyTorch has no call for {gemm}")

    def _reduce(self, total: Reduce) -> None:
        if not total.reads:
            zeros = operator.methodcaller("new_zeros", (total.target.rows, total.target.cols))
            self._do(zeros, self._like(), result=self._place(total.target))
            self.made.add(total.target.buffer)
            return
        first, *terms = total.reads
        if first != total.target or len(terms) != 1:
            raise EngineError(f"PyTorch has no call for {total}")
        self._do(Tensor.add_, self._view(total.target), self._view(terms[0]))

    def _bag(self, bag: Bag) -> None:
        self._allocate(self.buffers[bag.target.buffer])
        pool = functools.partial(_pool, bag.bags.col0, bag.bags.col1, bag.mean)
        weights = [] if bag.weights is None else [self._view(bag.weights)]
        matrices = self._view(bag.target), self._view(bag.table), self._view(bag.indices)
        self._do(pool, *matrices, self.places[bag.bags.buffer], *weights)

    def _experts(self, work: Experts) -> None:
        for target in work.targets:
            self._allocate(self.buffers[target.buffer])
        weight = [] if work.weight is None else [self._view(work.weight)]
        views = [*map(self._view, work.sources), *map(self._view, work.targets)]
        do = functools.partial(_experts, work, self.rank)
        self._do(do, self.places[work.routing.buffer], *weight, *views)

    # ---- collectives

    def _all_gather(self, entry: Exchange) -> None:
        target, rows = self._place(entry.writes[0]), self.problem.rows
        if any(region.buffer != "x" or not self._whole(region) for region in entry.reads):
            raise EngineError(f"entry {entry.id!r}: PyTorch gathers the whole of x alone")
        source = self.places["x"]
        if not self.on_gpu or len(set(rows)) > 1:
            gather = functools.partial(distributed.gathered, rows=rows, group=self.group)
            self._do(gather, source, result=target)
            return
        self._new(sum(rows), self.problem.k, target)
        own = self._result_of(Tensor.contiguous, source)
        self._collective("all_gather", distributed.all_gather, target, own)

    def _all_reduce(self, entry: Exchange) -> None:
        if entry.reads != entry.writes:
            raise EngineError(f"entry {entry.id!r}: an all-reduce by PyTorch replaces its operand")
        self._collective("all_reduce", dist.all_reduce, self._place(entry.reads[0]))

    def _reduce_scatter(self, entry: Exchange) -> None:
        if not self._are_stacked(entry.reads):
            raise EngineError(f"entry {entry.id!r}: its parts for ranks are not all rows in order")
        source, rows = self.places[entry.reads[0].buffer], [r.rows for r in entry.reads]
        own, cols = rows[self.rank], entry.reads[0].cols
        target = self._place(entry.writes[0]) if entry.writes else self._value()
        if not self.on_gpu:
            self._collective("all_reduce", dist.all_reduce, source)
            begin = sum(rows[: self.rank])
            self._do(operator.itemgetter(slice(begin, begin + own)), source, result=target)
        elif len(set(rows)) == 1:
            self._new(own, cols, target)
            self._collective("reduce_scatter", distributed.reduce_scatter, target, source)
        else:  # with zeros, so that all ranks get equally many
            padded = self._result_of(functools.partial(_padded, rows), source)
            most = self._value()
            self._new(max(rows), cols, most)
            self._collective("reduce_scatter", distributed.reduce_scatter, most, padded)
            self._do(functools.partial(_first_rows, (own, cols)), most, result=target)

    def _all_to_all(self, entry: Exchange) -> None:
        reads, writes = entry.reads, entry.writes
        source, move = self._joined(reads), dist.all_to_all_single
        joined = len({region.buffer for region in writes}) == 1
        if joined and self._are_stacked(writes):
            buffer = self.buffers[writes[0].buffer]
            target = self.places[buffer.name]
            self._new(buffer.rows, buffer.cols, target)
            sizes = [[r.rows for r in writes], [r.rows for r in reads]]
            if self._is_even():
                sizes = [[], []]
            own = self._result_of(Tensor.contiguous, source)
            self._collective("all_to_all", move, target, own, *map(self._value, sizes))
            return
        areas_in, areas_out = [r.area for r in writes], [r.area for r in reads]
        own = self._result_of(operator.methodcaller("reshape", -1), source)
        arrived = self._result_of(operator.methodcaller("new_empty", sum(areas_in)), own)
        sizes = [areas_in, areas_out]
        self._collective("all_to_all", move, arrived, own, *map(self._value, sizes))
        pieces = self._result_of(
            functools.partial(torch.split, split_size_or_sections=areas_in), arrived
        )
        for number, region in enumerate(writes):
            self._store(region, self._result_of(operator.itemgetter(number), pieces))

    def _is_even(self) -> bool:
        """Return whether all ranks send equally many rows to all: a fact that ranks share."""
        blocks = self.problem.operator.blocks
        ranks = range(self.problem.world)
        sent = {b.rows for rank in ranks for b in blocks(self.problem, rank).outgoing}
        return len(sent) == 1

    def _joined(self, regions: Sequence[Region]) -> int:
        """Return the place of the rows of these regions, one below the other."""
        if self._are_stacked(regions):
            return self.places[regions[0].buffer]
        return self._result_of(_concatenated, *map(self._view, regions))

    def _store(self, region: Region, piece: int) -> None:
        """Add steps that store a piece that has arrived."""
        shaped = operator.methodcaller("view", region.rows, region.cols)
        if self._whole(region):
            self._do(shaped, piece, result=self.places[region.buffer])
            self.made.add(region.buffer)
            return
        self._allocate(self.buffers[region.buffer])
        self._do(Tensor.copy_, self._view(region), self._result_of(shaped, piece))

    def _are_stacked(self, regions: Sequence[Region]) -> bool:
        """Return whether the regions are all rows of one buffer, in order."""
        buffer, row = self.buffers[regions[0].buffer], 0
        for region in regions:
            if (region.buffer, *region[2:6]) != (buffer.name, row, region.row1, 0, buffer.cols):
                return False
            row = region.row1
        return row == buffer.rows


def _concatenated(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _pool(
    begin: int, end: int, mean: bool,
    into: Tensor, table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Store the sums of bags `begin` to `end` of a table."""
    factors = None if weights is None else weights[0]
    into.copy_(pooled_bags(table, indices[0], offsets[0], factors, mean)[begin:end])


def _experts(work: Experts, rank: int, routing: Tensor, *matrices: Tensor) -> None:
    """Do the work of a rank's experts; matrices: the weight, if any, the sources and targets."""
    weight, rest = (None, matrices) if work.weight is None else (matrices[0], matrices[1:])
    count = len(work.sources)
    torch_experts.perform(work, rank, routing[0], weight, rest[:count], rest[count:])


def _padded(rows: list[int], whole: Tensor) -> Tensor:
    """Return the rows for each rank, with zeros behind them to the length of the longest."""
    padded = whole.new_zeros((len(rows), max(rows), whole.shape[1]))
    for slot, piece in zip(padded, torch.split(whole, rows), strict=True):
        slot[: len(piece)].copy_(piece)
    return padded.view(-1, whole.shape[1])


def _first_rows(shape: tuple[int, int], matrix: Tensor) -> Tensor:
    """Return a matrix's first rows in its memory, and not as a view for autograd."""
    first: Tensor = unsafe_view(matrix[: shape[0]], shape)
    return first
