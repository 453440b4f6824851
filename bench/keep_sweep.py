"""Store a sweep's results in bench/results: its measurements, and two plots of its report.

    ficco sweep h200 --out DIR && python bench/keep_sweep.py DIR

The script writes sweep_MACHINE.json (the head and all lines except timelines),
sweep_MACHINE_gains.svg and sweep_MACHINE_map.svg. For other grids than h200, the names start with
sweep_GRID_MACHINE. book.py builds the shipped book from the grids h200 and all_reduce. Simulated,
paced and unfinished sweeps are refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from naming import machine_name
from record import commit

from ficco.cli.report.sweep import figures
from ficco.cli.report.sweep.reading import read

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of an executed sweep")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    head: dict[str, Any] = json.loads((args.folder / "sweep.json").read_text())
    if head["how"] != "executed" or head.get("paced"):
        found = f"a {head['how']} sweep, paced: {head.get('paced')}"
        print(f"{args.folder} holds {found}", file=sys.stderr)
        return 1
    sweep = read(args.folder)
    if sweep.unfinished:
        print(
            f"{args.folder} holds an unfinished sweep: {sweep.found} of {head.get('points')} "
            "points have a result, or shapes have not ended; run the same `ficco sweep` to its end",
            file=sys.stderr,
        )
        return 1
    lines = [json.loads(line) for line in (args.folder / "results.jsonl").open()]
    kept = [line for line in lines if line["kind"] != "timeline"]
    grid = "" if head["grid"] == "h200" else f"{head['grid']}_"
    name = f"sweep_{grid}{machine_name(head)}"
    text = json.dumps({"bench": "sweep", "commit": commit(), **head, "lines": "LINES"}, indent=1)
    rows = ",\n  ".join(json.dumps(line) for line in kept)
    (args.out / f"{name}.json").write_text(text.replace('"LINES"', f"[\n  {rows}\n ]") + "\n")
    with mpl.rc_context({"svg.hashsalt": "ficco", "svg.fonttype": "none"}):
        for plot, drawn in (("gains", figures.overview), ("map", figures.schedule_map)):
            drawn(sweep.cases).savefig(args.out / f"{name}_{plot}.svg", metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
