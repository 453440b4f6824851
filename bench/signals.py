"""Measure the cost of a signal to a peer by kind: a stream write, a 4-byte copy, a stored word.

One rank's program, on GPU 0 of two, sends to several peers whose windows are all on GPU 1. It sends
a matrix and a signal per peer on its push lane, or only the signals on the caller's stream, after a
kernel. Calls are enqueued 20 at a time, or 20 calls are captured into one graph. Times are per
call: the host's time to enqueue, and the device's time from the first call's start to the last
call's end. Kinds are measured in turn. The script needs two GPUs that reach each other.

    python bench/signals.py --out bench/results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import gpus, spread, surroundings

from ficco import _native
from ficco.measure import host_us
from ficco.measure.clock import captured, device_ms, new_events
from ficco.measure.profiling.figures import slug
from ficco.plan import SIGNALS_PER_COPY, Signal, signal_place

CALLS, ROUNDS, WARM = 20, 25, 3
PEERS = (1, 3, 7)
BYTES = (4096, 262_144, 4_194_304)
COPY, RAISE = 0, 1
CALLER, LANE = -1, 0


class Sender:
    """Rank 0 of a group; the memory of all other ranks is on GPU 1."""

    def __init__(self, peers: int) -> None:
        self.peers, world = peers, peers + 1
        words = 2 * SIGNALS_PER_COPY * world
        self.words = [torch.zeros(words, dtype=torch.int32, device=f"cuda:{gpu}") for gpu in (0, 1)]
        self.source = torch.ones(max(BYTES), dtype=torch.uint8, device="cuda:0")
        self.target = torch.zeros(max(BYTES) * peers, dtype=torch.uint8, device="cuda:1")
        self.target.copy_(self.source.repeat(peers))  # enables peer access in PyTorch
        torch.cuda.synchronize()
        self.rank = _native.GpuRank(
            _native.open_cuda(0), _native.Group(world, 60.0, None), 0
        )  # fmt: skip
        self.stream = torch.cuda.Stream("cuda:0")

    def window(self, writes: bool) -> Any:
        """Return the window; `writes` says whether streams may write to the peers' words."""
        world = self.peers + 1
        bases = [
            self.words[rank > 0].data_ptr() + 4 * SIGNALS_PER_COPY * (2 * rank + copy)
            for rank in range(world)
            for copy in range(2)
        ]
        return _native.GpuWindow(bases, bases, 0, [True, *[writes] * self.peers])

    def call(self, writes: bool, lane: int, size: int) -> Callable[[], None]:
        """Return a function that enqueues one call: `size` bytes (if any) and a signal per peer."""
        rows = []
        for peer in range(1, self.peers + 1):
            if size:
                rows.append([0, lane, COPY, 0, 0, 0, 0, peer, 0, 0, 1, size, -1, -1, 0, 0])
            word = signal_place(Signal(peer, "data", 0, 0))
            rows.append([0, lane, RAISE, 0, peer, word, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
        program = _native.GpuProgram(
            self.rank, self.window(writes), np.array(rows, np.int64), np.empty((0, 4), np.int64),
            (1, 1, self.peers + 1), 1,
        )  # fmt: skip
        target = self.target.data_ptr()
        slots = [self.source.data_ptr(), *(target + i * size for i in range(self.peers))]
        pitches = [max(size, 1)] * len(slots)
        stream = self.stream.cuda_stream
        scratch = torch.zeros(1024, device="cuda:0")

        def run() -> None:
            if lane == CALLER:
                scratch.add_(1)  # the kernel before the signals
            program.call(0, stream, False, slots, pitches)

        return run

    def timed(self, run: Callable[[], None]) -> tuple[float, float, float]:
        """Return us per call: host eager, device eager, device captured."""
        begin, end = new_events()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(2_000_000)  # the device must not wait for the host
            begin.record()
            host = host_us(run, CALLS)
            end.record()
            end.synchronize()
            eager = 1e3 * begin.elapsed_time(end) / CALLS
        return host, eager, self.captured(run)

    def captured(self, run: Callable[[], None]) -> float:
        """Return the device time of a graph, in us per call."""
        with torch.cuda.stream(self.stream):
            graph = captured(lambda: [run() for _ in range(CALLS)])
            graph.replay()
            return 1e3 * device_ms(graph.replay) / CALLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="folder for signals_MACHINE.json"
    )
    folder = Path(parser.parse_args().out)
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"two GPUs are needed, {torch.cuda.device_count()} found")
    torch.cuda.set_device(0)
    rows = []
    for peers in PEERS:
        sender = Sender(peers)
        for where, lane, sizes in (("push lane", LANE, BYTES), ("behind a kernel", CALLER, (0,))):
            for size in sizes:
                calls = {
                    "write": sender.call(True, lane, size), "other": sender.call(False, lane, size)
                }  # fmt: skip
                times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in calls}
                for number in range(WARM + ROUNDS):
                    for kind, run in calls.items():
                        found = sender.timed(run)
                        if number >= WARM:
                            times[kind].append(found)
                rows.append({"where": where, "peers": peers, "bytes": size, **{
                    ("write" if kind == "write" else "copy" if size else "store"): {
                        name: spread([each[i] for each in found])
                        for i, name in enumerate(("host_us", "eager_us", "captured_us"))
                    }
                    for kind, found in times.items()
                }})  # fmt: skip
                print(_line(rows[-1]), flush=True)
    document = {"bench": "signals", **surroundings(), **gpus(), "calls": CALLS, "rows": rows}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"signals_{slug(torch.cuda.get_device_name(0))}x2.json").write_text(
        json.dumps(document, indent=1) + "\n"
    )
    return 0


def _line(row: dict[str, Any]) -> str:
    kinds = [kind for kind in ("write", "copy", "store") if kind in row]
    cells = [
        f"{kind}: " + " ".join(f"{name} {value['median']:.2f}" for name, value in row[kind].items())
        for kind in kinds
    ]
    return f"{row['where']}, {row['peers']} peers, {row['bytes']} B | " + " | ".join(cells)


if __name__ == "__main__":
    raise SystemExit(main())
