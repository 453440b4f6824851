"""Kernels of a process: taken from the pack or compiled, loaded to devices, and launched.

A kernel is loaded to a device once and stays until the process ends, because the last use by a
graph is unknown. Loading may wait for the device, so it happens before any stream waits.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ficco.core.call_lock import CallLock
from ficco.core.errors import EngineError, InputError
from ficco.kernels import amd_code, fallback, pack
from ficco.kernels.amd_declarations import AMD_KERNELS
from ficco.kernels.arrays import Arrays, Bulk, CallStride, address, item_bytes, stride
from ficco.kernels.compiling import function_of, options_of
from ficco.kernels.native_launch import Box, Code, Pitch, Place, Slot, described
from ficco.kernels.records import Record
from ficco.kernels.variants import Launch, Variant, flattened, passed, variant_of

_log = logging.getLogger("ficco")
_lock = CallLock()
_loaded: dict[tuple[int, Variant], Code] = {}
_repeated: dict[tuple[Any, ...], _Repeated] = {}
_MOST_REPEATED = 512
_BY_ADDRESS = ("*", "tensordesc")  # types of parameters that are passed by an address


@functools.cache
def gpu(device: int) -> Any:
    """Return the native object of a device, by the driver's number.

    Raises:
        GpuError: there is no such device, or no driver.
    """
    from ficco import _native

    return _native.open_cuda(device)


def _gpu_of(kernel: str, device: int) -> Any:
    """Return the native object of the device that a kernel is for."""
    return amd_code.gpu(device) if kernel in AMD_KERNELS else gpu(device)


def code(launch: Launch) -> Code:
    """Return the kernel that a launch needs, loaded to the current device.

    It must not be called while a stream waits or is captured, unless the kernel is loaded already.

    Raises:
        ByTriton: native code cannot load or launch the kernel.
        EngineError: the kernel is not in the pack and cannot be compiled.
    """
    device, _ = launch.arrays.current()
    key = device, variant_of(launch)
    loaded = _loaded.get(key)
    if loaded is None:
        with _lock():
            loaded = _loaded.get(key)
            if loaded is None:
                loaded = _loaded[key] = _load(*key, launch.arrays.capability)
    return loaded


def _load(device: int, variant: Variant, capability: int) -> Code:
    if variant.kernel in AMD_KERNELS:
        compiled = amd_code.find(variant, device)
    else:
        compiled = pack.find(variant, capability) or fallback.find(variant, capability)
    kernel = code_of(variant, compiled.record)
    from ficco import _native

    try:
        handle = _gpu_of(variant.kernel, device).load_code(
            compiled.cubin, kernel.name, kernel.shared_bytes
        )
    except _native.GpuError as error:
        raise fallback.ByTriton(f"the kernel {kernel.name} cannot be loaded: {error}") from error
    return kernel._replace(function=handle)


def code_of(variant: Variant, record: Mapping[str, Any]) -> Code:
    """Return a compiled kernel that is not loaded, from its record (`compiling.Compiled`)."""
    boxes = [
        Box(box["block"][0], box["block"][1], box["type"], box["swizzle"], box["bytes"])
        for box in record["descriptors"]
    ]
    return Code(
        record["name"], passed(variant), record["threads"], record["shared"], tuple(boxes)
    )  # fmt: skip


def enqueue(launch: Launch) -> None:
    """Enqueue a launch on the current stream, or run it in Triton's interpreter.

    Raises:
        EngineError: see `code`.
        GpuError: the driver refuses the launch.
    """
    if launch.arrays.on_gpu:
        prepared(launch)()
    else:
        _interpret(launch)


def repeated(
    key: tuple[Any, ...],
    launch: Callable[[], Launch],
    pointers: Sequence[Any],
    numbers: Mapping[str, int],
    arrays: Arrays,
) -> Callable[[], None]:
    """Return a function that enqueues a launch, from one described before if there is one.

    Args:
        key: what the launch depends on, besides `pointers`, `numbers` and the device.
        launch: returns the launch.
        pointers: the arrays of all pointers and descriptors (`Bulk`), in the order of
            `variants.passed`, which names them.
        numbers: arguments that may differ in launches of one key, by those names.
        arrays: the array library.

    Raises:
        EngineError, GpuError: see `code`.
    """
    if not arrays.on_gpu:
        first = launch()
        _check_repeated(first, pointers, numbers)
        return functools.partial(_interpret, first)
    key = (arrays.device, *key)
    known = _repeated.get(key)
    if known is None:
        first = launch()
        try:
            known = _Repeated(first, code(first), numbers)
        except fallback.ByTriton as reason:
            _warn(str(reason))
            return _by_triton(first)
        if len(_repeated) >= _MOST_REPEATED:
            _repeated.clear()
        _repeated[key] = known
    values = [_pitch(each) for each in pointers] + list(numbers.values())
    addresses = [_address(each) for each in pointers] + [0] * len(numbers)
    return functools.partial(known.run, addresses, values, arrays)


def _address(pointer: Any) -> int:
    return address(pointer.base if isinstance(pointer, Bulk) else pointer)


def _pitch(pointer: Any) -> int:
    """Return the bytes from row to row of what a descriptor is for; 0 for pointers."""
    if not isinstance(pointer, Bulk):
        return 0
    return stride(pointer.base, 0) * item_bytes(pointer.base)


def _check_repeated(launch: Launch, pointers: Sequence[Any], numbers: Mapping[str, int]) -> None:
    """Refuse pointers and numbers that are not those of the launch, which on GPUs have its place.

    Raises:
        InputError: they are not.
    """
    given = flattened(launch.arguments)
    own = [each.name for each in passed(variant_of(launch)) if each.type.startswith(_BY_ADDRESS)]
    same = [_address(given[name]) for name in own] == [_address(each) for each in pointers]
    if not same or any(given[name] != number for name, number in numbers.items()):
        raise InputError(
            f"the launch of {launch.kernel.name} takes the arrays {own}; others were given, or "
            f"other numbers than {dict(numbers)}"
        )


class _Repeated:
    """A launch that native code enqueues with other addresses and numbers each time."""

    def __init__(self, launch: Launch, kernel: Code, numbers: Mapping[str, int]) -> None:
        from ficco import _native

        pointers = [each.name for each in kernel.parameters if each.type.startswith(_BY_ADDRESS)]
        places: dict[str, Place] = {name: Slot(i) for i, name in enumerate(pointers)}
        places |= {name: Pitch(i, 1) for i, name in enumerate(numbers, len(pointers))}
        spec = described(kernel, launch.grid, launch.arguments, places, launch.chained)
        self._kept = (kernel, spec)
        device, _ = launch.arrays.current()
        on = _gpu_of(launch.kernel.name, device)
        self._call = _native.GpuCall(on, spec.native, len(places))
        self._lock = CallLock()  # native code writes the parameters to one place

    def run(self, addresses: list[int], values: list[int], arrays: Arrays) -> None:
        """Enqueue the launch on the current stream.

        Raises:
            GpuError: the driver refuses the launch.
        """
        _, stream = arrays.current()
        with self._lock():
            self._call.run(addresses, values, stream)


def warm(launch: Launch, record: Record) -> None:
    """Load a launch's kernel; in Triton's interpreter, run one program that does nothing.

    Call it before a stream waits or is captured: loading a kernel later would wait for the stream.
    """
    if launch.arrays.on_gpu:
        prepared(launch)
        return
    place = launch.arrays.place
    state = {name: place([0] * count, "int32") for name, count in record.state.items()}
    changes = {k: v for k, v in {**record.idle, **state}.items() if k in launch.arguments}
    arguments, grid = launch.arguments | changes, (1,) * len(launch.grid)
    _interpret(launch._replace(arguments=arguments, grid=grid))


def prepared(launch: Launch) -> Callable[[], None]:
    """Return a function that enqueues a launch on the current stream at each call.

    Native code enqueues it, or Triton if native code cannot.

    Raises:
        EngineError, GpuError: see `code`.
    """
    try:
        return _Native(launch, code(launch))
    except fallback.ByTriton as reason:
        _warn(str(reason))
        return _by_triton(launch)


class _Native:
    """A launch that native code enqueues."""

    def __init__(self, launch: Launch, kernel: Code) -> None:
        from ficco import _native

        bulks = {name: bulk for name, bulk in launch.arguments.items() if isinstance(bulk, Bulk)}
        places = {name: Slot(number) for number, name in enumerate(bulks)}
        spec = described(kernel, launch.grid, launch.arguments, places, launch.chained)
        self._addresses = [_address(bulk) for bulk in bulks.values()]
        self._pitches = [_pitch(bulk) for bulk in bulks.values()]
        self._arrays, self._kept = launch.arrays, (launch, spec)
        device, _ = launch.arrays.current()
        on = _gpu_of(launch.kernel.name, device)
        self._call = _native.GpuCall(on, spec.native, len(bulks))

    def __call__(self) -> None:
        """Enqueue the launch.

        Raises:
            GpuError: the driver refuses the launch.
        """
        _, stream = self._arrays.current()
        self._call.run(self._addresses, self._pitches, stream)


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("kernels are launched by Triton, which takes longer: %s", reason)


def _by_triton(launch: Launch) -> Callable[[], None]:
    """Load a kernel by Triton and return a function that enqueues its launch.

    Raises:
        EngineError: Triton is not installed.
    """
    reason = fallback.why_not()
    if reason:
        raise EngineError(f"the kernel {launch.kernel.name} has to be launched by Triton: {reason}")
    from ficco.core.private import triton_core

    function = function_of(launch.kernel)
    types = {parameter.name: parameter.type for parameter in passed(variant_of(launch))}
    arguments = {
        name: _as_launched(launch.arguments[name], types.get(name) or types.get(f"{name}.0", ""))
        for name, *_ in launch.kernel.parameters
    }
    options = options_of(launch)
    triton_core.load(function, launch.grid, arguments, options)
    return lambda: function[launch.grid](**arguments, **options)


class _TritonArray:
    """An array of any library, in the form that Triton's launcher takes."""

    def __init__(self, array: Any, dtype: Any) -> None:
        self.dtype, self._array = dtype, array

    def data_ptr(self) -> int:
        """Return the address."""
        return address(self._array)


