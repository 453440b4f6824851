"""One process that compiles for the pack: as `ficco.kernels.compile_worker`, without a cache."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ficco.kernels import compile_worker

__all__ = ["main"]


def main(capability: int, folder: Path) -> None:
    """Compile what the standard input names; nothing that another compiler has made is found."""
    import triton

    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        compile_worker.main(capability, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
