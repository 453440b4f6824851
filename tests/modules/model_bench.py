"""bench/model.py, with ranks that are forked: to import PyTorch takes as long as what they do.

python model_bench.py BENCH ARGUMENTS...
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forking
import torch._dynamo  # noqa: F401  (for the ranks)
from rendezvous import give_way

from ficco.measure import launching

if __name__ == "__main__":
    bench = Path(sys.argv.pop(1))
    sys.path.insert(0, str(bench))
    forking.fork_from_here()
    give_way()
    launching.subprocess = SimpleNamespace(Popen=forking.forked_rank, STDOUT=subprocess.STDOUT)
    sys.argv[0] = str(bench / "model.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