def _as_launched(value: Any, kind: str) -> Any:
    """Return an argument in the form that Triton's launcher takes.

    kind: its Triton type, or that of a tuple's elements.
    """
    if type(value) is tuple:
        return tuple([_as_launched(element, kind) for element in value])
    if isinstance(value, Bulk):
        return _descriptor(_TritonArray(value.base, value.base.dtype), value)
    if isinstance(value, CallStride):
        return int(value)
    return _TritonArray(value, kind.removeprefix("*")) if kind.startswith("*") else value


def _descriptor(array: Any, value: Bulk) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    base, block, _ = value
    strides = [stride(base, dim) for dim in (0, 1)]
    return TensorDescriptor(array, list(base.shape), strides, list(block))


def _as_interpreted(value: Any) -> Any:
    if type(value) is tuple:
        return tuple([_as_interpreted(element) for element in value])
    if isinstance(value, Bulk):
        return _descriptor(value.base, value)
    return int(value) if isinstance(value, CallStride) else getattr(value, "array", value)


def _interpret(launch: Launch) -> None:
    """Run a launch in Triton's interpreter, on PyTorch arrays in host memory.

    Raises:
        EngineError: Triton is not installed, or was imported without its interpreter.
    """
    reason = fallback.why_not()
    if reason:
        raise EngineError(
            f"the kernel {launch.kernel.name} was called on arrays of the CPU, which only Triton's "
            f"interpreter can run: {reason}; pip install triton"
        )
    function = function_of(launch.kernel)
    arguments = {name: _as_interpreted(value) for name, value in launch.arguments.items()}
    function[launch.grid](**arguments, num_warps=launch.warps, num_stages=launch.stages)
