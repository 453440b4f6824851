"""Tables of ficco's own kernels: what one launch does, as numbers. Neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# 32 bits of vacant mailbox elements, which no rank sends. As two float16 or bfloat16 they are -0,
# as float32 -4.6e-41. Both values are sent as 0.
VACANT = 0x80008000

COUNTS = 3  # int32 words with a rank's call counts of its mailbox
THREADS = 32  # of a warp
GATES = 4  # int32 words of the handshake; see `one_kernel_handshake`
MOST_TABLES = 32  # tables of a launch that pools; it takes their addresses as parameters
MOVES = 4  # blocks of rows that a program copies out of the window; see `one_kernel_pool`


class Arrived(NamedTuple):
    """A peer's term of a part, in the peer's dtype, with the part's rows and columns.

    Attributes:
        row: its first row in `recv`. Its columns are the part's.
        word: index of the word to wait for, or -1.
    """

    row: int
    word: int = -1


class GatedPart(NamedTuple):
    """Rows of the product that become available, or are needed, at one moment.

    Attributes:
        source: the matrix of its rows of a, "own" or "window".
        a_row: its first row there.
        c_row: its first row in its target.
        rows: number of rows, 0 or more.
        word: index of the word to wait for, or -1; own rows never wait.
        signal: index of the word that is raised when the part is stored, or -1. A part without
            elements raises none.
        target: "c" or "partial".
        col: its first column, in b and in its target.
        cols: number of columns; None: all from the first.
        terms: the terms of its sum, in the order of ranks, with None in place of the own product.
            Empty if it is not summed.
    """

    source: str
    a_row: int
    c_row: int
    rows: int
    word: int = -1
    signal: int = -1
    target: str = "c"
    col: int = 0
    cols: int | None = None
    terms: tuple[Arrived | None, ...] = ()


class WindowRelease(NamedTuple):
    """The release of the window by the last program of a launch, when all have ended.

    Attributes:
        cleared: indices of own words that are set to 0.
        raised: index of the word that is then raised at every peer, to 1.
        peers: ranks of the peers; if empty, nothing is done.
        homes: [copy][rank], device addresses of the ranks' words.
    """

    cleared: tuple[int, ...]
    raised: int
    peers: tuple[int, ...]
    homes: Sequence[Sequence[int]] = ()


def peers_of(rank: int, world: int) -> list[int]:
    """Return the other ranks in the order in which a rank serves them: the next one first.

    So no two ranks begin with the same peer.
    """
    return [(rank + turn) % world for turn in range(1, world)]


class OutputNames(NamedTuple):
    """The names of the matrices of a product of x and a weight of this rank.

    Attributes:
        y, w: names of the result and of the weight.
        bias: name of the bias, or "" without one.
        n: columns, 1 or more in a gather.
        turned: whether the weight is stored transposed.
    """

    y: str
    w: str
    bias: str
    n: int
    turned: bool


class OneKernelChunk(NamedTuple):
    """Columns [begin, end) of the product.

    Attributes:
        begin, end: columns.
        partial: index among a writer's `data` signals of the signal after its products.
        total: the same for the signal after its sums; unused if no sums are passed on.
    """

    begin: int
    end: int
    partial: int
    total: int


class OneKernelTable(NamedTuple):
    """One rank's part of a matmul_all_reduce, as one launch.

    Attributes:
        rank, world: of the plan.
        m, n, k: rows and columns of y, and this rank's depth.
        dtype: dtype of all operands.
        bias: whether there is a bias.
        twice: whether the owners of sums pass them on.
        made: whether y holds the products when the launch begins; else the kernel multiplies.
        chunks: in the order of their computation; none is empty.
        rows: rows of y that each rank sums if `twice`; else empty.
        bias_row, bias_rows: rows of this rank's products that get the bias; if `twice` none, as
            the bias is added to the sums.
        recv: byte offset of the products in a copy of the mailbox.
        kept: byte offset of the sums, if `twice`.
        outputs: the single output.
    """

    rank: int
    world: int
    m: int
    n: int
    k: int
    dtype: str
    bias: bool
    twice: bool
    made: bool
    chunks: tuple[OneKernelChunk, ...]
    rows: tuple[int, ...]
    bias_row: int
    bias_rows: int
    recv: int
    kept: int
    outputs: tuple[OutputNames]

    @property
    def own_rows(self) -> int:
        """Number of rows of y that this rank sums."""
        return self.rows[self.rank] if self.twice else self.m

    @property
    def own_row(self) -> int:
        """The first of them, or 0 without rows."""
        return sum(self.rows[: self.rank]) if self.own_rows else 0

    @property
    def slot_rows(self) -> int:
        """Rows of the mailbox for one rank's products."""
        return max(self.rows) if self.twice else self.m

    @property
    def owners(self) -> tuple[int, ...]:
        """Other ranks that pass sums on."""
        return self.targets if self.twice else ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Other ranks that get products."""
        peers = peers_of(self.rank, self.world)
        return tuple([peer for peer in peers if not self.twice or self.rows[peer]])

    @property
    def rows_to(self) -> tuple[tuple[int, int], ...]:
        """Targets (rank, row of its mailbox of products) of the rows.

        For each row once, or, if not `twice`, for all rows and every rank, the own one last.
        """
        ranks = range(self.world) if self.twice else (*self.targets, self.rank)
        slot = self.rank * self.slot_rows
        heights = self.rows if self.twice else (self.m,) * self.world
        return tuple([(rank, slot + row) for rank in ranks for row in range(heights[rank])])


class GatherTable(NamedTuple):
    """One rank's part of an all_gather_matmul, as one launch.

    Attributes:
        rank, world: of the plan.
        m, k: rows of all shards, and the depth.
        dtype: dtype of all operands.
        own_row, own_rows: rows of the own shard among all rows.
        width: columns of a slice of the own shard, if it has rows; the last one may be narrower.
        slices: number of slices of a shard; each has a signal, in their order.
        sources: other ranks that have rows.
        gathered: byte offset of the window of all rows in a window copy.
        outputs: the products that have columns.
        kept: name of the output that is the gathered x, or "" without one.
    """

    rank: int
    world: int
    m: int
    k: int
    dtype: str
    own_row: int
    own_rows: int
    width: int
    slices: int
    sources: tuple[int, ...]
    gathered: int
    outputs: tuple[OutputNames, ...]
    kept: str


class RowsTaken(NamedTuple):
    """Rows [row, row + rows) of a rank's products, and their first row in the result."""

    source: int
    row: int
    top: int
    rows: int


