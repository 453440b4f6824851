"""How a GPU raises words at its peers: which kinds a driver allows, and a probe that each arrives.

A word in the memory of another device is raised in one of two ways:

    write   a stream memory operation (cuStreamBatchMemOp), many in one driver call
    copy    a copy of four bytes by a copy engine, from a constant in the rank's own memory; on the
            caller's stream, whose commands follow kernels, a kernel stores the words instead

Words of the own device, and of ranks that share it, are always written. NVIDIA supports stream
writes to a peer's memory up to CUDA 13.0 (NCCL issue 2052). From 13.1 on none is issued, unless
FICCO_SIGNALS=write asks for it: a write that is not allowed may fault later and end the context.

Where a driver allows both, writes are preferred: calls last as long by either kind (two shapes on 2
x H100, bench/results/ab), and the shipped profiles and books were measured with writes. Behind a
copy to each of 1, 3, 7 peers, a call by copies takes the device 0.4 to 1.3, 1.7 to 3.1, 4 to 5 us
less than by writes, and its host 0.7, 2, 5 to 7 us more. Behind a kernel a stored word takes the
device 0.9 us more than a written one in a graph and 2.7 us more eagerly; from three words on both
kinds store (bench/results/signals_h100x2.json).

When a group opens, every rank sends data and signals to every peer over the group's own windows,
by calls and by a graph. The first kind by which all of them arrive is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ficco import _native
from ficco.engines.window_layout import COPIES, WORDS_BYTES, Layout
from ficco.errors import DevicesRefused, InputError

__all__ = ["Probe", "SignalsRefused", "allowed_kinds", "first_that_arrives", "writable_words"]

_log = logging.getLogger("ficco")
_KINDS = ("write", "copy")
_PREFERRED = "write"  # where a driver allows both
_LAST_WITH_WRITES = 13000  # the newest version of CUDA that supports stream writes to peers
_WITHIN_S = 2.0  # for all to arrive
_MISSING = (
    "",
    "the signal behind the data did not arrive",
    "the signal arrived before its data",
    "the signal that is raised behind kernels did not arrive",
)
_ROUNDS = ("by calls", "captured into a graph")


class SignalsRefused(DevicesRefused):
    """No kind of signal reaches all peers. All ranks raise it alike."""


def allowed_kinds() -> tuple[str, ...]:
    """Return the kinds of signals that may be tried on this driver, the preferred one first.

    Raises:
        InputError: FICCO_SIGNALS names no kind.
        GpuError: there is no driver.
    """
    asked = os.environ.get("FICCO_SIGNALS", "")
    if asked and asked not in _KINDS:
        raise InputError(
            f"FICCO_SIGNALS={asked!r} is no kind of signal; set it to 'write' or 'copy', or unset "
            "it to let ficco choose"
        )
    if asked:
        return (asked,)
    if _native.cuda_driver_version() > _LAST_WITH_WRITES:
        return ("copy",)
    return (_PREFERRED, *(kind for kind in _KINDS if kind != _PREFERRED))


def writable_words(kind: str, devices: Sequence[Any], rank: int) -> list[bool]:
    """Return, per rank, whether this rank's streams write to its words.

    Args:
        kind: "write" or "copy".
        devices: of every rank, in a form by which all processes name a device alike.
        rank: this one.
    """
    return [kind == "write" or device == devices[rank] for device in devices]


class Probe:
    """One rank's part in finding out whether a kind of signal arrives.

    Args:
        device: of the rank, as the driver counts.
        bases: address of every rank's window, zeroed; what lies in them is overwritten.
        layout: of the windows.
        rank: this one.
        writable: see `writable_words`.
    """

    def __init__(
        self, device: int, bases: Sequence[int], layout: Layout, rank: int, writable: list[bool]
    ) -> None:
        words = [base + copy * WORDS_BYTES for base in bases for copy in range(COPIES)]
        data = [base + layout.data for base in bases for _ in range(COPIES)]
        window = _native.GpuWindow(words, data, layout.size - layout.data, writable)
        self._rank = rank
        self._native = _native.GpuProbe(_native.open_cuda(device), window, rank)

    def send(self, value: int) -> str:
        """Send to every peer; return what the driver refused, or nothing."""
        try:
            self._native.send(value)
        except _native.GpuError as error:
            return f"rank {self._rank} could not send: {error}"
        return ""

    def look(self, value: int) -> str:
        """Return what did not arrive here in time, or nothing."""
        try:
            arrived = self._native.look(value, _WITHIN_S)
        except _native.GpuError as error:
            return f"rank {self._rank} could not look: {error}"
        for sender, rounds in enumerate(arrived):
            for what, state in zip(_ROUNDS, rounds, strict=True):
                if state:
                    return f"rank {sender} to rank {self._rank}, {what}: {_MISSING[state]}"
        return ""


def first_that_arrives(
    kinds: Sequence[str], complaints: Callable[[str, int], Sequence[str]]
) -> str:
    """Return the first kind of signal that reaches all peers.

    Args:
        kinds: that may be tried, in this order; equal on all ranks.
        complaints: probes a kind with a value and returns what every rank says of it; a collective
            call where ranks are processes.

    Raises:
        SignalsRefused: none does.
    """
    said = []
    for value, kind in enumerate(kinds, start=1):
        found = next((text for text in complaints(kind, value) if text), "")
        if not found:
            return kind
        said.append(f"kind {kind!r}: {found}")
        _log.warning("signals of kind %r are not used: %s", kind, found)
    raise SignalsRefused(
        f"signals do not reach all GPUs of the group ({', '.join(said)}); check peer access with "
        "`nvidia-smi topo -p2p r`, or name GPUs that one switch connects by CUDA_VISIBLE_DEVICES"
    )
