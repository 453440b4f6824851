"""Windows of the GPUs of a group: a window and a mailbox in the memory of every rank's device.

`Gpus` makes and opens the memory. The native core does the work of every call.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ficco.core.errors import EngineError
from ficco.engine.gpus import Exchange, Gpus, in_this_process
from ficco.engine.peer_signals import Probe, first_that_arrives
from ficco.engine.window_layout import COPIES, WORDS_BYTES, Layout, Window
from ficco.plan import Signal, WindowBytes, signal_place
from ficco.plan.tables import VACANT

_left: list[Any] = []  # memory that devices may still use; it is never freed


class PeerWindows:
    """Windows and mailboxes of all ranks, in their initial state; this process has some of them.

    Initially there is no data, every `free` is raised, and the whole mailbox is vacant. To make
    them is a collective call. The memory is freed by `close`, or with the last reference.

    Args:
        gpus: the devices.
        sizes: bytes of one copy.
        memory: of this process's ranks, as `Gpus.allocate` returns it for the `Layout` of these
            sizes; None: it is allocated now.
        exchange: how the ranks exchange values.
        signals: the kind of signals that is known to arrive; None: a probe decides.

    Attributes:
        signals: the kind of signals, see `ficco.engine.peer_signals`.
        bases: address of every rank's memory, laid out by `Layout`.
        word_bases: address of every rank's words, which may have memory of their own.
        sizes: bytes of one copy, rounded up.

    Raises:
        EngineError: a device has too little memory, a driver call fails, or signals do not arrive.
    """

    def __init__(
        self,
        gpus: Gpus,
        sizes: WindowBytes,
        memory: list[Any] | None = None,
        exchange: Exchange = in_this_process,
        signals: str | None = None,
    ) -> None:
        self._layout, self._gpus = Layout(sizes), gpus
        self.sizes = self._layout.sizes
        self._memory = gpus.allocate(self._layout.size) if memory is None else memory
        self._end = weakref.finalize(self, _free_silently, gpus, self._memory)
        self._end.atexit = False  # the end of the process frees the memory
        try:
            self.bases, self.word_bases = gpus.addresses(self._memory, exchange)
            self.signals = self._probed(exchange) if signals is None else signals
            for rank, each in zip(gpus.ranks, self._memory, strict=True):
                self._fill(rank, *each.addresses)
            exchange("use new windows", [None] * len(gpus.ranks))  # before any rank raises a word
        except BaseException:
            self._end()
            raise

    def _probed(self, exchange: Exchange) -> str:
        """Return the kind of signals that reaches all devices; windows must be zeroed."""
        gpus, kinds = self._gpus, self._gpus.kinds(exchange)
        if gpus.world == 1:
            return kinds[0]

        def complaints(kind: str, value: int) -> list[str]:
            probes = [
                Probe(
                    gpus.open(rank), self.bases, self.word_bases, self._layout, rank,
                    gpus.writable(kind, rank),
                )
                for rank in gpus.ranks
            ]  # fmt: skip
            errors = exchange("probe signals", [probe.send(value) for probe in probes])
            if any(errors):
                return errors
            missing = [probe.look(value) for probe in probes]
            for rank in gpus.ranks:
                gpus.synchronize(rank)  # the probes write nothing after this
            return exchange("compare probed signals", missing)

        return first_that_arrives(kinds, complaints, gpus.vendor.REMEDY)

    def _fill(self, rank: int, base: int, words: int) -> None:
        """Bring a window into its initial state."""
        gpus, layout = self._gpus, self._layout
        gpus.fill(rank, base, 0, layout.size // 4)
        for copy in range(COPIES):
            first = words + copy * WORDS_BYTES
            gpus.fill(rank, first, 0, WORDS_BYTES // 4)
            gpus.fill(rank, first + 4 * signal_place(Signal(rank, "free", 0)), 1, gpus.world)
        mail = (layout.size - layout.mail_data) // 4
        gpus.fill(rank, base + layout.mail_data, VACANT, mail)
        gpus.synchronize(rank)

    def view(self, rank: int) -> Window:
        """Return the view of a rank of this process; the view keeps the windows' memory."""
        writable, shared = self._gpus.writable(self.signals, rank), self._gpus.shared(rank)
        return Window(self.bases, rank, self.sizes, self, writable, self.word_bases, shared)

    def close(self) -> None:
        """Wait for this process's devices, then free the memory; a second call does nothing.

        Raises:
            EngineError: a device has failed; the windows of the others are freed.
        """
        if self._end.detach() is not None:
            self._gpus.free(self._memory)

    def leave(self) -> None:
        """Never free the windows, because a device still uses them."""
        if self._end.detach() is not None:
            _left.append(self._memory)


def _free_silently(gpus: Gpus, memory: list[Any]) -> None:
    with contextlib.suppress(EngineError):  # a finalizer has no caller to report to
        gpus.free(memory)
