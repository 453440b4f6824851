"""Probes of the devices of one process: what programs rely on, measured on this machine.

    arrive      copies bring all of their bytes to every peer
    engines     copies and signals end while kernels occupy all of the devices
    order       no signal arrives before the data in front of it
    release     a wait ends when the host says so, and after its time limit
    rates       how long copies take, with all devices sending at once

The calls are those of programs. The first three are made by calls and by graphs. Probes occupy the
devices, so that other work on them waits; with two devices they take less than a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ficco.core.errors import EngineError, counted
from ficco.engine.gpus import Gpus
from ficco.engine.probe_bench import ANSWERS_S, INBOX, Bench, Seat, in_turns

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (4, 60, 16 * _KIB, 64 * _KIB, _MIB, 4 * _MIB)  # AMD's library chooses by such limits
_WAYS = ("by calls", "by graphs")
_ENDS_S = 0.25  # a copy that takes longer waits for a kernel
_SLOTS = 16  # of an inbox, for signals in a row
_SLOT = 256 * _KIB
_ORDERED = (64, 4 * _KIB, 64 * _KIB, _SLOT)  # bytes in front of a signal
_ROUNDS = 1024  # signals in all, at least
_STOPPED_S, _LIMIT_S = 0.02, 0.05
_PROMPT_S = 1.0  # within which a wait must end
_RATED, _SMALL = 4, 32  # copies of INBOX bytes, and of 4 bytes
_UNUSED = _SLOTS + 2  # a word that no other probe reads
_NAN_BYTES, _NUMBER = 4 * _KIB, 7  # of a wait for a signal that never comes
NAMES = ("arrive", "engines", "order", "release", "rates")
_MAY_HANG = ("order", "release")  # if these do not end, the devices are not to be used
_SLOWEST = 0.5  # of the fastest pair's rate


class Verdict(NamedTuple):
    """The result of a probe.

    Attributes:
        name: of the probe.
        ok: whether programs can rely on it.
        found: what was found, with a number.
        numbers: the same as JSON.
    """

    name: str
    ok: bool
    found: str
    numbers: Mapping[str, Any]


def probe(
    peers: Gpus, signals: str, say: Callable[[str], None] = lambda text: None
) -> list[Verdict]:
    """Probe all devices of a process.

    Args:
        peers: two devices or more.
        signals: the kind of signals, see `ficco.engine.peer_signals`.
        say: told what is probed next.

    Raises:
        EngineError: a device does not answer, or other work occupies it.
        GpuError: a driver call fails.
    """
    bench = Bench(peers)
    try:
        verdicts = []
        runs = (_arrive, _engines, _order, _release, _rates)
        for name, run in zip(NAMES, runs, strict=True):
            say(f"probe {name}")
            try:
                verdicts.append(Verdict(name, *run(bench, signals)))
            except EngineError as error:
                if name not in _MAY_HANG:
                    raise
                verdicts.append(Verdict(name, False, str(error), {}))
                break
        skipped = f"not probed, because {verdicts[-1].name} did not end"
        left = NAMES[len(verdicts) :]
        return [*verdicts, *[Verdict(name, False, skipped, {}) for name in left]]
    finally:
        bench.close()


_Result = tuple[bool, str, dict[str, Any]]


# ---- bytes


def _arrive(bench: Bench, signals: str) -> _Result:
    missing, bytes_ = [], itertools.cycle(range(1, 256))
    for size, captured in itertools.product(_SIZES, (False, True)):
        for pairs in in_turns(bench.seats):
            byte = next(bytes_)
            for sender, receiver in pairs:
                sender.calls.fill(sender.outbox, byte, size, sender.urgent)
                receiver.calls.fill(receiver.inbox, 0, size, receiver.stream)
            _settle(bench, "filling memory")
            jobs = [_copy_job(sender, receiver, size) for sender, receiver in pairs]
            bench.enqueue(captured, "urgent", jobs)()
            _settle(bench, "a copy to a peer")
            for _, receiver in pairs:
                receiver.compare(receiver.inbox, size, byte, receiver.stream, receiver.wrong)
            for sender, receiver in pairs:
                if wrong := receiver.compared():
                    missing.append(
                        f"{wrong} of {size // 4} words of a copy from device {sender.ordinal} to "
                        f"device {receiver.ordinal}, {_WAYS[captured]}, did not arrive"
                    )
    sizes = f"{_size(_SIZES[0])} to {_size(_SIZES[-1])}"
    every = f"copies of {sizes} bring all bytes to every peer, by calls and by graphs"
    return not missing, missing[0] if missing else every, {"missing": missing}


def _copy_job(sender: Seat, receiver: Seat, size: int) -> Callable[[], None]:
    return lambda: sender.calls.copy(receiver.inbox, sender.outbox, size, sender.urgent)


# ---- copy engines


def _engines(bench: Bench, signals: str) -> _Result:
    waiting: dict[str, list[int]] = {}
    seats = bench.seats
    for size, captured in itertools.product(_SIZES, (False, True)):

        def to_all(sender: Seat, size: int = size) -> None:
            for receiver in seats:
                if receiver is sender:
                    continue
                sender.calls.copy(receiver.inbox, sender.outbox, size, sender.urgent)
                if signals == "write":
                    sender.calls.write(receiver.words + 4 * _UNUSED, 1, sender.urgent)

        jobs = [partial(to_all, seat) for seat in seats]
        submit = bench.enqueue(captured, "urgent", jobs)
        with bench.held():
            submit()
            end = time.monotonic() + _ENDS_S
            late = [
                seat.ordinal
                for seat in seats
                if not seat.calls.ends(seat.urgent, max(end - time.monotonic(), 0))
            ]
        _settle(bench, "a copy to a peer")
        if late:
            waiting[f"{_size(size)}, {_WAYS[captured]}"] = late
    if not waiting:
        found = f"copies of {_size(_SIZES[0])} to {_size(_SIZES[-1])} end while kernels occupy all"
        return True, f"{found} devices, by calls and by graphs", {"waiting": {}}
    devices = sorted(set(itertools.chain(*waiting.values())))
    found = (
        f"copies of {'; '.join(waiting)} wait for a kernel that occupies the devices (from "
        f"{counted(len(devices), 'device')}: {', '.join(map(str, devices))}): kernels do them, no "
        "copy engine"
    )
    return False, found, {"waiting": waiting}


# ---- order


def _order(bench: Bench, signals: str) -> _Result:
    seats, early, signalled = bench.seats, [], 0
    world = len(seats)
    batches = max(4, -(-_ROUNDS // (_SLOTS * world * (world - 1))))
    values = itertools.cycle(range(1, 256))
    for batch, pairs in itertools.product(range(batches), list(in_turns(seats))):
        value, captured = next(values), batch % 2 == 1
        for sender, _ in pairs:
            sender.calls.fill(sender.outbox, value, _SLOT, sender.urgent)
        _settle(bench, "filling memory")
        jobs = [_signal_job(*pair, value, signals) for pair in pairs]
        submit = bench.enqueue(captured, "urgent", jobs)
        if seats[0].calls.one_queue:  # copies behind a wait would not go
            submit()
        for _, receiver in pairs:
            _await_slots(receiver, value)
        if not seats[0].calls.one_queue:
            submit()
        arrived = {receiver: _received(receiver, value) for _, receiver in pairs}
        for sender, receiver in pairs:
            where = f"from device {sender.ordinal} to device {receiver.ordinal}, {_WAYS[captured]}"
            if not arrived[receiver]:
                early.append(f"a signal {where}, did not arrive within {ANSWERS_S:g} s")
            elif wrong := receiver.compared():
                early.append(f"{wrong} words {where}, arrived after the signal behind them")
            signalled += _SLOTS
        if early:
            _settle(bench, "a copy to a peer")
            break
    said = f"{signalled} signals, none before its data of {_size(_ORDERED[0])} to {_size(_SLOT)}"
    return not early, early[0] if early else said, {"signals": signalled, "early": early}


def _slots(value: int) -> Iterator[tuple[int, int, int]]:
    """Return each slot's number, the offset of its data, and their size."""
    for slot in range(_SLOTS):
        yield slot, slot * _SLOT, _ORDERED[(slot + value) % len(_ORDERED)]


