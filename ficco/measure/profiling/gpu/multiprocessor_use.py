"""Measurement of the driver calls that need a multiprocessor, while a kernel holds all of them.

The kernel fills every thread slot of a GPU until the host releases it. A call that ends meanwhile
runs on a copy engine or in the front end; a call that does not end waits for a multiprocessor.
Holding the shared memory instead proves nothing, because the driver's own kernels need none.

While the kernel runs, all other work of the GPU waits, also that of other processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from ficco.core.errors import EngineError
from ficco.engine import cuda
from ficco.engine.gpus import Gpus
from ficco.engine.probe_bench import Holder, held, launch, loaded, settle
from ficco.kernels.probe_code import cuda_probe_code, one_code
from ficco.measure.profiling.gpu import driver as commands
from ficco.measure.profiling.gpu.driver import WordCommand, writes_reach_peers

CONTROL = "kernel of one thread"  # this always needs a multiprocessor
WRITE_AT_PEER = "write of a word at a peer"

_ENDS_S = 0.25  # a call that takes longer waits; the largest copy takes 0.2 ms
_MIB, _KIB = 1 << 20, 1 << 10
_LARGE = 64 * _MIB
_ROWS, _ROW_BYTES = 4096, _KIB


class Use(NamedTuple):
    """Whether a call needs a multiprocessor, on a stream and as a node of a graph."""

    eager: bool
    in_graph: bool


class _Here(NamedTuple):
    """Memory of the device, of a peer (0: there is none) and of the host, and the stream."""

    own: int
    other: int
    peer: int
    host: int
    stream: int


def probe(device: int = 0, peer: int | None = None) -> dict[str, Use]:
    """Measure which calls of a device need one of its multiprocessors.

    Everything is loaded and allocated before the kernel starts, because loading a kernel may wait
    for the device. The measurement takes about three seconds and synchronizes the device.

    Args:
        device: the driver's number of the device.
        peer: a device that it reaches; None: calls with a peer are left out.

    Returns:
        The use of each call, in a fixed order.

    Raises:
        EngineError: cuda-bindings is missing, a call fails, other work prevents the kernel from
            filling the device, or CONTROL ends, which shows that the device was not filled.
        GpuError: a driver call of the native core fails.
    """
    devices = (device,) if peer is None else (device, peer)
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(contextlib.closing(Gpus(cuda, devices)))
        stack.enter_context(commands.current(device))
        own = peers.calls(0)
        holder = Holder(own, cuda_probe_code().hold, device)

        def allocated(rank: int) -> int:
            memory = peers.new_memory(rank, _LARGE)
            stack.callback(memory.free)
            return memory.addresses[0]

        here = _Here(
            allocated(0), allocated(0), allocated(1) if peer is not None else 0,
            own.new_host_page(64 * _KIB)[1], own.new_stream(False),
        )  # fmt: skip
        one = loaded(own, one_code(), 1)
        calls = _calls(here, lambda: launch(own, one, (here.own,), here.stream))
        ways = {}
        for name, call in calls.items():
            graph = own.capture(here.stream, call)
            ways[name] = call, lambda graph=graph: own.replay(graph, here.stream)
        for way in ways.values():
            for call in way:  # loads everything that it needs
                call()
        settle(own, here.stream, device, "a call of each kind")

        def waits(call: Callable[[], None]) -> bool:
            try:
                with held([holder]):
                    call()
                    return not own.ends(here.stream, _ENDS_S)
            finally:
                settle(own, here.stream, device, "a call")

        uses = {name: Use(*map(waits, way)) for name, way in ways.items()}
    if uses[CONTROL] != Use(True, True):
        raise EngineError(
            f"measuring GPU {device}: a {CONTROL} ended although all thread slots should be held, "
            "so the measurement is invalid; run it where no debugger or MPS limits the GPU"
        )
    return uses


def _calls(here: _Here, control: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """Return the calls to measure, by name, CONTROL last; each enqueues one command."""
    own, other, peer, host, stream = here
    box = (_ROWS, _ROW_BYTES)
    sizes = {"4 B": 4, "64 B": 64, "16 KiB": 16 * _KIB, "64 KiB": 64 * _KIB, "64 MiB": _LARGE}
    rows = f"{_ROWS} x {_ROW_BYTES // _KIB} KiB"

    def copy(target: int, name: str) -> Callable[[], None]:
        return lambda: commands.copy(target, own, sizes[name], stream)

    def copy_rows(target: int) -> Callable[[], None]:
        return lambda: commands.copy_rows(target, 2 * _ROW_BYTES, own, 2 * _ROW_BYTES, box, stream)

    def write(word: int) -> Callable[[], None]:
        return lambda: commands.words([WordCommand(False, word, 1)], stream)

    calls: dict[str, Callable[[], None]] = {}
    if peer:
        for name in ("4 B", "64 B", "16 KiB", "64 MiB"):
            calls[f"copy to a peer, {name}"] = copy(peer, name)
        calls[f"copy of rows to a peer, {rows}"] = copy_rows(peer)
        if writes_reach_peers():  # a forbidden write may destroy the context
            with contextlib.suppress(EngineError):  # if the driver refuses it, skip the call
                write(peer)()
                calls[WRITE_AT_PEER] = write(peer)
    calls["write of a word"] = write(own)
    calls["copy to the host, 64 KiB"] = copy(host, "64 KiB")
    calls["memset, 4 B"] = lambda: commands.call("cuMemsetD32Async", own, 0, 1, stream)
    for name in ("4 B", "64 KiB", "64 MiB"):
        calls[f"copy within the device, {name}"] = copy(other, name)
    calls[f"copy of rows within the device, {rows}"] = copy_rows(other)
    calls[CONTROL] = control
    return calls
