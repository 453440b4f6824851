"""Windows for all GPUs of one process, which access each other's memory by peer access.

This module does the one-time setup (contexts, peer access, memory) over cuda-python. The native
core does the work of every call.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ficco.engines.peer_signals import Probe, allowed_kinds, first_that_arrives, writable_words
from ficco.engines.window_layout import COPIES, WORDS_BYTES, Layout, Window
from ficco.errors import EngineError
from ficco.plan import Signal, WindowBytes, signal_place
from ficco.tables import VACANT

try:
    from ficco import _native
except ImportError as missing:
    raise EngineError(
        f"the native core cannot be loaded ({missing}); install ficco (pip install .) and run it "
        "from outside its source folder"
    ) from missing

__all__ = ["Group", "PeerWindows", "Peers", "new_group"]

Group = _native.Group

_COPIES = 2
_OUT_OF_MEMORY, _NO_PEER_ACCESS, _REACHED_ALREADY = 2, 217, 704


def new_group(world: int, timeout_s: float) -> Group:
    """Return a group that tracks failed ranks of a process; its own windows are not used."""
    return Group(world, timeout_s, None)


class Peers:
    """The devices of one process, one per rank, with access to each other's memory.

    Their primary contexts, which all libraries share, are retained until `close`.

    Args:
        devices: the driver's number of each rank's device; all different.

    Raises:
        EngineError: there are too few devices, two have no peer access, cuda-bindings is missing,
            or a driver call fails.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self._contexts: list[Any] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.devices)

    def _open(self) -> None:
        what = f"opening the devices {list(self.devices)}"
        _call("cuInit", 0, task=what)
        count = int(_call("cuDeviceGetCount", task=what))
        if len(set(self.devices)) != self.world:
            raise EngineError(f"{what}: every rank needs a device of its own; name each once")
        if not all(0 <= device < count for device in self.devices):
            raise EngineError(
                f"{what}: {count} devices found; use fewer ranks, or let CUDA_VISIBLE_DEVICES name "
                "more devices"
            )
        handles = [_call("cuDeviceGet", device, task=what) for device in self.devices]
        self._check_pairs(handles)
        for device in handles:
            self._contexts.append(_call("cuDevicePrimaryCtxRetain", device, task=what))
        for rank in range(self.world):
            with self.current(rank):
                for peer in range(self.world):
                    if peer != rank:
                        self._reach(rank, peer)

    def _check_pairs(self, handles: Sequence[Any]) -> None:
        unreached = []
        for device, own in zip(self.devices, handles, strict=True):
            for other, peer in zip(self.devices, handles, strict=True):
                task = f"querying peer access of device {device} to device {other}"
                if device != other and not _call("cuDeviceCanAccessPeer", own, peer, task=task):
                    unreached.append(f"{device} to {other}")
        if unreached:
            raise _no_access(unreached)

    def _reach(self, rank: int, peer: int) -> None:
        pair = f"{self.devices[rank]} to {self.devices[peer]}"
        status = _status("cuCtxEnablePeerAccess", self._contexts[peer], 0)[0]
        if int(status) == _NO_PEER_ACCESS:
            raise _no_access([pair])
        if int(status) not in (0, _REACHED_ALREADY):
            raise _refused(f"peer access of device {pair}", "cuCtxEnablePeerAccess", status)

    @contextmanager
    def current(self, rank: int) -> Iterator[None]:
        """Make a rank's context current on this thread inside the block."""
        what = f"using device {self.devices[rank]}"
        _call("cuCtxPushCurrent", self._contexts[rank], task=what)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent", task=what)

    def synchronize(self, rank: int) -> None:
        """Wait until a rank's device has completed all enqueued work.

        Raises:
            EngineError: the device has failed, or a graph is being captured.
        """
        with self.current(rank):
            _call("cuCtxSynchronize", task=f"waiting for device {self.devices[rank]}")

    def capturing(self, rank: int, stream: int) -> bool:
        """Return whether a stream of a rank's device is being captured into a graph."""
        with self.current(rank):
            task = f"querying the capture of a stream of device {self.devices[rank]}"
            return int(_call("cuStreamIsCapturing", stream, task=task)) != 0

    def allocate(self, rank: int, size: int) -> tuple[int, int]:
        """Return the addresses of a rank's zeroed memory: of all of it, and of its words."""
        with self.current(rank):
            task = f"a window of {size} bytes on device {self.devices[rank]}"
            base = int(_call("cuMemAlloc", size, task=task))
            _call("cuMemsetD8", base, 0, size, task=task)
        self.synchronize(rank)  # fills are asynchronous
        return base, base

    def free(self, rank: int, base: int, words: int) -> None:
        """Free what `allocate` returned."""
        with self.current(rank):
            _call("cuMemFree", base, task=f"freeing a window on device {self.devices[rank]}")

    def fill(self, rank: int, at: int, value: int, count: int) -> None:
        """Store a 32-bit value so many times in a rank's memory; see `synchronize`."""
        with self.current(rank):
            task = f"filling a window on device {self.devices[rank]}"
            _call("cuMemsetD32", at, value, count, task=task)

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of signals to try; see `ficco.engines.peer_signals`."""
        return allowed_kinds()

    def writable(self, kind: str, rank: int) -> list[bool]:
        """Return, per rank, whether streams of a rank write to its words."""
        return writable_words(kind, self.devices, rank)

    def open(self, rank: int) -> _native.Gpu:
        """Open a rank's device for the native core."""
        return _native.open_cuda(self.devices[rank])

    def close(self) -> None:
        """Release the contexts; they stay alive if other users have retained them."""
        while self._contexts:
            self._contexts.pop()
            device = self.devices[len(self._contexts)]
            _call("cuDevicePrimaryCtxRelease", device, task=f"releasing device {device}")


