"""Records of ficco's own kernels that programs launch: one for each kind of work.

A record says how a kernel is prepared for a work, which matrices of a call it takes, and what it is
launched with. `ficco.engine.compute.own_kernels` reads all records in one loop, for both vendors
and every array library. A new kernel is a declaration (`Kernel`), a device function, and a record
that `register` adds.

Operands are the matrices of a call by name. An argument of a launch that is an operand, or the
stride of one (`arrays.call_stride`), or is named "copy", differs between calls of a plan; native
code reads it from the call. All other arguments are constants of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ficco.kernels.arrays import Bulk, CallStride, item_bytes
from ficco.kernels.declarations import Kernel
from ficco.kernels.native_launch import Copy, Pitch, Place
from ficco.kernels.variants import Launch, flattened
from ficco.plan import Buffer, Region
from ficco.program.tiling import Tile

Operands = Mapping[str, Any]  # handles, or their places, by name; None: there is no such matrix
Idle = Mapping[str, int | tuple[int, ...]]  # arguments by name
LaunchOf = Callable[[Operands, int], Launch | None]  # of a call's operands and window copy


class Of(Protocol):
    """Returns the handle, or the place, of a region."""

    def __call__(self, region: Region, turned: bool | None = None) -> Any:
        """Return that of a region; `turned`: of a weight, and whether it is stored transposed."""


class Places(NamedTuple):
    """Addresses of all ranks' windows or mailboxes on this rank's device.

    Attributes:
        words: [copy][rank], addresses of the words, for each of two copies.
        data: [copy][rank], addresses of the data.
        counts: int32 words with this rank's call counts of its mailbox, a tensor or `Address`; None
            for windows.
    """

    words: Sequence[Sequence[int]]
    data: Sequence[Sequence[int]]
    counts: Any = None


class Setting(NamedTuple):
    """What the launches of a bound program have in common.

    Attributes:
        windows, mail: addresses of all ranks' windows and mailboxes.
        digest: digest of the plan.
        timeout_s: time limit of the group; results that depend on a word which does not arrive in
            time are NaN.
        stop_word: returns the address of a word in device memory. While the word is not 0, launches
            do not wait.
        shared: what launches of the program share, by key.
        missed_word: address at which a launch reports the word that it missed.
        reports: whether launches that wait for parts report words that they miss, too.
        buffers: of the program, by name.
        tile: tile of gated products; None: the best tile.
        arrays: the array library of the device.
    """

    windows: Places
    mail: Places
    digest: int
    timeout_s: float
    stop_word: Callable[[], int]
    shared: dict[Any, Any]
    missed_word: int = 0
    reports: bool = False
    buffers: Mapping[str, Buffer] = {}
    tile: Tile | None = None
    arrays: Any = None


class Record(NamedTuple):
    """A kernel, or several that do the same work.

    Attributes:
        kernels: their declarations.
        operands: returns a work's operands by name; it gets the work, a function `Of`, and the
            regions of all inputs, weights and results of the program by name.
        prepare: returns the launches of a work as a function of a call; it may copy to the device.
            None instead of a launch: there is nothing to do.
        idle: arguments with which a launch does nothing.
        state: sizes of arrays of int32 that are 0 between launches, which an idle launch must not
            share with others.
        in_captures: whether it can be prepared while a CUDA graph is captured.
    """

    kernels: tuple[Kernel, ...]
    operands: Callable[[Any, Of, Mapping[str, Region]], dict[str, Any]]
    prepare: Callable[[Any, Setting], LaunchOf]
    idle: Idle
    state: Mapping[str, int] = {}
    in_captures: bool = False


def places_of(launch: Launch, operands: Operands, places: Operands) -> dict[str, Place]:
    """Return the places of the arguments that differ between calls, by the names of `passed`.

    Args:
        launch: of these operands.
        operands: a different object for each name.
        places: their places.
    """
    place_of = {id(each): places[name] for name, each in operands.items() if each is not None}
    found: dict[str, Place] = {}
    for name, value in flattened(launch.arguments).items():
        if name == "copy":
            found[name] = Copy()
        elif isinstance(value, CallStride):
            slot = place_of[id(value.matrix)].slot
            found[name] = Pitch(slot, item_bytes(value.matrix))
        else:
            matrix = value
            if isinstance(value, Bulk):
                matrix = value.base if value.operand is None else value.operand
            if id(matrix) in place_of:
                found[name] = place_of[id(matrix)]
    return found