def _signal_job(sender: Seat, receiver: Seat, value: int, signals: str) -> Callable[[], None]:
    calls, stream = sender.calls, sender.urgent
    constant = calls.constant(value)  # written before a capture begins

    def job() -> None:
        for slot, offset, size in _slots(value):
            calls.copy(receiver.inbox + offset, sender.outbox, size, stream)
            word = receiver.words + 4 * slot
            if signals == "write":
                calls.write(word, value, stream)
            else:
                calls.copy(word, constant, 4, stream)

    return job


def _await_slots(receiver: Seat, value: int) -> None:
    """Enqueue for each slot: a read of the old data, a wait, a read that counts old data."""
    calls, stream = receiver.calls, receiver.stream
    for slot, offset, size in _slots(value):
        data = receiver.inbox + offset
        receiver.compare(
            data, size, value, stream, receiver.ignored
        )  # caches may keep what it reads
        word = receiver.words + 4 * slot
        if receiver.streams_wait:
            calls.wait(word, value, stream)
        else:
            calls.await_([(word, value, 1)], receiver.wait_words, 2 * ANSWERS_S, 0, 0, stream)
        receiver.compare(data, size, value, stream, receiver.wrong)


def _received(receiver: Seat, value: int) -> bool:
    """Wait for a batch; return whether all signals arrived. The others are raised here."""
    calls = receiver.calls
    arrived = calls.ends(receiver.stream, ANSWERS_S)
    if not arrived:
        receiver.stop()
        for slot in range(_SLOTS if receiver.streams_wait else 0):
            calls.write(receiver.words + 4 * slot, value, receiver.urgent)
        receiver.settle(receiver.stream, "waiting for signals")
    return arrived


# ---- waits


