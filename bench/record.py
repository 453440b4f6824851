"""Functions for all benchmarks: surroundings, writing of results, medians with their spread."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ficco.cli.sweeping import folder, results
from ficco.cli.sweeping.folder import gpus

__all__ = ["commit", "finish", "gpus", "spread", "surroundings"]

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "BENCH_COMMIT"  # names the commit where a copy of the files has no history


def commit() -> str:
    """Return the commit of the checkout, with "+changes" if tracked files differ from it.

    Raises:
        SystemExit: the files are in no checkout, and BENCH_COMMIT is not set.
    """
    if given := os.environ.get(COMMIT):
        return given
    git = ["git", "-C", str(ROOT)]
    try:
        asked = [*git, "rev-parse", "--show-toplevel", "HEAD"]
        top, head = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
        if Path(top).resolve() != ROOT:
            raise OSError(f"{ROOT} is not the top of a checkout; {top} is")
        asked = [*git, "status", "--porcelain", "--untracked-files=no"]
        changes = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"a result names its commit, and git found none in {ROOT}: "
            f"{getattr(error, 'stderr', '') or error}. Run the script in a checkout, or set "
            f"{COMMIT} to the output of `git rev-parse HEAD`"
        ) from error
    return f"{head}+changes" if changes else head


def surroundings() -> dict[str, Any]:
    """Return commit, machine, versions and date, which every result contains."""
    return {"commit": commit(), **folder.surroundings()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and interquartile range."""
    middle, width = results.spread(values)
    return {"median": round(middle, 4), "iqr": round(width, 4), "runs": len(values)}


def finish(name: str, result: dict[str, Any], checks: dict[str, bool]) -> int:
    """Print or write a result; return 0 if every check held, else 1."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", metavar="FOLDER", help=f"write {name}.json into this folder")
    args = parser.parse_args()
    document = {"bench": name, **surroundings(), **result, "checks": checks}
    text = json.dumps(document, indent=1)
    if args.out:
        Path(args.out, f"{name}.json").write_text(text + "\n")
    if args.json or not args.out:
        print(text)
    for check, held in checks.items():
        if not held:
            print(f"does not hold: {check}", file=sys.stderr)
    return 0 if all(checks.values()) else 1
