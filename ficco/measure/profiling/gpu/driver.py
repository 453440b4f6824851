"""The native core's driver calls for plans, made through cuda-bindings.

Addresses and streams are numbers; the device's context must be current.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ficco.core.errors import EngineError
from ficco.engine.peer_signals import allowed_kinds

MOST_WORDS = 255  # most commands of one batch
_DEVICE_MEMORY = 2
_WAIT_VALUE, _WRITE_VALUE, _UNTIL_EQUAL = 1, 2, 1


class WordCommand(NamedTuple):
    """A command to a stream.

    Attributes:
        waits: wait until the word has the value; else write the value.
        address: address of the word, of 32 bits.
        value: see `waits`.
    """

    waits: bool
    address: int
    value: int


def kind_of_signals() -> str:
    """Return the preferred kind of signals to peers on this driver; see `peer_signals`."""
    return allowed_kinds()[0]


def writes_reach_peers() -> bool:
    """Return whether streams may write words in peers' memory on this driver."""
    return "write" in allowed_kinds()


def copy(target: int, source: int, size: int, stream: int) -> None:
    """Enqueue a copy of `size` bytes."""
    call("cuMemcpyAsync", target, source, size, stream)


def copy_rows(
    target: int, target_pitch: int, source: int, source_pitch: int, box: tuple[int, int],
    stream: int,
) -> None:  # fmt: skip
    """Enqueue a copy of rows with a pitch; `box`: number of rows, bytes of each."""
    driver = bindings()
    plane, (rows, row_bytes) = driver.CUDA_MEMCPY2D(), box
    plane.srcMemoryType = plane.dstMemoryType = driver.CUmemorytype(_DEVICE_MEMORY)
    plane.srcDevice, plane.srcPitch = source, source_pitch
    plane.dstDevice, plane.dstPitch = target, target_pitch
    plane.WidthInBytes, plane.Height = row_bytes, rows
    call("cuMemcpy2DAsync", plane, stream)


def words(commands: Sequence[WordCommand], stream: int) -> None:
    """Enqueue at most MOST_WORDS commands as one batch, in order."""
    driver, batch = bindings(), []
    for command in commands:
        kind = driver.CUstreamBatchMemOpType(_WAIT_VALUE if command.waits else _WRITE_VALUE)
        entry = driver.CUstreamBatchMemOpParams()
        entry.operation = kind
        part = entry.waitValue if command.waits else entry.writeValue
        part.operation, part.address, part.value = kind, command.address, command.value
        part.flags = _UNTIL_EQUAL if command.waits else 0
        batch.append(entry)
    call("cuStreamBatchMemOp", stream, len(batch), batch, 0)


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make the primary context of a device current on this thread inside the block."""
    context = call("cuDevicePrimaryCtxRetain", device)
    try:
        call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent")
    finally:
        call("cuDevicePrimaryCtxRelease", device)


def bindings() -> Any:
    """Return cuda-bindings' module of driver functions.

    Raises:
        EngineError: cuda-bindings is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise EngineError(
            f"measuring GPUs needs cuda-bindings ({error}); pip install 'ficco[cuda]'"
        ) from error


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver; return its first result, or raise EngineError."""
    status, *results = getattr(bindings(), name)(*arguments)
    if int(status) != 0:
        raise EngineError(f"measuring this GPU: {name} returned {status.name} ({int(status)})")
    return results[0] if results else None
