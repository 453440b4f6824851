"""Makes the pack: python -m ficco.packing [CAPABILITY ...] [--work FOLDER] [--processes N].

No GPU is needed. It takes Triton as pinned in `building.TRITON`, and some 3 s a kernel and core.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ficco.packing import building, grid

__all__ = ["main"]


def main() -> None:
    """Make the files of the compute capabilities that are asked for; by default of all."""
    parser = argparse.ArgumentParser(prog="python -m ficco.packing", description=__doc__)
    parser.add_argument("capability", type=int, nargs="*", default=sorted(grid.COVERAGE))
    parser.add_argument("--work", type=Path, default=Path("build/packing"), help="kept files")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    for capability in given.capability:
        building.write(
            capability, given.work, given.processes, lambda text: print(text, flush=True)
        )


if __name__ == "__main__":
    main()
