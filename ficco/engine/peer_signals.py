"""Kinds of signals from a GPU to its peers: those a driver allows, and a probe for each.

A GPU raises a signal word in the memory of another device in one of two ways:

    write   a stream memory operation (cuStreamBatchMemOp), many in one driver call
    copy    a copy of four bytes by a copy engine, from a constant in the rank's own memory; on the
            caller's stream, whose commands follow kernels, a kernel stores the words instead

On NVIDIA's GPUs, words of the own device, and of ranks that share it, are always written; on AMD's,
all words are copied. NVIDIA supports stream
writes to a peer's memory up to CUDA 13.0 (NCCL issue 2052). From 13.1 on, ficco issues them only
with FICCO_SIGNALS=write: a write that is not allowed may fault later and destroy the context.

If a driver allows both, writes are preferred: both kinds give equal call times (two shapes on 2 x
H100, bench/NOTES.md), and the shipped profiles and books were measured with writes. After a copy
to each of 1, 3, 7 peers, the device takes 0.4 to 1.3, 1.7 to 3.1, 4 to 5 us less by copies than by
writes, and the host 0.7, 2, 5 to 7 us more. After a kernel, the device takes 0.9 us more for a
stored word than for a written one in a graph, and 2.7 us more eagerly. From three words on, both
kinds store (bench/results/signals_h100x2.json).

When a group opens, every rank sends data and signals to every peer over the group's own windows,
by calls and by a graph. The first kind that arrives at all peers is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ficco import _native
from ficco.core.errors import DevicesRefused, InputError
from ficco.engine.window_layout import COPIES, WORDS_BYTES, Layout

_log = logging.getLogger("ficco")
_KINDS = ("write", "copy")
_PREFERRED = "write"  # where a driver allows both
_LAST_WITH_WRITES = 13000  # the newest version of CUDA that supports stream writes to peers
REMEDY = (
    "check peer access with `nvidia-smi topo -p2p r`, or set CUDA_VISIBLE_DEVICES to GPUs that one "
    "switch connects"
)
_WITHIN_S = 2.0  # time limit for all signals of a probe
_MISSING = (
    "",
    "the signal after the data did not arrive",
    "the signal arrived before its data",
    "the signal after kernels did not arrive",
)
_ROUNDS = ("by calls", "captured into a graph")


class SignalsRefused(DevicesRefused):
    """No kind of signal reaches all peers. All ranks raise this error."""


def allowed_kinds() -> tuple[str, ...]:
    """Return the kinds of signals to try on this driver, the preferred one first.

    Raises:
        InputError: FICCO_SIGNALS names an unknown kind.
        GpuError: there is no driver.
    """
    requested = os.environ.get("FICCO_SIGNALS", "")
    if requested and requested not in _KINDS:
        raise InputError(
            f"FICCO_SIGNALS={requested!r} is no kind of signal; set it to 'write' or 'copy', or "
            "unset it to let ficco choose"
        )
    if requested:
        return (requested,)
    if _native.cuda_driver_version() > _LAST_WITH_WRITES:
        return ("copy",)
    return (_PREFERRED, *(kind for kind in _KINDS if kind != _PREFERRED))


def writable_words(kind: str, devices: Sequence[Any], rank: int) -> list[bool]:
    """Return, per rank, whether this rank's streams write to its words.

    Args:
        kind: "write" or "copy".
        devices: device of every rank, by a name that is the same in all processes.
        rank: this rank.
    """
    return [kind == "write" or device == devices[rank] for device in devices]


class Probe:
    """One rank's part in the test of whether a kind of signal arrives.

    Args:
        gpu: the rank's device.
        bases: address of every rank's window, zeroed; the probe overwrites the contents.
        word_bases: address of every rank's words.
        layout: layout of the windows.
        rank: this rank.
        writable: see `writable_words`.
    """

    def __init__(
        self,
        gpu: _native.Gpu,
        bases: Sequence[int],
        word_bases: Sequence[int],
        layout: Layout,
        rank: int,
        writable: list[bool],
    ) -> None:
        words = [base + copy * WORDS_BYTES for base in word_bases for copy in range(COPIES)]
        data = [base + layout.data for base in bases for _ in range(COPIES)]
        window = _native.GpuWindow(words, data, layout.size - layout.data, writable)
        self._rank = rank
        self._native = _native.GpuProbe(gpu, window, rank)

    def send(self, value: int) -> str:
        """Send to every peer; return the driver's error, or ""."""
        try:
            self._native.send(value)
        except _native.GpuError as error:
            return f"rank {self._rank} could not send: {error}"
        return ""

    def look(self, value: int) -> str:
        """Return which signal did not arrive here in time, or ""."""
        try:
            arrived = self._native.look(value, _WITHIN_S)
        except _native.GpuError as error:
            return f"rank {self._rank} could not read its window: {error}"
        for sender, rounds in enumerate(arrived):
            for what, state in zip(_ROUNDS, rounds, strict=True):
                if state:
                    return f"rank {sender} to rank {self._rank}, {what}: {_MISSING[state]}"
        return ""


def first_that_arrives(
    kinds: Sequence[str], complaints: Callable[[str, int], Sequence[str]], remedy: str
) -> str:
    """Return the first kind of signal that reaches all peers.

    Args:
        kinds: the kinds to try, in this order; equal on all ranks.
        complaints: probes a kind with a value and returns one message per rank; a collective call
            if ranks are processes.
        remedy: what to do if none does.

    Raises:
        SignalsRefused: no kind does.
    """
    reasons = []
    for value, kind in enumerate(kinds, start=1):
        complaint = next((text for text in complaints(kind, value) if text), "")
        if not complaint:
            return kind
        reasons.append(f"kind {kind!r}: {complaint}")
        _log.warning("signals of kind %r are not used: %s", kind, complaint)
    raise SignalsRefused(
        f"signals do not reach all GPUs of the group ({', '.join(reasons)}); {remedy}"
    )
