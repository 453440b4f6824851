"""A test whether copies to memory of other processes end while kernels occupy the devices.

Windows are such memory. A driver may copy to it in another way than to memory of its own process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ficco import _native
from ficco.engine.probe_bench import ANSWERS_S, Holder, settle
from ficco.kernels.probe_code import ProbeCode

_SIZES = (4, 64 << 10, 4 << 20)
LARGEST = _SIZES[-1]  # bytes
_ENDS_S = 0.25


class WindowCopies:
    """One rank's part in the test. All ranks call `hold`, then `late`, then `release`.

    Args:
        gpu: the rank's device.
        code: its kernels.
        device: its number, for messages.
        rank: this rank.
        places: per rank, the address in this process of `LARGEST` bytes, which copies overwrite.

    Raises:
        EngineError: other work occupies the device. GpuError: a driver call fails.
    """

    def __init__(
        self,
        gpu: _native.Gpu,
        code: ProbeCode,
        device: int,
        rank: int,
        places: Sequence[int],
    ) -> None:
        self._calls, self._device = _native.DriverCalls(gpu), device
        self._holder = Holder(self._calls, code.hold, device)
        self._copies: dict[str, tuple[int, Callable[[], None]]] = {}
        for bytes_, captured in itertools.product(_SIZES, (False, True)):
            stream = self._calls.new_stream(True)

            def job(stream: int = stream, count: int = bytes_) -> None:
                for peer, place in enumerate(places):
                    if peer != rank:
                        self._calls.copy(place, places[rank], count, stream)

            way = "by graphs" if captured else "by calls"
            submit = self._replay(stream, job) if captured else job
            self._copies[f"{bytes_} B, {way}"] = stream, submit

    def _replay(self, stream: int, job: Callable[[], None]) -> Callable[[], None]:
        graph = self._calls.capture(stream, job)
        return lambda: self._calls.replay(graph, stream)

    def hold(self) -> None:
        """Occupy the device."""
        self._holder.hold()
        self._holder.wait_until_held()

    def late(self) -> list[str]:
        """Copy to all peers; return which copies do not end."""
        for _, submit in self._copies.values():
            submit()
        late: list[str] = []
        for name, (stream, _) in self._copies.items():
            if not self._calls.ends(stream, 0 if late else _ENDS_S):
                late.append(name)
        return late

    def release(self) -> None:
        """Release the device, and wait for the copies."""
        self._holder.release()
        for stream, _ in self._copies.values():
            settle(self._calls, stream, self._device, "a copy to a peer", ANSWERS_S)