def _release(bench: Bench, signals: str) -> _Result:
    wrong: list[str] = []
    stopped, limited = [], []
    for seat in bench.seats:
        took = _wait_time(seat, ANSWERS_S * 2, _STOPPED_S)
        stopped.append(took)
        if took > _PROMPT_S:
            wrong.append(f"a wait on device {seat.ordinal} went on for {took:.2f} s when stopped")
        wrong += _traces(seat)
        took = _wait_time(seat, _LIMIT_S, None)
        limited.append(took)
        if not _LIMIT_S * 0.9 < took < _LIMIT_S + _PROMPT_S:
            wrong.append(
                f"a wait on device {seat.ordinal} with a limit of {_LIMIT_S:g} s took {took:.2f} s"
            )
        if seat.calls.waits_by_streams and not _stream_is_released(seat):
            wrong.append(f"a write did not end the wait of a stream of device {seat.ordinal}")
    found = (
        f"waits end {max(stopped) * 1e3:.1f} ms after the host says so, and "
        f"{max(limited) * 1e3:.1f} ms after they began with a limit of {_LIMIT_S * 1e3:g} ms"
    )
    numbers = {"stopped_s": stopped, "limited_s": limited, "wrong": wrong}
    return not wrong, wrong[0] if wrong else found, numbers


def _wait_time(seat: Seat, limit_s: float, stop_after_s: float | None) -> float:
    """Wait for a signal that never comes; return the seconds from the stop, or else the begin."""
    seat.reset_wait()
    seat.calls.fill(seat.inbox, 0, _NAN_BYTES, seat.stream)
    seat.settle(seat.stream, "filling memory")
    begin = time.monotonic()
    absent = [(seat.words + 4 * _SLOTS, 1, _NUMBER)]
    seat.calls.await_(absent, seat.wait_words, limit_s, seat.inbox, _NAN_BYTES, seat.stream)
    if stop_after_s is not None:
        seat.calls.ends(seat.stream, stop_after_s)
        begin = time.monotonic()
        seat.stop()
    seat.settle(seat.stream, "a wait", limit_s + ANSWERS_S)
    return time.monotonic() - begin


def _traces(seat: Seat) -> list[str]:
    """Return what a wait that was given up should have left and did not."""
    wrong = []
    if seat.missed != _NUMBER:
        wrong.append(
            f"a wait on device {seat.ordinal} reported the word {seat.missed}, not {_NUMBER}"
        )
    seat.calls.fill(seat.wrong, 0, 4, seat.stream)
    seat.compare(seat.inbox, _NAN_BYTES, 0xFF, seat.stream, seat.wrong)
    if seat.compared():
        wrong.append(f"a wait on device {seat.ordinal} gave up and did not set its data to NaN")
    return wrong


def _stream_is_released(seat: Seat) -> bool:
    """Return whether a write ends the wait of a stream, as the watchdog's does."""
    if seat.calls.one_queue:
        return True  # the watchdog opens the device again; see `GpuFacts.apart`
    word = seat.words + 4 * (_SLOTS + 1)
    seat.calls.wait(word, 1, seat.stream)
    seat.calls.write(word, 1, seat.urgent)
    return seat.calls.ends(seat.stream, _PROMPT_S)


# ---- rates


def _rates(bench: Bench, signals: str) -> _Result:
    took_us = _took_us(bench, INBOX, _RATED)
    rates = {pair: round(INBOX / us / 1e3, 2) for pair, us in took_us.items()}
    small = {pair: round(us, 2) for pair, us in _took_us(bench, 4, _SMALL).items()}
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    found = (
        f"{rates[slow]:.1f} ({slow}) to {rates[fast]:.1f} ({fast}) GB/s, all devices send at once; "
        f"a copy of 4 B takes {min(small.values()):.1f} to {max(small.values()):.1f} us"
    )
    numbers = {"gbps": rates, "small_copy_us": small}
    return rates[slow] >= _SLOWEST * rates[fast], found, numbers


def _took_us(bench: Bench, size: int, count: int) -> dict[str, float]:
    """Return the time of a copy of each pair, the mean of `count` in a row."""
    took = {}
    for pairs in in_turns(bench.seats):
        events = {}
        for sender, receiver in pairs:
            calls, stream = sender.calls, sender.urgent
            events[sender] = calls.new_event(), calls.new_event()
            for copy in range(1 + count):
                if copy == 1:  # the first one is not measured
                    calls.record(events[sender][0], stream)
                calls.copy(receiver.inbox, sender.outbox, size, stream)
            calls.record(events[sender][1], stream)
        _settle(bench, "a copy to a peer")
        for sender, receiver in pairs:
            us = sender.calls.elapsed_us(*events[sender])
            took[f"{sender.ordinal} to {receiver.ordinal}"] = max(us, 1e-3) / count
    return took


def _settle(bench: Bench, task: str) -> None:
    """Wait for all devices, whose work waits for nothing."""
    for seat in bench.seats:
        for stream in (seat.urgent, seat.stream):
            seat.settle(stream, task)


def _size(count: int) -> str:
    """Return a size in bytes as text."""
    for unit, name in ((_MIB, "MiB"), (_KIB, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"
