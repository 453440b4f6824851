"""The kind of signals that reaches all GPUs of a group, found by a probe of its windows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from ficco.engines.peer_signals import Probe, first_that_arrives
from ficco.engines.window_layout import Layout
from ficco.errors import InputError
from ficco.runtime.gpus_of_group import ordinal, vendor

if TYPE_CHECKING:
    from ficco.runtime.process import ProcessRuntime

__all__ = ["ProbedSignals", "probed_signals"]

_log = logging.getLogger("ficco")


class ProbedSignals(NamedTuple):
    """What a probe of a group's windows has found.

    Attributes:
        kind: of the signals that reach all ranks.
        writable: per rank and other rank, whether the streams of the one write to words of the
            other.
        shared: per rank, whether another rank is on the same device.
    """

    kind: str
    writable: list[list[bool]]
    shared: list[bool]


def probed_signals(
    runtime: ProcessRuntime, bases: list[int], word_bases: list[int], layout: Layout
) -> ProbedSignals:
    """Find the kind of signals that reaches all ranks; a collective call on zeroed windows.

    Args:
        runtime: of the group; its windows are new.
        bases: address of each rank's window.
        word_bases: address of each rank's words.
        layout: of a window.

    Raises:
        InputError: the ranks allow different kinds.
        SignalsRefused: no kind reaches all ranks.
    """
    makers, rank, world = vendor(), runtime.rank, runtime.world
    kinds: tuple[str, ...] = ()
    problem = ""
    try:
        kinds = makers.signal_kinds()
    except InputError as error:  # sent to all ranks, so none waits for this one
        problem = str(error)
    own = (makers.capabilities(ordinal()).pci, kinds, problem)
    facts = runtime.gathered(own)  # after this, all windows are zeros
    for other, (_, their_kinds, their_problem) in enumerate(facts):
        if their_problem:
            raise InputError(f"rank {other}: {their_problem}")
        if their_kinds != facts[0][1]:
            raise InputError(
                f"rank 0 may signal by {facts[0][1]} and rank {other} by {their_kinds}; set "
                "FICCO_SIGNALS to the same on every rank"
            )
    addresses = [pci for pci, *_ in facts]
    if world == 1:
        return ProbedSignals("", [[True]], [False])

    def complaints(kind: str, value: int) -> list[str]:
        writable = makers.writable_words(kind, addresses, rank)
        gpu = makers.open_gpu(ordinal())
        probe = Probe(gpu, bases, word_bases, layout, rank, writable)
        errors: list[str] = runtime.gathered(probe.send(value))
        if any(errors):
            return errors
        missing = probe.look(value)
        torch.cuda.synchronize()  # the probe writes nothing after this
        return runtime.gathered(missing)

    kind = first_that_arrives(kinds, complaints, makers.REMEDY)
    _log.info("rank %d raises words at peers by kind %r", rank, kind)
    writable = [makers.writable_words(kind, addresses, each) for each in range(world)]
    return ProbedSignals(kind, writable, [addresses.count(each) > 1 for each in addresses])
