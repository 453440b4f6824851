"""The parameters of every kernel: names, types, and compiler assumptions. No Triton.

The functions themselves are in the modules named here, which import Triton. A launch from the pack
needs only this module, so Triton need not be installed. tests/kernels compare the two.

A parameter is written as name:kind, where kind is

    *       pointer to elements of the array that is passed
    *i32    pointer to elements of this type
    matrix  descriptor for bulk loads if one is passed, else as *
    i32     number of this type
    *[]     tuple of pointers or numbers of a kind, whose length is that of the tuple that is passed
    =       constant, compiled into the kernel

A "?" after the kind means that the compiler assumes nothing about the value. For all others a
kernel may be compiled for multiples of 16; see `variants`.
"""

from __future__ import annotations

from typing import NamedTuple

class Parameter(NamedTuple):
    """One parameter of a kernel.

    Attributes:
        name: name of the parameter.
        kind: see the module's docstring; without "?".
        unknown: whether the compiler assumes nothing about its value.
    """

    name: str
    kind: str
    unknown: bool


class Kernel(NamedTuple):
    """A kernel's interface.

    Attributes:
        name: name of the function, which is the entry of the compiled kernel.
        module: the module that defines it.
        parameters: in order.
    """

    name: str
    module: str
    parameters: tuple[Parameter, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Parameters without compiler assumptions, for Triton's `do_not_specialize`."""
        return tuple([each.name for each in self.parameters if each.unknown])


def _kernel(name: str, module: str, text: str) -> Kernel:
    parameters = []
    for word in text.split():
        parameter, kind = word.split(":")
        parameters.append(Parameter(parameter, kind.removesuffix("?"), kind.endswith("?")))
    return Kernel(name, f"ficco.kernels.{module}", tuple(parameters))


_WAIT = "stop:*i32? status:*i32?"
_B = "b_deep_stride:i64 b_col_stride:i64 has_bias:i32?"
_TILE = "ROWS:= COLS:= DEEP:="

GATED = _kernel(
    "gated_gemm",
    "gated_wait_kernel",
    "own:matrix window:matrix b:matrix bias:* c:* places:*i32 scratch:*fp32 shares:*i32 "
    f"words:*i32? {_WAIT} value:i32? bounds:i32[]? "
    f"k:i32 own_stride:i64 window_stride:i64 {_B} c_stride:i64 timeout_ns:i64? "
    "release_words:*i32[]? homes:*i64? release:i32[]? copy:i32? peers:i64? "
    f"{_TILE} OWN_BULK:= WINDOW_BULK:= B_BULK:= B_TURNED:= COL_STEP:= WORLD:= ON_GPU:=",
)
PUSHING = _kernel(
    "pushing_gemm",
    "gated_push_kernel",
    "own:matrix b:matrix bias:* c:* partial:* places:*i32 scratch:*fp32 shares:*i32 "
    f"counters:*i32 signals:*i32? {_WAIT} whole:i32? shared:i32? among:i32? "
    f"k:i32 own_stride:i64 {_B} c_stride:i64 partial_stride:i64 timeout_ns:i64? "
    f"{_TILE} OWN_BULK:= B_BULK:= B_TURNED:= BEGUN:= COL_STEP:= ON_GPU:=",
)
SUMMING = _kernel(
    "summing_gemm",
    "gated_sum_kernel",
    "own:matrix b:matrix bias:* c:* recv:* places:*i32 terms:*i32 counters:*i32 words:*i32? "
    f"signals:*i32? {_WAIT} value:i32? whole:i32? "
    f"k:i32 own_stride:i64 {_B} c_stride:i64 recv_stride:i64 timeout_ns:i64? "
    f"{_TILE} OWN_BULK:= B_BULK:= B_TURNED:= TERMS:= OWN_AT:= BEGUN:= COL_STEP:= ON_GPU:=",
)
ALL_REDUCE = _kernel(
    "one_kernel_all_reduce_gemm",
    "one_kernel_all_reduce_kernel",
    f"x:* w:* bias:* y:* chunks:*i32 places:*i64 counts:*i32? {_WAIT} "
    "digest:i32? n:i32 k:i32 rank:i32? plan:i32[]? sets:i64[]? "
    "x_stride:i64 w_deep_stride:i64 w_col_stride:i64 has_bias:i32? y_stride:i64 timeout_ns:i64? "
    f"WORLD:= TWICE:= {_TILE} STAGES:= SUM_ROWS:= SUM_COLS:= TURNED:= EDGE:= BYTES:= MADE:= "
    "CHAINED:= ON_GPU:=",
)
PULL = _kernel(
    "pulled_rows",
    "pulling_kernel",
    f"bias:*? y:* places:*i64 gates:*i32? {_WAIT} digest:i32? copy:i32? copy_places:i32? "
    "items:i32? m:i32? n:i32? rank:i32? peers:i64? owners:i64? y_stride:i64? "
    "timeout_ns:i64? WORLD:= TWICE:= MOVES:= BIAS:= FLAT:= SIZE:= EDGE:= BYTES:= ON_GPU:=",
)
GATHER = _kernel(
    "one_kernel_gather_gemm",
    "one_kernel_gather_kernel",
    f"x:* w:*[] bias:*[] y:*[] kept:* places:*i64 gates:*i32? parts:*fp32 {_WAIT} "
    "digest:i32? copy:i32? plan:i32[]? k:i32 rank:i32? sets:i64[]? n:i32[] x_stride:i64 "
    "kept_stride:i64 w_deep_strides:i64[] w_col_strides:i64[] y_strides:i64[] "
    f"timeout_ns:i64? WORLD:= TURNED:= SPLIT:= {_TILE} STAGES:= PUSH_ROWS:= "
    "PUSH_COLS:= EDGE:= BYTES:= ON_GPU:=",
)
SUM = _kernel(
    "sum_terms",
    "sum_kernel",
    "target:* slots:* own:* bias:* rows:i32? cols:i32 target_stride:i64 slots_stride:i64 "
    "slot_rows:i32? own_stride:i64 own_at:i32? has_bias:i32? COUNT:= ROWS:= COLS:=",
)
SENDING = _kernel(
    "sending_gemm",
    "sending_kernel",
    "own:matrix window:matrix b:matrix x:* w:*[] bias:*[] y:*[] kept:* jobs:*i32 slot_tops:*i32 "
    f"counters:*i32 places:*i64 gates:*i32? {_WAIT} digest:i32? copy:i32? rank:i32? peers:i64? "
    "timeout_ns:i64? sizes:i32[]? n:i32 k:i32 strides:i64[] WORLD:= FINISH:= "
    f"{_TILE} OWN_BULK:= WINDOW_BULK:= B_BULK:= B_TURNED:= COL_STEP:= BYTES:= ON_GPU:=",
)
_TABLES = "tables:*[]? strides:i64[]? indices:*[]? offsets:*[]? ends:i64[]? weights:*[]?"
POOL_TABLES = _kernel(
    "pool_tables",
    "pooled_tables_kernel",
    f"target:*? {_TABLES} panels:*i32? panel_count:i32? first:i32? bags:i32? batch:i32? "
    "means:i64? weighted:i64? target_stride:i64? LOOKUPS:= BAGS:= COLS:= EDGE:= BYTES:= WEIGHTED:=",
)
POOL_AND_PUSH = _kernel(
    "one_kernel_pool",
    "one_kernel_pool_kernel",
    f"y:*? {_TABLES} jobs:*i32? counts:*i32? places:*i64? gates:*i32? {_WAIT} "
    "digest:i32? copy:i32? plan:i32[]? batch:i32? means:i64? weighted:i64? rank:i32? sets:i64[]? "
    "y_stride:i64? window_stride:i64? timeout_ns:i64? WORLD:= JOBS:= LOOKUPS:= BAGS:= COLS:= "
    "MOVE_ROWS:= MOVE_COLS:= EDGE:= BYTES:= WEIGHTED:= ON_GPU:=",
)

LIST_LOOKUPS = _kernel(
    "list_lookups",
    "row_updates_kernel",
    "keys:*i32? bags:*i32? indices:*[]? starts:*[]? begins:i64[]? counts:i64[]? firsts:i64[]? "
    "columns:i64[]? batch:i32? across:i32? steps:i32? TILE:=",
)
FIND_SEGMENTS = _kernel(
    "find_segments",
    "row_updates_kernel",
    "keys:*i32? order:*i64? bags:*i32? factors:*fp32? starts:*i32? counts:*i32? sorted_bags:*i32? "
    "sorted_factors:*fp32? places:*i64? squares_at:*i64? tables:i64[]? pitches:i64[]? "
    "firsts:i64[]? accumulators:i64[]? total:i32? TILE:= WEIGHTED:=",
)
_RATE = "rate:*fp32? total:i32? dim:i32?"
_KIND = "kind:i32? has_rate:i32? rate_bits:i32? epsilon_bits:i32? TILE:="
UPDATE_ROWS = _kernel(
    "update_rows",
    "row_updates_kernel",
    "gradients:*? table:*? keys:*i32? starts:*i32? counts:*i32? sorted_bags:*i32? "
    f"sorted_factors:*fp32? places:*i64? squares_at:*i64? carry:*fp32? {_RATE} stride:i64? {_KIND} "
    "BAGS:= COLS:= LOOKUPS:= EDGE:= BYTES:= WEIGHTED:=",
)
UPDATE_SPLIT_ROWS = _kernel(
    "update_split_rows",
    "row_updates_kernel",
    f"table:*? keys:*i32? counts:*i32? places:*i64? squares_at:*i64? carry:*fp32? {_RATE} {_KIND} "
    "COLS:=",
)

_ROUTE = (
    "total:i32? chunks:i32? experts:i32? world:i32? rank:i32? own_begin:i32? own_end:i32? CHUNK:="
)
EXPERTS_PACK = _kernel(
    "experts_pack",
    "experts_route_kernel",
    "ids:*? gates:*fp32? packed:*i32? count:i32? length:i32? limit:i32? has_gates:i32? SIZE:=",
)
EXPERTS_COUNT = _kernel(
    "experts_count", "experts_route_kernel", f"ids:*i32? workspace:*i32? {_ROUTE}"
)
EXPERTS_SCAN = _kernel(
    "experts_scan", "experts_route_kernel", "workspace:*i32? chunks:i32? lines:i32?"
)
EXPERTS_PLACE = _kernel(
    "experts_place",
    "experts_route_kernel",
    "ids:*i32? workspace:*i32? routing:*i32? limits:*i32? status:*i32? shown:*i32? "
    f"pitch:i32? tag:i32? notes:i32? {_ROUTE} PLACED:=",
)
EXPERTS_PRODUCT = _kernel(
    "experts_product",
    "experts_product_kernel",
    "x:* gathered:* w:matrix y:* routing:*i32? windows:*i64? bases:*i32? list_at:i32? experts:i32? "
    "topk:i32? wave:i32? capacity:i32? own_begin:i32? own_end:i32? copy:i32? rank:i32? world:i32? "
    "searches:i32? d:i32 n:i32 x_stride:i64 BLOCK_M:= BLOCK_N:= BLOCK_K:= PANEL:= RETURN:= "
    "W_BULK:= W_TURNED:= ON_GPU:=",
)
EXPERTS_SUM = _kernel(
    "experts_sum",
    "experts_sum_kernel",
    "rows:* routing:*i32? y:* ids_at:i32? tokens:i32? topk:i32? all_experts:i32? d:i32 "
    "BLOCK_M:= BLOCK_N:=",
)
EXPERTS_GRADIENT = _kernel(
    "experts_gradient",
    "experts_gradient_kernel",
    "a:* a_gathered:* a_bulk:matrix b:* b_gathered:* b_bulk:matrix dw:* routing:*i32? "
    "list_at:i32? experts:i32? topk:i32? own_begin:i32? own_end:i32? capacity:i32? a_width:i32 "
    "b_width:i32 a_stride:i64 b_stride:i64 BLOCK_M:= BLOCK_N:= BLOCK_K:= PANEL:= A_INDEXED:= "
    "B_INDEXED:= A_BULK:= B_BULK:= ON_GPU:=",
)
EXPERTS_SWIGLU = _kernel(
    "experts_swiglu",
    "experts_activation_kernel",
    "z:* gates:*fp32? routing:*i32? h:* list_at:i32? capacity:i32? f:i32 BLOCK_M:= BLOCK_N:=",
)
EXPERTS_SWIGLU_GRADIENT = _kernel(
    "experts_swiglu_gradient",
    "experts_activation_kernel",
    "z:* gates:*fp32? dh:* routing:*i32? dz:* dgates:*fp32? list_at:i32? capacity:i32? f:i32 "
    "BLOCK_M:= BLOCK_N:=",
)
EXPERTS_ROWS = _kernel(
    "experts_rows",
    "experts_gradient_kernel",
    "x:* gathered:* y:* routing:*i32? list_at:i32? experts:i32? topk:i32? own_begin:i32? "
    "own_end:i32? capacity:i32? d:i32 x_stride:i64 BLOCK_M:= BLOCK_N:=",
)

KERNELS = {
    kernel.name: kernel
    for kernel in (
        GATED, PUSHING, SUMMING, ALL_REDUCE, GATHER, PULL, SUM, SENDING, POOL_TABLES, POOL_AND_PUSH,
        LIST_LOOKUPS, FIND_SEGMENTS, UPDATE_ROWS, UPDATE_SPLIT_ROWS,
        EXPERTS_PACK, EXPERTS_COUNT, EXPERTS_SCAN, EXPERTS_PLACE, EXPERTS_PRODUCT, EXPERTS_SUM,
        EXPERTS_GRADIENT, EXPERTS_ROWS, EXPERTS_SWIGLU,
        EXPERTS_SWIGLU_GRADIENT,
    )
}  # fmt: skip
