"""Memory of an AMD device that other processes of the host open, for windows.

Nothing here has run on AMD's hardware; see "AMD" in docs/design.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from ficco import _native
from ficco.engines.window_layout import COPIES, WORDS_BYTES

__all__ = ["GpuError", "SharedMemory"]

GpuError = _native.GpuError


class SharedMemory:
    """A rank's memory: of all of its window and mailbox, and of the words, which are not cached.

    It is freed with the last reference, and no longer open then.

    Args:
        device: number of the device.
        size: bytes of the window and the mailbox.

    Attributes:
        addresses: of both parts.

    Raises:
        GpuError: the device has too little memory, or a call of HIP fails.
    """

    def __init__(self, device: int, size: int) -> None:
        self._device = device
        self.addresses: list[int] = []
        self._opened: list[int] = []
        self._end = weakref.finalize(self, _free, device, self.addresses, self._opened)
        self._end.atexit = False  # the end of the process frees the memory
        self.addresses.append(_native.hip_new_window_memory(device, size, False))
        self.addresses.append(_native.hip_new_window_memory(device, COPIES * WORDS_BYTES, True))

    def exported(self) -> list[str]:
        """Return a handle for each part, as text, for other processes."""
        return [_native.hip_export_memory(self._device, each).hex() for each in self.addresses]

    def opened(self, handles: Sequence[str]) -> list[int]:
        """Return the addresses of another process's parts in this one.

        The device is allowed to access all that it can: HIP before rocm-systems pull request 817
        does not do so when it opens a handle.
        """
        found = []
        for peer, reached in enumerate(_native.hip_capabilities(self._device)[-1]):
            if reached and peer != self._device:
                _native.hip_reach(self._device, peer)
        for handle in handles:
            found.append(_native.hip_open_memory(self._device, bytes.fromhex(handle)))
            self._opened.append(found[-1])
        return found


def _free(device: int, own: Sequence[int], opened: Sequence[int]) -> None:
    for address in opened:
        _ignoring(_native.hip_close_memory, device, address)
    for address in own:
        _ignoring(_native.hip_delete_window_memory, device, address)


def _ignoring(call: Callable[[int, int], None], device: int, address: int) -> None:
    try:
        call(device, address)
    except GpuError:  # a finalizer has no caller to report to
        return