class PullTable(NamedTuple):
    """One rank's part of a call whose kernel reads products where a GEMM stored them.

    Attributes:
        rank, world: of the plan.
        m, n, k: rows and columns of y, and this rank's depth.
        made: rows of this rank's products.
        dtype: dtype of all operands.
        bias: whether sums get a bias; with shared sums only if `twice`.
        moves: whether rows of products are copied into y; else those of all ranks are added up.
        taken: the rows of each rank that are added up or moved, in the order of ranks, all 0
            without rows; empty if `twice`.
        twice: whether each rank sums its rows, and reads the other sums.
        rows: rows that each rank sums if `twice`; else empty.
        chunks: chunks of a rank's rows, each with a signal, if `twice`; else 1.
        products: byte offset of the products in a window copy.
        sums: byte offset of the sums, if `twice`.
        outputs: the single output.
    """

    rank: int
    world: int
    m: int
    n: int
    k: int
    dtype: str
    made: int
    bias: bool
    moves: bool
    taken: tuple[RowsTaken, ...]
    twice: bool
    rows: tuple[int, ...]
    chunks: int
    products: int
    sums: int
    outputs: tuple[OutputNames]


class BagsSent(NamedTuple):
    """Bags [bag, bag + rows) of the batch, which are pooled for a peer."""

    peer: int
    bag: int
    rows: int


