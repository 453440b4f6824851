"""What every benchmark shares: where it ran, how results are written, medians with their spread."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def surroundings() -> dict[str, Any]:
    """Return machine, versions and date, as they stand in every result."""
    model = platform.processor() or "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    versions = {"python": platform.python_version()}
    for package in ("ficco", "numpy", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "versions": versions,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and interquartile range."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "iqr": round(high - low, 4), "runs": len(values)}


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
