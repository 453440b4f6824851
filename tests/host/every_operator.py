"""A rank of `ficco run`, for one operator after another.

python every_operator.py FOLDER RANK WORLD ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ficco.cli.main import main
from ficco.operators import OPERATORS

if __name__ == "__main__":
    folder, rank, world, *arguments = sys.argv[1:]
    for op in OPERATORS:
        os.environ |= {
            "RANK": rank, "WORLD_SIZE": world, "FICCO_STORE": str(Path(folder) / op),
        }  # fmt: skip
        code = main(["run", op, *arguments])
        if code:
            sys.exit(code)
