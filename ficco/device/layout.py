"""The table by which a kernel finds the windows of all ranks, and this rank's own state.

A table is an int64 tensor on the device. A kernel gets its address as one argument. It is built
from plain addresses, so it describes any memory that this rank's device can access.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficco.operators.problem_checks import MAX_WORLD

# Entries of a table.
RANK = 0
WORLD = 1
TIMEOUT_NS = 2
STATE = 3  # address of this rank's state words
OWN_DATA = 4  # address of this rank's data
OWN_SIGNALS = 5  # address of this rank's signals
DATA_BYTES = 6  # size of each rank's data
SIGNAL_COUNT = 7  # number of each rank's signals
DATA = 8  # address of each rank's data
SIGNALS = DATA + MAX_WORLD  # address of each rank's signals
TABLE = SIGNALS + MAX_WORLD  # number of entries

ALIGN = 16  # bytes; it divides the distance between the data, or the signals, of two ranks

# State words, int32, in this rank's memory.
STATUS = 0  # 0; or what did not arrive: see `ficco.device.windows.missing_in_words`
CALLS = 1  # calls that were counted
DRAWN = 2  # programs of the current call that have been counted
STATE_WORDS = 4


def table_values(
    data: Sequence[int], signals: Sequence[int], state: int, rank: int, timeout_ns: int,
    data_bytes: int, signal_count: int,
) -> list[int]:  # fmt: skip
    """Return the entries of a rank's table.

    Args:
        data: address of each rank's data, as this rank's device sees it.
        signals: address of each rank's signals.
        state: address of this rank's state words.
        rank: this rank.
        timeout_ns: the longest time that a wait may last.
        data_bytes: size of a rank's data.
        signal_count: number of a rank's signals.

    Example:
        >>> table_values([4096, 8192], [5120, 9216], 6144, 1, 10**9, 1024, 4)[:4]
        [1, 2, 1000000000, 6144]
    """
    entries = [0] * TABLE
    entries[RANK], entries[WORLD] = rank, len(data)
    entries[TIMEOUT_NS], entries[STATE] = timeout_ns, state
    entries[OWN_DATA], entries[OWN_SIGNALS] = data[rank], signals[rank]
    entries[DATA_BYTES], entries[SIGNAL_COUNT] = data_bytes, signal_count
    entries[DATA : DATA + len(data)] = data
    entries[SIGNALS : SIGNALS + len(signals)] = signals
    return entries