class BagsReceived(NamedTuple):
    """Columns [left, left + width) of the result, which a rank's tables fill."""

    source: int
    left: int
    width: int


class PoolTable(NamedTuple):
    """One rank's part of an embedding_all_to_all, as one launch.

    Its buffers are table0, indices0, offsets0, weights0 (if weighted), table1, ... and y0.

    Attributes:
        rank, world: of the plan.
        dtype: dtype of all tables, and of the result.
        modes: how each own table is pooled, see `Problem.modes`.
        dim: columns of every table; without tables, a divisor of all columns from peers.
        left: the first column of the own tables in the result.
        bag, rows: the first bag of the batch that this rank receives, and their number. `bag` is 0
            if the rank has no tables or receives no bags.
        sent: bags for peers, in the order in which a chunk of each is sent.
        received: columns from peers, in the order in which a chunk of each is copied.
        chunks: chunks of a rank's bags; each has a signal.
        recv: byte offset of the receive buffer in a window copy. Its columns are those of y0.
    """

    rank: int
    world: int
    dtype: str
    modes: tuple[str, ...]
    dim: int
    left: int
    bag: int
    rows: int
    sent: tuple[BagsSent, ...]
    received: tuple[BagsReceived, ...]
    chunks: int
    recv: int

    @property
    def tables(self) -> int:
        """Number of own tables."""
        return len(self.modes)

    @property
    def outputs(self) -> tuple[OutputNames, ...]:
        """Products of the call: none."""
        return ()


FINISHES = ("multiply", "move", "sum", "share", "keep")  # of `SendTable.finish`


class RowsSent(NamedTuple):
    """Rows [row, row + rows) of x, or of its product, which go to a peer's window from `top` on."""

    peer: int
    row: int
    top: int
    rows: int


class RowsReceived(NamedTuple):
    """Rows [top, top + rows) of the window, which a peer fills."""

    source: int
    top: int
    rows: int


class SendTable(NamedTuple):
    """One rank's part of a call whose kernel stores at peers what it reads or multiplies.

    Attributes:
        rank, world: of the plan.
        n, k: columns of products that travel, or 0, and this rank's depth.
        dtype: dtype of all operands.
        finish: what happens with rows that arrive, see `registry.Flow`: "multiply" (rows of x, by
            the weight), "move" (products, into y), "sum" (they are added to the own products),
            "share" ("sum", and every rank gets all sums), or "keep" (rows of x, into `kept`; a
            library multiplies behind the kernel).
        row, rows: rows of x that stay on this rank.
        top: the first of their rows in y.
        sent: rows for peers, in the order in which a chunk of each is made. If sums are shared,
            `row` and `rows` are also the rows of y that the peer sums.
        received: rows from peers, in the order in which a chunk of each arrives.
        chunks: chunks of the rows of a pair of ranks; each has a signal, and, if sums are shared,
            the sums of each another one.
        recv: byte offset of the rows in a window copy.
        sums: byte offset of the shared sums.
        kept: name of the output or workspace that is x of all ranks, or "" without one.
        outputs: the products; several only if rows of x travel. One without columns is alone.
    """

    rank: int
    world: int
    n: int
    k: int
    dtype: str
    finish: str
    row: int
    rows: int
    top: int
    sent: tuple[RowsSent, ...]
    received: tuple[RowsReceived, ...]
    chunks: int
    recv: int
    sums: int
    kept: str
    outputs: tuple[OutputNames, ...]

    @property
    def sends_products(self) -> bool:
        """Whether products travel, not rows of x."""
        return self.finish not in ("multiply", "keep")

    @property
    def arriving(self) -> int:
        """Rows of all ranks that are multiplied here, if rows of x travel."""
        return self.rows + sum(each.rows for each in self.received)

    @property
    def adds(self) -> bool:
        """Whether rows that arrive are added up."""
        return self.finish in ("sum", "share")


# Of a launch of a whole call.
WholeTable = OneKernelTable | GatherTable | PullTable | PoolTable | SendTable
