"""Calls of a node that Ctrl-C interrupts: python interrupted_node.py COUNT.

A line says that the calls have begun, and one each that an interrupt was caught. After COUNT of
them a call must be right. Interrupts come during calls alone: elsewhere, and on threads, they are
held.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

import ficco

INTERRUPTS = [signal.SIGINT]


def main(count: int) -> None:
    """Call until there were so many interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    x, w = np.ones((6, 5), np.float32), np.ones((5, 4), np.float32)
    with ficco.Node(3, machine="host") as node:
        node.all_gather_matmul([x] * 3, [w] * 3, schedule="hetero_fused_1d")
        print("calls", flush=True)
        for _ in range(count):
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
                while True:
                    node.all_gather_matmul([x] * 3, [w] * 3, schedule="hetero_fused_1d")
            except KeyboardInterrupt:
                signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
            node.reset()
            print("caught", flush=True)
        (y, *_) = node.all_gather_matmul([x] * 3, [w] * 3, schedule="hetero_fused_1d")
        assert (y == 5).all()


if __name__ == "__main__":
    main(int(sys.argv[1]))