class PeerWindows:
    """A window and a mailbox on every rank's device, in their initial state.

    Initially there is no data, every `free` is raised, and the whole mailbox is vacant.

    The memory is freed by `close`, or with the last reference.

    Args:
        peers: the devices.
        sizes: bytes of one copy.
        signals: the kind of signals that is known to arrive; None: a probe decides.

    Attributes:
        signals: the kind of signals, see `ficco.engines.peer_signals`.
        bases: address of every rank's memory, laid out by `Layout`.
        word_bases: address of every rank's words, which may have memory of their own.
        sizes: bytes of one copy, rounded up.

    Raises:
        EngineError: a device has too little memory, a driver call fails, or signals do not arrive.
    """

    def __init__(self, peers: Peers, sizes: WindowBytes, signals: str | None = None) -> None:
        self._layout = Layout(sizes)
        self.sizes = self._layout.sizes
        self._bases: list[tuple[int, int]] = []  # of all of a rank's memory, and of its words
        self._end = weakref.finalize(self, _free_silently, peers, self._bases)
        self._end.atexit = False  # the end of the process frees the memory
        self._peers = peers
        try:
            for rank in range(peers.world):
                self._bases.append(peers.allocate(rank, self._layout.size))
            self.bases, self.word_bases = zip(*self._bases, strict=True)
            self.signals = signals or self._probed()
            for rank in range(peers.world):
                self._fill(rank)
        except BaseException:
            self._end()
            raise

    def _probed(self) -> str:
        """Return the kind of signals that reaches all devices; windows must be zeroed."""
        peers, kinds = self._peers, self._peers.kinds()
        if peers.world == 1:
            return kinds[0]

        def complaints(kind: str, value: int) -> list[str]:
            probes = [
                Probe(
                    peers.open(rank), self.bases, self.word_bases, self._layout, rank,
                    peers.writable(kind, rank),
                )
                for rank in range(peers.world)
            ]  # fmt: skip
            errors = [probe.send(value) for probe in probes]
            return errors if any(errors) else [probe.look(value) for probe in probes]

        return first_that_arrives(kinds, complaints)

    def _fill(self, rank: int) -> None:
        """Bring a window into its initial state."""
        peers, layout, (base, words) = self._peers, self._layout, self._bases[rank]
        peers.fill(rank, base, 0, layout.size // 4)
        for copy in range(COPIES):
            first = words + copy * WORDS_BYTES
            peers.fill(rank, first, 0, WORDS_BYTES // 4)
            peers.fill(rank, first + 4 * signal_place(Signal(rank, "free", 0)), 1, peers.world)
        mail = (layout.size - layout.mail_data) // 4
        peers.fill(rank, base + layout.mail_data, VACANT, mail)
        peers.synchronize(rank)

    def view(self, rank: int) -> Window:
        """Return a rank's view of the windows; the view keeps their memory."""
        writable = self._peers.writable(self.signals, rank)
        return Window(self.bases, rank, self.sizes, self, writable, self.word_bases)

    def close(self) -> None:
        """Wait for all devices, then free the windows; a second call does nothing.

        Raises:
            EngineError: a device has failed; the windows of the others are freed.
        """
        if self._end.detach() is not None:
            _free(self._peers, self._bases)

    def leave(self) -> None:
        """Never free the windows, because a device still uses them."""
        self._end.detach()


def _free(peers: Peers, bases: list[tuple[int, int]]) -> None:
    errors = []
    for rank in range(peers.world):
        try:
            peers.synchronize(rank)  # any device may still write to any window
        except EngineError as error:
            errors.append(error)
    while bases:
        memory = bases.pop()
        try:
            peers.free(len(bases), *memory)
        except EngineError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _free_silently(peers: Peers, bases: list[tuple[int, int]]) -> None:
    with contextlib.suppress(EngineError):  # a finalizer has no caller to report to
        _free(peers, bases)


def _no_access(pairs: Sequence[str]) -> EngineError:
    return EngineError(
        f"no peer access from device {', '.join(pairs)}, which windows need; use devices that "
        "NVLink or one PCIe switch connects (nvidia-smi topo -p2p r shows them), named by "
        "CUDA_VISIBLE_DEVICES (from CUDA 13.5 on the driver also refuses PCIe pairs that an IOMMU "
        "or PCI ACS separates)"
    )


def _status(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a driver function; return its status, then its results."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as missing:
        raise EngineError(
            f"GPUs of one process need cuda-bindings ({missing}); pip install 'ficco[cuda]'"
        ) from missing
    try:
        results: tuple[Any, ...] = getattr(driver, name)(*arguments)
    except RuntimeError as missing:  # there is no driver, or it has no such function
        raise EngineError(f"{name}: {missing}; install a newer NVIDIA driver") from missing
    return results


def _call(name: str, *arguments: Any, task: str) -> Any:
    """Call a driver function; return its first result, or raise EngineError."""
    status, *results = _status(name, *arguments)
    if int(status) != 0:
        raise _refused(task, name, status)
    return results[0] if results else None


def _refused(task: str, call: str, status: Any) -> EngineError:
    remedy = "if the device has failed, start a new process"
    if int(status) == _OUT_OF_MEMORY:
        remedy = "free memory of that device, or run a smaller problem"
    return EngineError(f"{task}: {call} answers {status.name} ({int(status)}); {remedy}")
