"""Windows for all GPUs of one process, which access each other's memory by peer access.

`Peers` does the one-time setup. The native core does the work of every call.
"""

from __future__ import annotations

import contextlib
import weakref

from ficco.engines.peer_signals import Probe, first_that_arrives
from ficco.engines.peers import Peers
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

__all__ = ["Group", "PeerWindows", "new_group"]

Group = _native.Group


def new_group(world: int, timeout_s: float) -> Group:
    """Return a group that tracks failed ranks of a process; its own windows are not used."""
    return Group(world, timeout_s, None)


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

        return first_that_arrives(kinds, complaints, peers.remedy)

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
