"""Durations of the library calls of a plan's compute steps, each without contention."""

from __future__ import annotations

from collections.abc import Sequence

from ficco.dtypes import ELEMENT_BYTES
from ficco.lowering.one_kernel_all_reduce import is_made_before
from ficco.lowering.scattering import RECV
from ficco.machine import Machine
from ficco.passes.copies import joined_copies
from ficco.passes.gemms import runs_of
from ficco.plan import Product, RankPlan, Region, Step
from ficco.tiling import busiest

__all__ = ["Calls"]

# m, n, k, bytes beyond a plain GEMM's. An accumulating GEMM reads c first, and half of that time
# overlaps with the multiplication; writes of float32 overlap fully (36 shapes on an H200,
# 2026-11-21). A term that is not a bias is copied into c before; with a bias it is added to a
# float32 product.
_Shape = tuple[int, int, int, int]


class Calls:
    """Times in ns of the calls of a rank's steps.

    Attributes:
        machine: the machine with the figures.
        dtype: dtype of the plan's operands.
        before_ns: duration of the GEMM before the rank's one launch; 0 without one.
    """

    def __init__(self, machine: Machine, dtype: str) -> None:
        self.machine, self.dtype = machine, dtype
        self.before_ns = 0.0
        self._known: dict[_Shape, float] = {}
        self._ns_an_element = 0.0
        self._item: dict[str, int] = {}
        self._cols: dict[str, int] = {}

    def use(self, entry: RankPlan) -> None:
        """Switch to another rank."""
        self._ns_an_element = self.before_ns = 0.0
        self._item = {buffer.name: ELEMENT_BYTES[buffer.dtype] for buffer in entry.buffers}
        self._cols = {buffer.name: buffer.cols for buffer in entry.buffers}

    def of(self, step: Step) -> list[float]:
        """Return the times of the calls of a step that is not gated."""
        if step.kind == "gemm":
            return self.gemms(step.products, step.transpose_a)
        if step.kind == "local_copy":
            joined = joined_copies(step.reads, step.writes)
            return [self.copied(self._bytes(source)) for source, _ in joined]
        if step.kind == "reduce":
            return [self._stream_ns(self._bytes(*step.reads, *step.writes))]
        return self.bags(step.reads, step.writes)

    def copied(self, size_bytes: int) -> float:
        """Return the duration of a local copy."""
        return self._stream_ns(2 * size_bytes)

    def use_as_one(self, steps: Sequence[Step], gathers: bool, twice: bool) -> None:
        """Treat the rank's GEMMs as parts of one launch, whose products have the same rows.

        They are slices of columns, or whole outputs, in one or several pieces of rows. If there are
        many rows, a library multiplies before the launch, which only moves the product: see
        `is_made_before`.
        """
        gemms = [step for step in steps if step.kind == "gemm"]
        products = [product for step in gemms for product in step.products]
        if not products:
            return
        rows = sum([p.c.rows for p in products if p.b == products[0].b])
        rows = min(rows, max([p.c.row1 for p in products]))  # outputs may share a weight
        area = sum([product.c.area for product in products])
        depth, item = products[0].a.cols, ELEMENT_BYTES[self.dtype]
        shape = (rows, area // rows, depth, self.dtype)
        whole = 1e3 * self.machine.gemm_us(*shape)
        if gathers:
            whole *= self.machine.costs.direct_gemm
        elif is_made_before(rows, twice):  # then the launch moves the rows that others sum
            sent = sum([p.c.area for p in products if p.c.buffer != RECV])
            self.before_ns, whole = whole, self._stream_ns(2 * sent * item)
        else:
            whole = 1e3 * self.machine.sliced_gemm_us(*shape, len(gemms))
        self._ns_an_element = whole / area

    def within(self, step: Step) -> float:
        """Return the duration of a step as a part of the rank's one launch."""
        if step.kind == "gemm":
            return self._ns_an_element * sum([product.c.area for product in step.products])
        return sum(self.of(step))

    def gemms(self, products: Sequence[Product], transpose_a: bool) -> list[float]:
        """Return the times of the calls of products; a run of products is one GEMM."""
        if len(products) == 1:
            return [self._gemm_ns(self._shape(products[0], 1, transpose_a))]
        return [
            self._gemm_ns(self._shape(run[0], len(run), transpose_a))
            for run in runs_of(products, transpose_a)
        ]

    def bags(self, reads: Sequence[Region], writes: Sequence[Region]) -> list[float]:
        """Return the times of the pooling calls, one per table; bags are assumed equally full."""
        times = []
        for number, target in enumerate(writes):
            table, indices, bags = reads[3 * number : 3 * number + 3]
            lookups = indices.cols * bags.cols / max(self._cols[bags.buffer], 1)
            read = lookups * table.cols * self._item[table.buffer]
            times.append(self._stream_ns(read + self._bytes(target)))
        return times

    def parts(self, step: Step) -> list[float]:
        """Return the duration of each part of a gated step, which is one launch.

        The parts of a GEMM share its time in proportion to their operations.
        """
        if step.kind == "bag":
            return [sum(self.bags(part.reads, part.writes)) for part in step.parts]
        rows: dict[tuple[int, int], list[int]] = {}
        flops = []
        for part in step.parts:
            shapes = [self._shape(product, 1, step.transpose_a) for product in part.products]
            for m, n, k, _ in shapes:
                rows.setdefault((n, k), []).append(m)
            flops.append(sum([m * n * k for m, n, k, _ in shapes]))
        whole = sum([self._gated_ns(heights, n, k) for (n, k), heights in rows.items()])
        return [whole * part / max(sum(flops), 1) for part in flops]

    def _gated_ns(self, heights: list[int], n: int, k: int) -> float:
        """Return the duration of a launch over parts of these rows: at least its tiles' rounds."""
        machine, times = self.machine, self.machine.gemm_times(self.dtype)
        whole = self._gemm_ns((sum(heights), n, k, 0)) * machine.costs.gated_gemm
        if times is None or not times.tiled or machine.engine != "cuda" or not (n and k):
            return whole
        item, cols = ELEMENT_BYTES[self.dtype], [n] * len(heights)
        elements = busiest(heights, cols, item, times.units, k)
        return max(whole, 1e3 * times.busy_us(elements, k))

    def _shape(self, product: Product, number: int, transpose_a: bool) -> _Shape:
        a, _, c, accumulate, add = product
        m, n = (c[3] - c[2]) * number, c[5] - c[4]
        k = a[3] - a[2] if transpose_a else a[5] - a[4]
        item = self._item[c[1]]
        once = m * n * item
        again = once // 2 if accumulate else 0
        if len(add) > 1:
            again = m * n * 4 + 2 * once  # read the product and the term, write c
        elif add and add[0][3] - add[0][2] == c[3] - c[2]:  # not a bias
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
        for _, buffer, row0, row1, col0, col1, _ in regions:
            size += (row1 - row0) * (col1 - col0) * item[buffer]
        return size
