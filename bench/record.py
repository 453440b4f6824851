"""Functions for all benchmarks: surroundings, writing of results, medians with their spread."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ficco.sweeping import figures
from ficco.sweeping.surroundings import gpus, surroundings

__all__ = ["finish", "gpus", "spread", "surroundings"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and interquartile range."""
    middle, width = figures.spread(values)
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
