"""GEMMs and reductions by PyTorch on GPUs: cuBLAS, and ficco's own kernels for sums."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ficco.core.dtypes import ALL
from ficco.core.errors import EngineError
from ficco.core.private.torch_core import (
    REDUCED_PRECISION,
    ReducedPrecision,
    current_device,
    current_stream,
)
from ficco.engine.compute import DeviceKernels, Product, Slots
from ficco.engine.compute.own_kernels import AMD_RECORDS, RECORDS, OwnKernels
from ficco.engine.compute.torch import pooled_bags
from ficco.engine.compute.torch_dtypes import TORCH_DTYPE
from ficco.kernels.arrays import Arrays, library_of
from ficco.kernels.summing import sum_partials

_log = logging.getLogger("ficco")


class _Memory:
    """Memory with an external owner, in a form that PyTorch uses without a copy."""

    def __init__(self, address: int, rows: int, cols: int, dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, cols),
            "typestr": ALL[dtype].typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_DEVICE = torch.device("cuda")
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Cleared:
    """Clears a setting of PyTorch inside the block, and restores it.

    Args:
        setting: the functions that return and set the setting's values.
        values: its values before the block; the first one is cleared.
    """

    __slots__ = ("_setting", "_values")

    def __init__(self, setting: ReducedPrecision, values: tuple[bool, ...]) -> None:
        self._setting, self._values = setting, values

    def __enter__(self) -> None:
        self._setting.assign(False, *self._values[1:])

    def __exit__(self, *_: object) -> None:
        self._setting.assign(*self._values)


def _arrays() -> Arrays:
    return library_of(torch.device("cuda", torch.cuda.current_device()))


class TorchDeviceCompute:
    """See `ficco.engine.compute.DeviceCompute`. Handles are tensors."""

    name = "torch"
    kernels: DeviceKernels | None = OwnKernels(
        _arrays, AMD_RECORDS if torch.version.hip else RECORDS
    )

    def stream(self) -> int:
        """See `DeviceCompute.stream`."""
        return int(current_stream(current_device()))

    def exact(self, dtype: str) -> AbstractContextManager[None]:
        """See `DeviceCompute.exact`: by default cuBLAS may sum parts of k in 16 bits.

        The user's choice of TensorFloat-32 is not changed.
        """
        setting = REDUCED_PRECISION.get(dtype)
        if setting is None or not (values := setting.values())[0]:
            return _NOTHING
        return _Cleared(setting, values)

    def product(self, dtype: str) -> Product:
        """See `DeviceCompute.product`."""
        return Product(torch.mm, REDUCED_PRECISION.get(dtype))

    def part(
        self, handle: torch.Tensor, row0: int, row1: int, col0: int, col1: int
    ) -> torch.Tensor:
        """See `DeviceCompute.part`."""
        rows, cols = handle.shape
        if row1 - row0 != rows:
            handle = handle.narrow(0, row0, row1 - row0)
        return handle if col1 - col0 == cols else handle.narrow(1, col0, col1 - col0)

    def empty(self, rows: int, cols: int, dtype: str) -> torch.Tensor:
        """See `DeviceCompute.empty`."""
        return torch.empty(rows, cols, dtype=TORCH_DTYPE[dtype], device=_DEVICE)

    def at(self, address: int, rows: int, cols: int, dtype: str) -> torch.Tensor:
        """See `DeviceCompute.at`."""
        if not rows or not cols:
            return self.empty(rows, cols, dtype)
        with torch.inference_mode(False):  # else calls outside of that mode could not write there
            tensor = torch.as_tensor(_Memory(address, rows, cols, dtype), device="cuda")
            return tensor.view(TORCH_DTYPE[dtype])

    def place(self, handle: torch.Tensor) -> tuple[int, int]:
        """See `DeviceCompute.place`."""
        return handle.data_ptr(), handle.stride()[0] * handle.element_size()

    def reads(self, handle: torch.Tensor) -> bool:
        """See `DeviceCompute.reads`."""
        down, along = handle.stride()
        rows, cols = handle.shape
        contiguous = (along == 1 and down >= cols) or (down == 1 and along >= rows)
        return contiguous and not handle.is_neg()

    def operand(self, handle: torch.Tensor) -> torch.Tensor:
        """See `DeviceCompute.operand`."""
        if handle.is_neg():
            handle = handle.resolve_neg()
        return handle if self.reads(handle) else handle.contiguous()

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        accumulate: bool,
        add: list[torch.Tensor],
    ) -> None:
        """See `DeviceCompute.gemm`."""
        wider: dict[str, Any] = {} if c.dtype == a.dtype else {"out_dtype": c.dtype}
        terms = [*([c] if accumulate else []), *add]
        if not terms:
            torch.mm(a, b, out=c, **wider)
        elif len(terms) == 1 and terms[0].dtype == c.dtype:
            torch.addmm(terms[0], a, b, out=c, **wider)
        elif not accumulate and len(add) == 2 and add[1].shape[0] == 1 < c.shape[0]:
            total = torch.empty_like(c, dtype=torch.float32)
            self.gemm(a, b, total, False, [])
            self.sum(Slots(add[0], 1, 0), total, 1, add[1], c)
        else:
            total = c if c.dtype == torch.float32 else torch.empty_like(c, dtype=torch.float32)
            self.gemm(a, b, total, accumulate and total is c, [])
            rest = terms if total is not c else add
            for term in rest[:-1]:
                total.add_(term)
            torch.add(total, rest[-1], out=c)

    def gemms(
        self, a: Slots, b: torch.Tensor, c: Slots, accumulate: bool, add: list[torch.Tensor]
    ) -> None:
        """See `DeviceCompute.gemms`."""
        batch_a, batch_c = _batch(a), _batch(c)
        if batch_a.dtype != batch_c.dtype or len(add) > 1 or (accumulate and add):
            for i in range(a.number):  # PyTorch exposes no batched form for these
                self.gemm(batch_a[i], b, batch_c[i], accumulate, add)
            return
        batch_b = b.unsqueeze(0).expand(a.number, -1, -1)
        if accumulate:
            torch.baddbmm(batch_c, batch_a, batch_b, out=batch_c)
        elif add:
            bias = add[0].unsqueeze(0)
            torch.baddbmm(bias, batch_a, batch_b, out=batch_c)
        else:
            torch.bmm(batch_a, batch_b, out=batch_c)

    def reduce(self, sources: list[torch.Tensor], target: torch.Tensor) -> None:
        """See `DeviceCompute.reduce`."""
        if not sources:
            target.zero_()
            return
        if len(sources) == 1:
            target.copy_(sources[0])
            return
        total = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
        for source in sources:
            total.add_(source)
        target.copy_(total)

    def sum(
        self,
        slots: Slots,
        own: torch.Tensor,
        own_at: int,
        bias: torch.Tensor | None,
        target: torch.Tensor,
    ) -> None:
        """See `DeviceCompute.sum`: by ficco's own kernel, or by PyTorch if there is none."""
        try:
            if torch.version.hip:
                raise EngineError("ficco has no such kernel for AMD GPUs")
            sum_partials(slots.first, slots.distance, slots.number, own, own_at, bias, target)
        except EngineError as reason:
            _warn(str(reason))
            terms = [*_batch(slots)] if slots.number else []
            terms.insert(own_at, own)
            self.reduce(terms if bias is None else [*terms, bias], target)

    def bag(
        self,
        table: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        bags: tuple[int, int],
        target: torch.Tensor,
        weights: torch.Tensor | None = None,
        mean: bool = False,
    ) -> None:
        """See `DeviceCompute.bag`."""
        first, last = bags
        if last > first and table.shape[1]:
            target.copy_(pooled_bags(table, indices, offsets, weights, mean)[first:last])

    def fill_nan(self, handle: torch.Tensor) -> None:
        """See `DeviceCompute.fill_nan`."""
        handle.fill_(torch.nan)


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("sums are made by PyTorch, which takes longer: %s", reason)


def _batch(slots: Slots) -> torch.Tensor:
    """Return slots as one tensor of three dimensions."""
    first: Any = slots.first
    rows, cols = first.stride()
    batch: torch.Tensor = first.as_strided(
        (slots.number, *first.shape), (slots.distance * rows, rows, cols)
    )
    return batch
