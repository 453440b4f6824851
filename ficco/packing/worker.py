"""A process that compiles for the pack: `ficco.kernels.compile_worker` without a cache."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ficco.kernels import compile_worker

__all__ = ["main"]


def main(capability: int, folder: Path) -> None:
    """Compile the variants from standard input, with an empty Triton cache."""
    import triton

    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        compile_worker.main(capability, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
