"""Run the examples in the docstrings of ficco's public names, in this process; print failures.

The process is the only rank of a group with gloo. Every docstring finds the group closed, and the
names `ficco`, `np` and `torch`; `...` in an output stands for any text.
"""

from __future__ import annotations

import doctest
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ficco

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> list[doctest.DocTest]:
    """Return the docstrings of public names, and of methods of classes, that have examples."""
    finder = doctest.DocTestFinder()
    names = {"ficco": ficco, "np": np, "torch": torch}
    found = []
    for name in ficco.__all__:
        public = getattr(ficco, name)
        if callable(public):
            found += finder.find(public, f"ficco.{name}", globs=names)
    return [docstring for docstring in found if docstring.examples]


def main() -> int:
    """Return 1 if an example fails, or none is found."""
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        os.chdir(folder)  # examples write files here
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for docstring in examples():
            runner.run(docstring)
            ficco.close()
        dist.destroy_process_group()
    print(f"{runner.tries} examples, {runner.failures} failures")
    return 1 if runner.failures or not runner.tries else 0


if __name__ == "__main__":
    sys.exit(main())
