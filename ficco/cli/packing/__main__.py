"""Build the pack of kernels.

    python -m ficco.cli.packing [CAPABILITY ...] [--work FOLDER] [--processes N] [--amd]

No GPU is needed. It needs the Triton version `building.TRITON` and about 3 core-seconds for each
kernel whose sources have changed.
With --amd it builds the code objects for AMD's devices instead, which takes some seconds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ficco.cli.packing import amd, building, grid


def main() -> None:
    """Build the files of the requested compute capabilities; by default of all."""
    parser = argparse.ArgumentParser(prog="python -m ficco.cli.packing", description=__doc__)
    parser.add_argument("capability", type=int, nargs="*", default=sorted(grid.COVERAGE))
    parser.add_argument("--work", type=Path, default=Path("build/packing"), help="work folder")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--amd", action="store_true", help="build the code for AMD's devices")
    options = parser.parse_args()
    if options.amd:
        amd.write()
        return
    for capability in options.capability:
        building.write(
            capability, options.work, options.processes, lambda text: print(text, flush=True)
        )


if __name__ == "__main__":
    main()
