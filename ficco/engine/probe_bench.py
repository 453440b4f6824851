"""What the probes of devices work with: each device's calls, streams, memory and kernels."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ficco import _native
from ficco.core.errors import EngineError
from ficco.engine.gpus import Gpus
from ficco.engine.window_layout import COPIES, WORDS_BYTES
from ficco.kernels.probe_code import KernelCode, ProbeCode

INBOX = 16 << 20  # bytes of data that a device receives at once
ANSWERS_S = 2.0  # time limit of work that does not wait for anything
_HOLDS_S = 5.0  # after which the holding kernel ends by itself
_FILLS_S = 2.0  # time limit until all blocks run
_LOOK_S = 1e-4


class Ran(NamedTuple):
    """A loaded kernel, and how it is launched."""

    handle: int
    code: KernelCode
    blocks: int


class Holder:
    """A kernel that occupies all thread slots of a device.

    Args:
        calls: of the device.
        code: the kernel.
        device: its number, for messages.

    Raises:
        EngineError: other work occupies the device. GpuError: a driver call fails.
    """

    def __init__(self, calls: _native.DriverCalls, code: KernelCode, device: int) -> None:
        self._calls, self._device = calls, device
        self._stream = calls.new_stream(False)
        processors, threads, self._ticks = calls.extent
        self._kernel = loaded(calls, code, processors * (threads // code.threads))
        page = calls.new_host_page(4 * (self._kernel.blocks + 1))
        self._begun = page[1]
        self._words = (ctypes.c_uint32 * (self._kernel.blocks + 1)).from_address(page[0])
        self._words[self._kernel.blocks] = 1  # a launch that ends at once loads the kernel
        self._launch()
        settle(calls, self._stream, device, "loading its kernels")

    def _launch(self) -> None:
        go = self._begun + 4 * self._kernel.blocks
        values = (self._begun, go, int(_HOLDS_S * self._ticks))
        launch(self._calls, self._kernel, values, self._stream)

    def hold(self) -> None:
        """Launch the kernel, which runs until `release`."""
        for block in range(self._kernel.blocks + 1):
            self._words[block] = 0
        self._launch()

    def wait_until_held(self) -> None:
        """Wait until the kernel has every thread slot."""
        end = time.monotonic() + _FILLS_S
        while (running := sum(self._words[: self._kernel.blocks])) < self._kernel.blocks:
            if time.monotonic() > end:
                raise EngineError(
                    f"filling device {self._device}: {running} of {self._kernel.blocks} blocks run "
                    f"after {_FILLS_S:g} s, other work uses the rest; stop it, and try again"
                )
            time.sleep(_LOOK_S)

    def release(self) -> bool:
        """End the kernel; return whether it ran until now."""
        held = not self._calls.ends(self._stream, 0)
        self._words[self._kernel.blocks] = 1
        settle(self._calls, self._stream, self._device, "ending a kernel")
        return held


@contextlib.contextmanager
def held(holders: Sequence[Holder]) -> Iterator[None]:
    """Occupy devices during the `with` block."""
    try:
        for holder in holders:
            holder.hold()
        for holder in holders:
            holder.wait_until_held()
        yield
    finally:
        ran = [holder.release() for holder in holders]
    if not all(ran):
        raise EngineError(
            f"filling devices: the kernel reached its time limit of {_HOLDS_S:g} s; try again on "
            "a less busy host"
        )


def loaded(calls: _native.DriverCalls, code: KernelCode, blocks: int) -> Ran:
    """Load a kernel."""
    return Ran(calls.load(code.image, code.entry, code.shared_bytes), code, blocks)


def launch(calls: _native.DriverCalls, kernel: Ran, values: Sequence[int], stream: int) -> None:
    """Launch a kernel."""
    shape = (kernel.blocks, kernel.code.threads)
    calls.launch(kernel.handle, shape, kernel.code.shared_bytes, values, stream)


def settle(
    calls: _native.DriverCalls, stream: int, device: int, task: str, seconds: float = ANSWERS_S
) -> None:
    """Wait for a stream whose work ends by itself in this time.

    Raises:
        EngineError: it does not.
    """
    if not calls.ends(stream, seconds):
        raise EngineError(
            f"testing device {device}: {task} takes more than {seconds:g} s; stop other work on "
            "it, or start a new process if the device has failed"
        )


class Seat:
    """One device of a process that has several.

    Args:
        peers: the devices.
        rank: of this one.

    Attributes:
        calls: calls of the driver.
        stream, urgent: streams, as the caller's and as those of programs' copies.
        inbox, outbox: addresses of `INBOX` bytes each.
        words: address of its words.
        wrong, ignored: addresses of words that comparisons add to.
        wait_words: addresses of the host's words of a wait; see `_native.DriverCalls.await_`.
        streams_wait: whether programs' waits are those of streams; otherwise kernels wait.
        holder: the kernel that occupies the device, after `load`.
    """

    holder: Holder

    def __init__(self, peers: Gpus, rank: int) -> None:
        self.rank, self.ordinal = rank, peers.devices[rank]
        self.calls = peers.calls(rank)
        self.stream = self.calls.new_stream(False)
        self.urgent = self.calls.new_stream(True)
        asked = os.environ.get("FICCO_WAITS", "")
        self.streams_wait = self.calls.waits_by_streams and asked != "kernel"
        wait_page = self.calls.new_host_page(12)
        self._wait = (ctypes.c_uint32 * 3).from_address(wait_page[0])
        self.wait_words = (wait_page[1], wait_page[1] + 4, wait_page[1] + 8)
        self.memory = peers.new_memory(rank, COPIES * WORDS_BYTES + 2 * INBOX + 512)
        base, self.words = self.memory.addresses
        self.inbox = base + COPIES * WORDS_BYTES
        self.outbox = self.inbox + INBOX
        self.wrong = self.outbox + INBOX
        self.ignored = self.wrong + 4

    def load(self, code: ProbeCode) -> None:
        """Load the kernels."""
        self.holder = Holder(self.calls, code.hold, self.ordinal)
        self._compare = loaded(self.calls, code.compare, self.calls.extent[0])

    def reset_wait(self) -> None:
        """Clear the host's words of waits."""
        for word in range(len(self._wait)):
            self._wait[word] = 0

    def stop(self) -> None:
        """Stop the wait of the device."""
        self._wait[0] = 1

    @property
    def missed(self) -> int:
        """The largest number of a word that a wait has missed."""
        return self._wait[2]

    def compare(self, data: int, size: int, byte: int, stream: int, count: int) -> None:
        """Add the words of a range whose bytes are not all `byte` to the word at `count`."""
        launch(self.calls, self._compare, (data, size // 4, 0x01010101 * byte, count), stream)

    def compared(self) -> int:
        """Return the sum of the comparisons on `stream` since the last call, and begin a new one.

        Every block counts the same words once.
        """
        found = self.calls.read(self.wrong, 4, self.stream, ANSWERS_S)
        self.calls.fill(self.wrong, 0, 4, self.stream)
        return -(-int.from_bytes(found, "little") // self._compare.blocks)

    def idle(self) -> bool:
        """Return whether the streams end in time; not if the device has failed."""
        try:
            return all(self.calls.ends(each, ANSWERS_S) for each in (self.stream, self.urgent))
        except _native.GpuError:
            return False

    def settle(self, stream: int, task: str, seconds: float = ANSWERS_S) -> None:
        """Wait for a stream of the device; see the function `settle`."""
        settle(self.calls, stream, self.ordinal, task, seconds)


class Bench:
    """All devices of a process, ready for probes. `close` frees their memory."""

    def __init__(self, peers: Gpus) -> None:
        self._peers = peers
        self.seats: list[Seat] = []
        try:
            for rank in range(peers.world):
                self.seats.append(Seat(peers, rank))
            for seat in self.seats:
                seat.load(peers.probe_code(seat.rank))
                seat.calls.fill(seat.wrong, 0, 8, seat.stream)
                seat.settle(seat.stream, "filling memory")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory of devices that are idle; busy ones keep theirs."""
        busy = [seat for seat in self.seats if not seat.idle()]
        while self.seats:
            seat = self.seats.pop()
            if not busy:  # else copies may still arrive
                seat.memory.free()

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that occupies all devices."""
        return held([seat.holder for seat in self.seats])

    def enqueue(
        self, captured: bool, stream: str, jobs: Sequence[Callable[[], None]]
    ) -> Callable[[], None]:
        """Return a call that submits each seat's job to its stream of this name.

        Args:
            captured: whether the jobs become graphs, which the call launches.
            stream: attribute of seats.
            jobs: one per seat.
        """
        runs = jobs
        if captured:
            places = [(seat.calls, getattr(seat, stream)) for seat in self.seats]
            runs = [
                partial(calls.replay, calls.capture(at, job), at)
                for (calls, at), job in zip(places, jobs, strict=True)
            ]

        def submit() -> None:
            for run in runs:
                run()

        return submit


def in_turns(seats: Sequence[Seat]) -> Iterator[list[tuple[Seat, Seat]]]:
    """Return (sender, receiver) pairs in which everyone sends once and receives once."""
    world = len(seats)
    for turn in range(1, world):
        yield [(seats[rank], seats[(rank + turn) % world]) for rank in range(world)]
