"""Programs of whole GEMMs and collectives, run by PyTorch and torch.distributed.

FICCO_DISABLE=1, `serial` on GPUs, and GPUs without peer access use them. Sums over ranks
are in the input's dtype on GPUs, as in NCCL, and in float32 elsewhere. A bias is added by the GEMM
after a gather, and to this rank's own rows before an all-reduce.

A program becomes a list of functions once (`bind`). Each function reads and sets tensors in the
list of a call: one place per buffer. Nothing is looked up by name in a call, since a call of few
rows is limited by the host. PyTorch reads sizes faster as arguments of their own than as a tuple.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ficco.compute.torch_bags import pooled_bags
from ficco.compute.torch_dtypes import TORCH_DTYPE
from ficco.errors import EngineError
from ficco.lowering import lower_rank
from ficco.passes import compile_plan
from ficco.plan import Buffer, Region
from ficco.private import torch_collectives
from ficco.private.torch_core import contiguous_strides, empty_on_gpu, unsafe_view
from ficco.problem import Problem
from ficco.program import Bag, Copy, Entry, Exchange, Gemm, Launch, Program, Reduce
from ficco.runtime import distributed
from ficco.schedule import Schedule
from ficco.target import LIBRARY

__all__ = ["bind", "program_of", "run"]

Tensor = torch.Tensor
Tensors = list[Any]  # of a call, by place; None where nothing was stored yet
Step = Callable[[Tensors], None]
Call = Callable[[Sequence[Tensor]], list[Tensor]]


@functools.lru_cache(maxsize=256)
def program_of(problem: Problem, rank: int) -> Program:
    """Return the program of one rank that overlaps nothing."""
    serial = Schedule(name="serial", grain=1, compute="whole", transport="collective")
    return compile_plan(lower_rank(problem, serial, rank), LIBRARY)


def run(
    problem: Problem, program: Program, tensors: Mapping[str, Tensor], group: Any
) -> list[Tensor]:
    """Return this rank's outputs.

    Args:
        problem: the problem.
        program: of this rank, for the target "library".
        tensors: this rank's matrices by buffer name. "like" names no buffer: results take its dtype
            and its device.
        group: the ProcessGroup.
    """
    first = next(iter(tensors.values()))
    call = bind(problem, program, list(tensors), group, first.is_cuda)
    if not first.is_cuda:
        return call(list(tensors.values()))
    with torch.cuda.device(first.device):
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
    """Turns the entries of a program into functions of a call's tensors."""

    def __init__(
        self, problem: Problem, program: Program, names: Sequence[str], group: Any, on_gpu: bool
    ) -> None:
        self.problem, self.group, self.on_gpu = problem, group, on_gpu
        self.program, self.rank, self.names = program, program.rank, list(names)
        self.buffers = {buffer.name: buffer for buffer in self.program.buffers}
        others = [name for name in self.buffers if name not in names]
        self.places = {name: place for place, name in enumerate([*names, *others])}
        self.made: set[str] = set(names)  # buffers that have a tensor when an entry runs
        # Elsewhere than on GPUs partial sums stay float32, and the result is rounded once.
        self.wide = not on_gpu and problem.flow.sums

    def call(self) -> Call:
        """Return the call."""
        steps = [step for entry in self.program.entries for step in self._steps(entry)]
        outputs = [b for b in self.program.buffers if b.role == "output"]
        steps += [self._empty(b) for b in outputs if b.name not in self.made]
        results = [self.places[b.name] for b in outputs]
        unset = [None] * (len(self.places) - len(self.names))

        def call(tensors: Sequence[Tensor]) -> list[Tensor]:
            every: Tensors = [*tensors, *unset]
            for step in steps:
                step(every)
            return [every[place] for place in results]

        def wide_call(tensors: Sequence[Tensor]) -> list[Tensor]:
            dtype = tensors[0].dtype
            return [y.to(dtype) for y in call([tensor.float() for tensor in tensors])]

        return wide_call if self.wide else call

    def _steps(self, entry: Entry) -> list[Step]:
        if isinstance(entry, Exchange):
            exchange = {
                "all_gather": self._all_gather, "all_reduce": self._all_reduce,
                "all_to_all": self._all_to_all, "reduce_scatter": self._reduce_scatter,
            }[entry.collective]  # fmt: skip
            unmade = {r.buffer for r in entry.reads} - self.made  # a rank has nothing to send
            steps = [self._empty(self.buffers[name]) for name in unmade]
            self.made.update(region.buffer for region in entry.writes)
            return [*steps, exchange(entry)]
        if isinstance(entry, Copy):
            return [*self._allocated(entry.target), self._copy(entry.source, entry.target)]
        if isinstance(entry, Launch):
            if isinstance(entry.work, Gemm) and entry.work.number == 1:
                return [self._gemm(entry.work)]
            if isinstance(entry.work, Reduce):
                return [self._reduce(entry.work)]
            if isinstance(entry.work, Bag):
                return [*self._allocated(entry.work.target), self._bag(entry.work)]
        raise EngineError(f"entry {entry.id!r}: PyTorch has no call for it: {entry}")

    # ---- regions

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

    def _view(self, region: Region) -> Callable[[Tensors], Tensor]:
        place = self.places[region.buffer]
        if self._whole(region):
            return operator.itemgetter(place)
        rows, cols = slice(region.row0, region.row1), slice(region.col0, region.col1)
        return lambda every: every[place][rows, cols]

    def _empty(self, buffer: Buffer) -> Step:
        """Return a step that allocates a buffer like the first matrix of the call."""
        place, like = self.places[buffer.name], self._like()
        shape = buffer.rows, buffer.cols

        def step(every: Tensors) -> None:
            every[place] = every[like].new_empty(*shape)

        self.made.add(buffer.name)
        return step

    def _new(self, shape: tuple[int, int]) -> Callable[[], Tensor]:
        """Return a function that allocates a matrix of the call's dtype on the current GPU."""
        dtype = TORCH_DTYPE[self.problem.dtype]
        return functools.partial(empty_on_gpu, shape, contiguous_strides(shape), dtype)

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

    def _allocated(self, target: Region) -> list[Step]:
        """Return the step that allocates a buffer that is stored in parts, before the first."""
        made = target.buffer in self.made
        return [] if made else [self._empty(self.buffers[target.buffer])]

    # ---- launches and copies

    def _gemm(self, gemm: Gemm) -> Step:
        a, b, c = self._view(gemm.a), self._view(gemm.b), self._place(gemm.c)
        if gemm.transpose_a:
            a = _transposed(a)
        if gemm.transpose_b:
            b = _transposed(b)
        self.made.add(gemm.c.buffer)
        mm, addmm = torch.mm, torch.addmm
        if gemm.accumulate and not gemm.add:

            def step(every: Tensors) -> None:
                every[c].addmm_(a(every), b(every))

        elif not gemm.add:

            def step(every: Tensors) -> None:
                every[c] = mm(a(every), b(every))

        elif not gemm.accumulate and len(gemm.add) == 1:
            term = self._view(gemm.add[0])

            def step(every: Tensors) -> None:
                every[c] = addmm(term(every), a(every), b(every))

        else:
            raise EngineError(f"PyTorch has no call for {gemm}")
        return step

    def _reduce(self, total: Reduce) -> Step:
        rows, cols, target = total.target.rows, total.target.cols, self._view(total.target)
        if not total.reads:
            place, like = self._place(total.target), self._like()
            self.made.add(total.target.buffer)

            def zeros(every: Tensors) -> None:
                every[place] = every[like].new_zeros((rows, cols))

            return zeros
        first, *terms = total.reads
        if first != total.target or len(terms) != 1:
            raise EngineError(f"PyTorch has no call for {total}")
        term = self._view(terms[0])

        def add(every: Tensors) -> None:
            target(every).add_(term(every))

        return add

    def _bag(self, bag: Bag) -> Step:
        table, indices, into = (
            self._view(bag.table),
            self._view(bag.indices),
            self._view(bag.target),
        )
        weights = None if bag.weights is None else self._view(bag.weights)
        offsets, begin, end = self.places[bag.bags.buffer], bag.bags.col0, bag.bags.col1
        mean = bag.mean

        def step(every: Tensors) -> None:
            factors = None if weights is None else weights(every)[0]
            sums = pooled_bags(table(every), indices(every)[0], every[offsets][0], factors, mean)
            into(every).copy_(sums[begin:end])

        return step

    def _copy(self, source: Region, target: Region) -> Step:
        read, write = self._view(source), self._view(target)

        def step(every: Tensors) -> None:
            write(every).copy_(read(every))

        return step

    # ---- collectives

    def _bound(self, name: str, public: Any) -> Any:
        """Return a collective of this group; on GPUs without PyTorch's wrapper, if possible."""
        if self.on_gpu:
            return getattr(torch_collectives, name)(self.group, public)
        return functools.partial(public, group=self.group)

    def _all_gather(self, entry: Exchange) -> Step:
        target, rows, group = self._place(entry.writes[0]), self.problem.rows, self.group
        if any(region.buffer != "x" or not self._whole(region) for region in entry.reads):
            raise EngineError(f"entry {entry.id!r}: PyTorch gathers the whole of x alone")
        source = self.places["x"]
        if not self.on_gpu or len(set(rows)) > 1:

            def step(every: Tensors) -> None:
                every[target] = distributed.gathered(every[source], rows, group)

            return step
        gather = self._bound("all_gather", distributed.all_gather)
        new = self._new((sum(rows), self.problem.k))

        def even_step(every: Tensors) -> None:
            every[target] = whole = new()
            gather(whole, every[source].contiguous())

        return even_step

    def _all_reduce(self, entry: Exchange) -> Step:
        if entry.reads != entry.writes:
            raise EngineError(f"entry {entry.id!r}: an all-reduce by PyTorch replaces its operand")
        place, add_up = self._place(entry.reads[0]), self._bound("all_reduce", dist.all_reduce)

        def step(every: Tensors) -> None:
            add_up(every[place])

        return step

    def _reduce_scatter(self, entry: Exchange) -> Step:
        if not self._are_stacked(entry.reads):
            raise EngineError(f"entry {entry.id!r}: its parts for ranks are not all rows in order")
        source, rows = self.places[entry.reads[0].buffer], [r.rows for r in entry.reads]
        shape = rows[self.rank], entry.reads[0].cols
        target = self._place(entry.writes[0]) if entry.writes else len(self.places)
        if not self.on_gpu:
            begin, group = sum(rows[: self.rank]), self.group

            def slow_step(every: Tensors) -> None:
                dist.all_reduce(every[source], group=group)
                if target < len(every):
                    every[target] = every[source][begin : begin + shape[0]]

            return slow_step
        scatter = self._bound("reduce_scatter", distributed.reduce_scatter)
        most = max(rows)
        if len(set(rows)) == 1:
            new = self._new(shape)

            def step(every: Tensors) -> None:
                every[target] = own = new()
                scatter(own, every[source])

            return step

        def uneven_step(every: Tensors) -> None:  # with zeros, so that all ranks get equally many
            pieces = torch.split(every[source], rows)
            padded = pieces[0].new_zeros((len(rows), most, shape[1]))
            for slot, piece in zip(padded, pieces, strict=True):
                slot[: len(piece)].copy_(piece)
            del pieces
            every[source] = None  # the pieces are copied
            own = padded.new_empty((most, shape[1]))
            scatter(own, padded.view(-1, shape[1]))
            if target < len(every):
                every[target] = unsafe_view(own[: shape[0]], shape)  # no view for autograd

        return uneven_step

    def _all_to_all(self, entry: Exchange) -> Step:
        reads, writes = entry.reads, entry.writes
        source, move = self._joined(reads), self._bound("all_to_all", dist.all_to_all_single)
        joined = len({region.buffer for region in writes}) == 1
        if joined and self._are_stacked(writes):
            target, buffer = self.places[writes[0].buffer], self.buffers[writes[0].buffer]
            shape = buffer.rows, buffer.cols
            sizes_in, sizes_out = [r.rows for r in writes], [r.rows for r in reads]
            if self._is_even():
                sizes_in, sizes_out = [], []

            new = self._new(shape)

            def step_on_gpu(every: Tensors) -> None:
                every[target] = arrived = new()
                move(arrived, source(every).contiguous(), sizes_in, sizes_out)

            def step(every: Tensors) -> None:
                own = source(every)
                every[target] = arrived = own.new_empty(*shape)
                move(arrived, own.contiguous(), sizes_in, sizes_out)

            return step_on_gpu if self.on_gpu else step
        areas_in, areas_out = [r.area for r in writes], [r.area for r in reads]
        stores = [self._store(region) for region in writes]

        def step_by_pieces(every: Tensors) -> None:
            own = source(every).reshape(-1)
            arrived = own.new_empty(sum(areas_in))
            move(arrived, own, areas_in, areas_out)
            pieces = torch.split(arrived, areas_in)
            for piece, store in zip(pieces, stores, strict=True):
                store(every, piece)

        return step_by_pieces

    def _is_even(self) -> bool:
        """Return whether all ranks send equally many rows to all: a fact that ranks share."""
        blocks = self.problem.operator.blocks
        ranks = range(self.problem.world)
        sent = {b.rows for rank in ranks for b in blocks(self.problem, rank).outgoing}
        return len(sent) == 1

    def _joined(self, regions: Sequence[Region]) -> Callable[[Tensors], Tensor]:
        """Return a function that returns the rows of these regions, one below the other."""
        if self._are_stacked(regions):
            place = self.places[regions[0].buffer]
            return lambda every: every[place]
        views = [self._view(region) for region in regions]
        return lambda every: torch.cat([view(every) for view in views])

    def _store(self, region: Region) -> Callable[[Tensors, Tensor], None]:
        """Return a function that stores a piece that has arrived."""
        place, shape, view = (
            self.places[region.buffer],
            (region.rows, region.cols),
            self._view(region),
        )
        buffer, like = self.buffers[region.buffer], self._like()
        if self._whole(region):

            def keep(every: Tensors, piece: Tensor) -> None:
                every[place] = piece.view(shape)

            return keep

        def copy(every: Tensors, piece: Tensor) -> None:
            if every[place] is None:
                every[place] = every[like].new_empty((buffer.rows, buffer.cols))
            view(every).copy_(piece.view(shape))

        return copy

    def _are_stacked(self, regions: Sequence[Region]) -> bool:
        """Return whether the regions are all rows of one buffer, in order."""
        buffer, row = self.buffers[regions[0].buffer], 0
        for region in regions:
            if (region.buffer, *region[2:6]) != (buffer.name, row, region.row1, 0, buffer.cols):
                return False
            row = region.row1
        return row == buffer.rows


def _transposed(view: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensor]:
    return lambda every: view(every).t()
