"""A rank of `ficco run`, for one operator after another.

python every_operator.py FOLDER RANK WORLD ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from counting import count_lowerings

from ficco.cli.main import main
from ficco.measure import executors
from ficco.operators import OPERATORS

if __name__ == "__main__":
    assert executors  # loaded before lowerings are counted
    folder, rank, world, *arguments = sys.argv[1:]
    lowerings = count_lowerings()
    for op in OPERATORS:
        os.environ |= {
            "RANK": rank, "WORLD_SIZE": world, "FICCO_STORE": str(Path(folder) / op),
        }  # fmt: skip
        code = main(["run", op, *arguments])
        if code:
            sys.exit(code)
    assert set(lowerings.values()) == {1}, lowerings
    # Rank 0's plan says whether a schedule can run; else a rank lowers its own plan only.
    assert {number for *_, number in lowerings} == {0, int(rank)}, lowerings
