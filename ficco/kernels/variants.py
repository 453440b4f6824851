"""Variants: which compiled kernel a launch needs. Neither Triton nor torch.

Triton's own rules specialize a kernel for every pattern of arguments that are 1 or multiples of 16.
Here there are only two cases: every address, size and stride of the launch is a multiple of 16, or
nothing is assumed. The same function decides when the pack is built and when a kernel is launched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ficco.core.dtypes import ALL
from ficco.core.errors import InputError
from ficco.kernels.amd_declarations import AMD_KERNELS
from ficco.kernels.arrays import Bulk, address, dtype_name
from ficco.kernels.declarations import KERNELS, Kernel

ALIGN = 16
_KERNELS = KERNELS | AMD_KERNELS  # by name


class Launch(NamedTuple):
    """A kernel with its arguments and launch options.

    Attributes:
        kernel: the kernel.
        arguments: by name, with constants; addresses are arrays or have `data_ptr()`.
        grid: blocks by dimension.
        warps, stages: Triton's options.
        chained: whether native code may start it before the previous launch on its stream has
            ended; the kernel waits for that end by itself.
        dtypes: dtypes of arguments whose array is a placeholder, by argument.
        odd: whether to assume nothing about sizes, even if all are multiples of 16.
        arrays: the array library.
        divisors: what the kernel's constants assume of arguments, beyond its parameters: bytes that
            divide an address, or elements that divide a stride, by the names of `flattened`.
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
    divisors: Mapping[str, int] = {}


class Variant(NamedTuple):
    """The compile-time description of a kernel.

    Attributes:
        kernel: its name.
        types: Triton types of the parameters except constants, in order; of a tuple, that of an
            element with the length, as "*fp32[8]".
        aligned: whether the compiler assumes multiples of 16, where the declaration allows it.
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
        """A short name of the variant; in practice unique."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @staticmethod
    def of_text(text: str) -> Variant:
        """Return a variant from its text."""
        kernel, types, aligned, constants, warps, stages = json.loads(text)
        pairs = tuple([(name, value) for name, value in constants])
        return Variant(kernel, tuple(types), aligned, pairs, warps, stages)


class Passed(NamedTuple):
    """A parameter of a compiled kernel.

    Attributes:
        name: name of the parameter; of element 2 of a tuple "tables", "tables.2".
        type: its Triton type.
        divisor: the divisor that the compiler assumes.
    """

    name: str
    type: str
    divisor: int


def declare(kernels: Iterable[Kernel]) -> None:
    """Add kernels to those that variants name."""
    _KERNELS.update({kernel.name: kernel for kernel in kernels})


def kernel_of(variant: Variant) -> Kernel:
    """Return a variant's kernel."""
    return _KERNELS[variant.kernel]


def passed(variant: Variant) -> tuple[Passed, ...]:
    """Return the parameters of a variant except constants, in order."""
    parameters = [p for p in kernel_of(variant).parameters if p.kind != "="]
    flat: list[Passed] = []
    for p, kind in zip(parameters, variant.types, strict=True):
        element, length = elements_of(kind)
        divisor = ALIGN if _assumed(variant.aligned, p.unknown, kind) else 1
        if not length:
            flat.append(Passed(p.name, kind, divisor))
        flat += [Passed(f"{p.name}.{i}", element, divisor) for i in range(length)]
    return tuple(flat)


def elements_of(kind: str) -> tuple[str, int]:
    """Return the type and number of the elements of a tuple; a number of 0 if it is no tuple."""
    element, _, length = kind.partition("[")
    if kind.startswith("tensordesc") or not length:
        return kind, 0
    return element, int(length.removesuffix("]"))


def flattened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names of `passed`, with an entry for each element of a tuple."""
    flat: dict[str, Any] = {}
    for name, value in arguments.items():
        if type(value) is tuple:
            flat |= {f"{name}.{i}": element for i, element in enumerate(value)}
        else:
            flat[name] = value
    return flat


def _assumed(aligned: bool, unknown: bool, kind: str) -> bool:
    return aligned and not unknown and not kind.startswith("tensordesc")


def is_aligned(launch: Launch) -> bool:
    """Return whether all of a launch's arguments that may be specialized are multiples of 16."""
    assumed = [p.name for p in launch.kernel.parameters if p.kind != "=" and not p.unknown]
    values = flattened({name: launch.arguments[name] for name in assumed}).values()
    return all(_value(value) % ALIGN == 0 for value in values)


def _value(argument: Any) -> int:
    if isinstance(argument, int):
        return argument
    return 0 if isinstance(argument, Bulk) else address(argument)  # descriptors are always aligned


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
        elif kind.endswith("[]"):
            element = kind.removesuffix("[]")
            if element == "*":
                element = _type_of(value[0], launch.dtypes.get(name))
            types.append(f"{element}[{len(value)}]")
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
        return f"tensordesc<{ALL[dtype_name(value.base)].short}[{rows}, {cols}]>"
    return f"*{ALL[dtype or dtype_name(value)].short}"
