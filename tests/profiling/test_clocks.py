"""The times of calls on the host and on a GPU."""

from __future__ import annotations

import time
from typing import Any

from ficco.measure import host_us


class Device:
    """A clock that calls advance, and events that read it."""

    def __init__(self) -> None:
        self.now_ms, self.waits = 0.0, 0

    def call(self) -> None:
        self.now_ms += 3.0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._at_ms = device, 0.0

    def record(self) -> None:
        self._at_ms = self._device.now_ms

    def synchronize(self) -> None:
        self._device.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return end._at_ms - self._at_ms


def test_host_us_is_the_mean_of_all_calls(monkeypatch: Any) -> None:
    device = Device()
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_ms / 1e3)
    assert round(host_us(device.call, 4)) == 3000 and device.now_ms == 12.0


def test_device_ms_is_the_mean_between_two_events(torch: Any, monkeypatch: Any) -> None:
    from ficco.measure.clock import device_ms

    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    device.call()
    assert device_ms(device.call, 4) == 3.0 and device.waits == 1
    assert device_ms(device.call) == 3.0 and device.now_ms == 18.0
