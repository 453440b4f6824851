"""Helper modules of these tests lie beside them, and beside those of tests/modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "modules")]
