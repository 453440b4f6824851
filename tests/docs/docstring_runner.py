"""Run the examples in the docstrings of public names, in this process; print failures.

The names are those of ficco, and of the modules of ficco.device that have no device code.

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
from ficco.device import declared, layout, windows

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples() -> list[doctest.DocTest]:
    """Return the docstrings of public names, and of methods of classes, that have examples."""
    finder = doctest.DocTestFinder()
    names = {"ficco": ficco, "np": np, "torch": torch, **vars(declared), **vars(layout)}
    found = [
        *finder.find(declared, globs=names), *finder.find(layout, globs=names),
        *finder.find(windows, globs=vars(windows) | names),
    ]  # fmt: skip
    for name in ficco.__all__:
        public = getattr(ficco, name)
        if callable(public) and public is not windows.window:
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
