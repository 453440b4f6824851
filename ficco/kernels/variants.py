"""Which compiled kernel a launch needs. Neither Triton nor torch.

Triton's own rules make another kernel for every pattern of arguments that are 1 or that 16 divides.
Here there are two: 16 divides every address, size and stride of the launch, or nothing is known of
them. The same function says so when the pack is built and when a kernel is launched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ficco.errors import InputError
from ficco.kernels.arrays import Bulk, address, dtype_name
from ficco.kernels.declarations import KERNELS, Kernel

__all__ = ["ALIGN", "Launch", "Passed", "Variant", "is_aligned", "passed", "variant_of"]

ALIGN = 16
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}


class Launch(NamedTuple):
    """A kernel and what it is launched with.

    Attributes:
        kernel: which.
        arguments: by name, constants among them; addresses are arrays, or have `data_ptr()`.
        grid: blocks by dimension.
        warps, stages: Triton's options.
        chained: whether native code may have it begin while the launch before it on its stream
            ends; the kernel waits for that end by itself.
        dtypes: of arrays that stand for others, by argument.
        odd: whether nothing is to be assumed of sizes, though 16 may divide them all.
        arrays: the library of the arrays.
    """

    kernel: Kernel
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    warps: int
    stages: int = 3
    chained: bool = False
    dtypes: Mapping[str, str] = {}
    odd: bool = False
    arrays: Any = None


class Variant(NamedTuple):
    """A kernel as it is compiled.

    Attributes:
        kernel: its name.
        types: of the parameters that are no constants, in order, as Triton writes them.
        aligned: whether 16 divides what the kernel's declaration allows to be assumed.
        constants: name and value, in the order of the parameters.
        warps, stages: Triton's options.
    """

    kernel: str
    types: tuple[str, ...]
    aligned: bool
    constants: tuple[tuple[str, int], ...]
    warps: int
    stages: int

    @property
    def text(self) -> str:
        """The variant in JSON; equal for equal variants."""
        return json.dumps(self, separators=(",", ":"))

    @property
    def key(self) -> str:
        """A name of the variant that is short, and unique for all practical purposes."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @staticmethod
    def of_text(text: str) -> Variant:
        """Return a variant from its text."""
        kernel, types, aligned, constants, warps, stages = json.loads(text)
        pairs = tuple([(name, value) for name, value in constants])
        return Variant(kernel, tuple(types), aligned, pairs, warps, stages)


class Passed(NamedTuple):
    """A parameter that a compiled kernel takes.

    Attributes:
        name: of the parameter.
        type: as Triton writes it.
        divisor: what the compiler believes to divide it.
    """

    name: str
    type: str
    divisor: int


def passed(variant: Variant) -> tuple[Passed, ...]:
    """Return the parameters of a variant that are no constants, in order."""
    numbers = [each for each in KERNELS[variant.kernel].parameters if each.kind != "="]
    return tuple([
        Passed(each.name, kind, ALIGN if _assumed(variant.aligned, each.unknown, kind) else 1)
        for each, kind in zip(numbers, variant.types, strict=True)
    ])  # fmt: skip


def _assumed(aligned: bool, unknown: bool, kind: str) -> bool:
    return aligned and not unknown and not kind.startswith("tensordesc")


def is_aligned(launch: Launch) -> bool:
    """Return whether 16 divides all of a launch's arguments that a kernel may assume it of."""
    return all(
        _value(launch.arguments[each.name]) % ALIGN == 0
        for each in launch.kernel.parameters
        if each.kind != "=" and not each.unknown
    )


def _value(argument: Any) -> int:
    if isinstance(argument, int):
        return argument
    return 0 if isinstance(argument, Bulk) else address(argument)  # a descriptor is aligned anyway


def variant_of(launch: Launch) -> Variant:
    """Return which compiled kernel a launch needs.

    Raises:
        InputError: the launch lacks an argument, or has one of another kind.
    """
    types, constants = [], []
    for name, kind, _ in launch.kernel.parameters:
        if name not in launch.arguments:
            raise InputError(f"the launch of {launch.kernel.name} has no argument {name!r}")
        value = launch.arguments[name]
        if kind == "=":
            constants.append((name, int(value)))
        elif kind in ("*", "matrix"):
            types.append(_type_of(value, launch.dtypes.get(name)))
        else:
            types.append(kind)
    return Variant(
        launch.kernel.name, tuple(types), not launch.odd and is_aligned(launch), tuple(constants),
        launch.warps, launch.stages,
    )  # fmt: skip


def _type_of(value: Any, dtype: str | None) -> str:
    if isinstance(value, Bulk):
        rows, cols = value.block
        return f"tensordesc<{_TYPES[dtype_name(value.base)]}[{rows}, {cols}]>"
    return f"*{_TYPES[dtype or dtype_name(value)]}"
