"""Durations of the launches of a program, each without contention."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.core.dtypes import ELEMENT_BYTES
from ficco.core.machine import Machine
from ficco.lowering.scattering import RECV
from ficco.measure.library_sums import bytes_of_sums
from ficco.measure.tile_rounds import with_rounds
from ficco.plan import Buffer, Region, Step, bags_of
from ficco.plan.tables import GatherTable, OneKernelTable, PullTable, SendTable
from ficco.program import Bag, Experts, Gated, Gemm, OneKernel, Pool, Reduce, Sum, Work
from ficco.program.passes.copies import joined_copies

# m, n, k, bytes beyond a plain GEMM's. An accumulating GEMM reads c first, and half of that time
# overlaps with the multiplication; writes of float32 overlap fully (36 shapes on an H200,
# 2026-11-21). A term that is not a bias is copied into c before; with a bias it is added to a
# float32 product.
_Shape = tuple[int, int, int, int]


class Calls:
    """Times in ns of the launches of a rank's program.

    Attributes:
        machine: the machine with the figures.
        dtype: dtype of the problem's operands.
    """

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine, self.dtype = machine, dtype
        self._known: dict[_Shape, float] = {}
        self._ns_an_element = 0.0  # of the products in one launch
        self._made: frozenset[str] = frozenset()  # buffers of products made before it
        self._pulls = False  # whether the launch reads peers' products
        self._item: dict[str, int] = {}
        self._cols: dict[str, int] = {}

    def use(self, buffers: Sequence[Buffer]) -> None:
        """Switch to another rank's buffers."""
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in buffers}
        self._cols = {buffer.name: buffer.cols for buffer in buffers}

    def of(self, work: Work) -> float:
        """Return the time of a launch that waits for no signals."""
        if isinstance(work, Gemm):
            return self._gemm_ns(self._shape(work))
        if isinstance(work, Bag):
            return self._bags_ns([work])
        if isinstance(work, Pool):
            return self._bags_ns(work.bags)
        if isinstance(work, Experts):
            return self._experts_ns(work)
        if isinstance(work, Sum):
            bias = () if work.bias is None else (work.bias,)
            read = self._bytes(work.slots) * work.number + self._bytes(work.own, *bias)
            return self._stream_ns(read + self._bytes(work.target))
        assert isinstance(work, Reduce)
        return self._stream_ns(self._bytes(*work.reads, work.target))

    def copied(self, size_bytes: int) -> float:
        """Return the duration of a local copy."""
        return self._stream_ns(2 * size_bytes)

    # ---- one launch that is a whole call

    def use_as_one(self, work: OneKernel, steps: Sequence[Step]) -> None:
        """Treat GEMMs, or copies of products that a library has made, as parts of one launch.

        GEMMs are slices of columns, or whole outputs, in one or several pieces of rows. If the
        products are made before, the launch moves only the rows that other ranks sum.

        Args:
            work: of the launch.
            steps: what it does, by `steps_of_one_kernel`.
        """
        self._ns_an_element, self._made = 0.0, frozenset[str]()
        self._pulls = isinstance(work.table, PullTable)
        if isinstance(work.table, OneKernelTable) and work.table.made:
            self._made = frozenset(names.y for names in work.table.outputs)
            taken = [box for step in steps if self._takes(step) for box in step.writes]
            sent = sum([box.area for box in taken if box.buffer != RECV])
            moved_ns = self._stream_ns(2 * sent * ELEMENT_BYTES[self.dtype])
            self._ns_an_element = moved_ns / max(sum([box.area for box in taken]), 1)
            return
        gemms = [step for step in steps if step.kind == "gemm"]
        products = [product for step in gemms for product in step.products]
        if not products:
            return
        rows = sum([p.c.rows for p in products if p.b == products[0].b])
        rows = min(rows, max([p.c.row1 for p in products]))  # outputs may share a weight
        area = sum([product.c.area for product in products])
        shape = (rows, area // rows, products[0].a.cols, self.dtype)
        if isinstance(work.table, SendTable):
            costs = self.machine.costs
            whole_us = self.machine.gemm_us(*shape) * (costs.sending_gemm or costs.gated_gemm)
            heights, widths = zip(*[(p.c.rows, p.c.cols) for p in products], strict=True)
            whole_us, _ = with_rounds(
                self.machine, self.dtype, heights, widths, shape[2], whole_us, 0.0, split=False
            )
            whole = 1e3 * whole_us
        elif isinstance(work.table, GatherTable):
            whole = 1e3 * self.machine.gemm_us(*shape) * self.machine.costs.direct_gemm
        else:
            whole = 1e3 * self.machine.sliced_gemm_us(*shape, len(gemms))
        self._ns_an_element = whole / area

    def within(self, step: Step) -> float:
        """Return the duration of a step as a part of the rank's one launch.

        If sums read peers' products, all but the reads takes place while data are on the link.
        """
        if self._pulls:
            return 0.0
        if step.kind == "gemm":
            return self._ns_an_element * sum([product.c.area for product in step.products])
        if step.kind == "bag":
            return sum([self._bags_ns([bag]) for bag in bags_of(step)])
        if self._takes(step):
            return self._ns_an_element * sum([box.area for box in step.writes])
        if step.kind == "local_copy":
            boxes = joined_copies(step.reads, step.writes)
            return sum([self.copied(self._bytes(source)) for source, _ in boxes])
        return self._stream_ns(self._bytes(*step.reads, *step.writes))

    def _takes(self, step: Step) -> bool:
        """Return whether a step takes products that a library has made."""
        return step.kind == "local_copy" and step.reads[0].buffer in self._made

    # ---- gated launches

    def parts(self, work: Gated) -> list[float]:
        """Return the duration of each part of a gated launch.

        The parts share its time in proportion to their operations. If parts wait, the last one
        takes the time of its own tiles, when all others are complete.
        """
        widths = [work.n - p.col if p.cols is None else p.cols for p in work.parts]
        times = [0.0] * len(widths)
        for cols in set(widths):
            places = [place for place, width in enumerate(widths) if width == cols]
            rows = [work.parts[place].rows for place in places]
            waits = any(work.parts[place].word >= 0 for place in places)
            whole, last = self._gated_ns(rows, cols, work.k)
            shares = [whole * height / max(sum(rows), 1) for height in rows]
            if waits and shares[-1] < last:
                others = (whole - last) / (whole - shares[-1])
                shares = [*(others * share for share in shares[:-1]), last]
            for place, share in zip(places, shares, strict=True):
                times[place] = share
        return times

    def _gated_ns(self, heights: list[int], n: int, k: int) -> tuple[float, float]:
        """Return the duration of a launch over parts of these rows, and of its last part alone.

        These are at least the rounds of their tiles.
        """
        rows = sum(heights)
        whole_us = self._gemm_ns((rows, n, k, 0)) * self.machine.costs.gated_gemm / 1e3
        last_us = whole_us * heights[-1] / max(rows, 1)
        widths = [n] * len(heights)
        whole, last = with_rounds(self.machine, self.dtype, heights, widths, k, whole_us, last_us)
        return 1e3 * whole, 1e3 * last

    # ---- experts

    def _experts_ns(self, work: Experts) -> float:
        """Return the time of a launch if the tokens of all ranks choose all experts equally often.

        It reads all weights of the rank at least once. If rows return to peers, they take the link
        meanwhile.
        """
        sizes, world = work.sizes, len(work.sizes.rows)
        if work.weight is None:
            (source,) = work.sources
            if work.adds_own:  # by PyTorch
                return self._stream_ns(
                    bytes_of_sums(source.rows, source.cols, self._item[source.buffer])
                )
            return self._stream_ns(self._bytes(source, *work.targets))
        tokens = sum(sizes.rows)
        if work.mode == "gather":
            tokens = sum([sizes.rows[target.of] for target in work.targets])
        rows = max(-(-tokens * sizes.topk // world), 1)
        n, k = work.targets[0].cols, work.sources[0].cols
        made = 1e3 * self.machine.gemm_us(rows, n, k, self.dtype)
        item = self._item[work.weight.buffer]
        read = self._stream_ns(self._bytes(work.weight) + rows * (n + k) * item)
        away = [target for target in work.targets if target.rank != work.routing.rank]
        link = self.machine.link
        sent = sum([target.rows for target in away]) // world * n * item
        links = max(len(away), 1) if link.per == "pair" else 1
        return max(made, read, sent / (links * link.peak_gbps))

    # ---- library calls

    def _bags_ns(self, bags: Sequence[Bag]) -> float:
        """Return the time of pooling bags, which are assumed to be equally full."""
        size = 0.0
        for bag in bags:
            lookups = bag.indices.cols * bag.bags.cols / max(self._cols[bag.bags.buffer], 1)
            size += lookups * bag.table.cols * self._item[bag.table.buffer]
            size += self._bytes(bag.target)
        return self._stream_ns(size)

    def _shape(self, work: Gemm) -> _Shape:
        a, c, add = work.a, work.c, work.add
        m, n = c.rows * work.number, c.cols
        k = a.rows if work.transpose_a else a.cols
        once = m * n * self._item[c.buffer]
        again = once // 2 if work.accumulate else 0
        if len(add) > 1:
            again = m * n * 4 + 2 * once  # read the product and the term, write c
        elif add and add[0].rows == c.rows:  # not a bias
            again += 2 * once + once // 2
        return m, n, k, again

    def _gemm_ns(self, shape: _Shape) -> float:
        ns = self._known.get(shape)
        if ns is None:
            m, n, k, again = shape
            ns = 1e3 * self.machine.gemm_us(m, n, k, self.dtype) + self._stream_ns(again)
            self._known[shape] = ns
        return ns

    def _stream_ns(self, size_bytes: float) -> float:
        return 1e3 * self.machine.stream_us(size_bytes)

    def _bytes(self, *regions: Region) -> int:
        size, item = 0, self._item
        for _, buffer, row0, row1, col0, col1, *_ in regions:
            size += (row1 - row0) * (col1 - col0) * item[buffer]
        return size
